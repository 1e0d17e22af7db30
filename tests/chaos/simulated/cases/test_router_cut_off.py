"""A router that is cut off from all workers, Redis and its clients keeps its requests, and they keep their attempts.

A request has two attempts here: the loss of each of three silent decode workers would end it. One attempt may fail by a
ticket that expired in the meantime.
"""

from collections import Counter
from dataclasses import replace

import pytest

from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.mishaps import Kind, Mishap, Phase
from tests.chaos.simulated.schedules.schedule import Ask, plain_schedule
from tests.chaos.simulated.world import Result, run_schedule

_ASKS = (Ask(0.0, 0, 0, 8, 20, 28), Ask(0.0, 0, 0, 8, 30, 20, n=2), Ask(0.1, 0, 1, 0, 6, 40), Ask(0.2, 0, 1, 0, 9, 1))
_CUTS_S = (2.0, 2.5, 3.5, 7.0, 18.0)  # a check is missed, workers count as lost, connections end by keepalive
_POOLS = ((2, 3), (1, 1), (0, 1))  # prefill and decode workers; the last one never has another worker to compare with


def _run(seed: int, phase: Phase, for_s: float, pools: tuple[int, int]) -> Result:
    num_prefills, num_decodes = pools
    schedule = replace(
        plain_schedule(seed),
        num_routers=1,
        num_prefills=num_prefills,
        num_decodes=num_decodes,
        step_s=0.1,
        asks=_ASKS,
        mishaps=(Mishap(Kind.CUT, "router", 0, at_s=0.0, for_s=for_s, phase=phase),),
        max_attempts=2,
    )
    return run_schedule(schedule)


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.FIRST_TOKEN, Phase.DECODING])
def test_requests_wait_for_the_link_and_keep_their_attempts(phase: Phase) -> None:
    reached = Counter[str]()
    with simulated_machine():
        for seed, for_s in enumerate(_CUTS_S):
            for pools in _POOLS:
                result = _run(seed, phase, for_s, pools)
                assert not result.violations, f"{for_s} s, {pools}: {result.violations}"
                assert result.outcomes == {"ok": len(_ASKS)}
                reached += result.reached
    assert reached["error: all_workers_silent"], "no worker counted as lost"
    assert not any(count for name, count in reached.items() if name.startswith("counted: hedges"))
