"""Schedules in which workers export to each other with pools that hold one long sequence. The room that the batch
leaves for hand-offs cannot prevent that each waits until another one reads its export.
"""

from collections import Counter
from dataclasses import replace

import pytest

from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.mix import DirectAsk, Mix
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import Result, run_schedule

_PLACES = ("prefill0", "decode0", "prefill1", "decode1", "decode2", "decode3")
_NUM_PROMPT = 60  # tokens: 15 blocks
_NUM_BLOCKS = 26  # of each pool: one prompt, and not two
_LEASE_ENDS_S = 12.0  # the longest lease of a simulated exporter


def _row(num_workers: int, *, is_closed: bool, num_each: int = 1, num_blocks: int = _NUM_BLOCKS) -> Schedule:
    """Return a schedule in which each worker exports a prompt to the next one, and in a closed row the last one to the
    first."""
    places = _PLACES[:num_workers]
    pairs = list(zip(places, (*places[1:], places[0]), strict=True))[: num_workers if is_closed else -1]
    asks = [DirectAsk(0.0, *pair, 0, 0, _NUM_PROMPT, 4) for pair in pairs for _ in range(num_each)]
    return replace(
        plain_schedule(num_workers),
        num_routers=1,
        num_prefills=2,
        num_decodes=4,
        prefill_blocks=(num_blocks,),
        decode_blocks=(num_blocks,),
        latency_s=0.02,
        asks=(Ask(5.0, 0, 0, 0, 8, 4),),
        mishaps=(),
        mix=Mix(direct_asks=tuple(asks), of_both=places),
    )


def _run(schedule: Schedule) -> Result:
    with simulated_machine():
        result = run_schedule(schedule)
    assert not result.violations, result.violations
    assert result.outcomes == Counter(ok=1)
    assert result.simulated_s < _LEASE_ENDS_S, f"{result.simulated_s:.1f} s"
    assert not result.reached["lease: running > lapsed"]
    return result


@pytest.mark.parametrize("num_workers", [2, 3, 6])
def test_one_hand_off_is_refused_where_full_workers_wait_for_each_others_imports(num_workers: int) -> None:
    reached = _run(_row(num_workers, is_closed=True)).reached
    assert reached["direct request: not_enough_blocks"] == 1
    assert reached["direct request: ok"] == num_workers - 1


@pytest.mark.parametrize("num_workers", [2, 3, 6])
def test_no_hand_off_is_refused_in_a_row_of_full_workers(num_workers: int) -> None:
    reached = _run(_row(num_workers, is_closed=False)).reached
    assert reached["direct request: ok"] == num_workers - 1


def test_no_hand_off_is_refused_where_pools_hold_two_long_sequences() -> None:
    reached = _run(_row(3, is_closed=True, num_each=4, num_blocks=2 * _NUM_BLOCKS)).reached
    assert reached["direct request: ok"] == 12
