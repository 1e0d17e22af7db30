"""Decode workers of unequal pools in the simulated cluster: the large one dies while only it can hold some streams."""

from dataclasses import replace

import pytest

from router.fleet.membership import ABSENCE_S
from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.mishaps import Kind, Mishap, Phase
from tests.chaos.simulated.schedules.schedule import Ask, plain_schedule
from tests.chaos.simulated.world import Result, run_schedule

_BACK_S, _NEVER_S = 8.0, 200.0  # the latter is longer than any request's time
_AT_ONCE_S = 0.1


def _run(phase: Phase, for_s: float) -> Result:
    """Run two long requests and a short one. The decode worker that runs the first long one dies."""
    schedule = replace(
        plain_schedule(1),
        num_routers=1,
        num_prefills=2,
        num_decodes=2,
        decode_blocks=(48, 6),
        step_s=0.1,
        asks=(Ask(0.0, 0, 0, 8, 20, 28), Ask(0.0, 0, 0, 8, 20, 28, n=2), Ask(0.5, 0, 1, 0, 6, 8)),
        mishaps=(Mishap(Kind.KILL, "decode", 0, at_s=0.0, for_s=for_s, phase=phase),),
    )
    with simulated_machine():
        return run_schedule(schedule)


@pytest.mark.parametrize("phase", [Phase.FIRST_TOKEN, Phase.PULLING, Phase.DECODING])
def test_streams_wait_for_a_large_worker_and_continue(phase: Phase) -> None:
    result = _run(phase, _BACK_S)
    assert not result.violations, result.violations
    assert result.outcomes == {"ok": 3}
    ends_s = [at_s for at_s, who, what in result.happened if who.startswith("client") and "has everything" in what]
    assert max(ends_s) > _BACK_S, "none of them waited"


def test_without_a_large_worker_streams_end_with_a_named_reason_at_their_deadline_and_leave_nothing() -> None:
    result = _run(Phase.DECODING, _NEVER_S)
    lost = [violation for violation in result.violations if "is lost" in violation]
    assert len(lost) == 2 and lost == list(result.violations), result.violations
    assert all("no_worker_large_enough" in violation for violation in lost), lost
    assert result.outcomes == {"ok": 1, "no_worker_large_enough": 2}


def test_a_request_too_large_for_every_member_is_refused_before_any_worker_is_asked() -> None:
    """The refusal comes at once, unless the router has just started: a larger worker may then only be absent."""
    asks = tuple(Ask(at_s, 0, 0, 0, num_tokens=20, max_tokens=28) for at_s in (0.0, ABSENCE_S + 1.0))
    with simulated_machine():
        result = run_schedule(replace(plain_schedule(1), decode_blocks=(6,), asks=asks))
    assert result.outcomes == {"no_worker_large_enough": 2} and not result.violations
    for client, least_s, most_s in (("client0", ABSENCE_S - 1.0, ABSENCE_S), ("client1", 0.0, _AT_ONCE_S)):
        asked_s, heard_s = (at_s for at_s, who, _ in result.happened if who == client)
        assert least_s < heard_s - asked_s < most_s
    asked = {method for _, method, _, _, kind in result.trace if kind in ("PrefillRequest", "StartRequest")}
    assert not asked, asked
