"""Simulated clusters whose secret is rotated while requests run, and whose members' calls come out of turn or are sent
again by an eavesdropper."""

from dataclasses import replace
from unittest import mock

from cluster.auth.sessions import Window
from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.mix import SEPARATE, ProofFaults, Rotation, Wires
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import Result, run_schedule

_ROTATION = Rotation(steps_s=(0.5, 1.7, 2.9), spread_s=0.1)
_PROOFS = ProofFaults(out_of_turn_share=1.0, num_replays=8)


def _schedule(*, wires: Wires | None, rotation: Rotation | None = None, proofs: ProofFaults | None = None) -> Schedule:
    asks = tuple(Ask(at_s, 0, 0, 0, num_tokens=20, max_tokens=20) for at_s in (0.0, 0.6, 1.8, 2.9, 3.0, 14.0))
    plain = replace(plain_schedule(1), num_routers=1, num_prefills=1, num_decodes=2, asks=asks)
    return replace(plain, mix=replace(SEPARATE, wires=wires, rotation=rotation, proofs=proofs))


def _run(schedule: Schedule) -> Result:
    with simulated_machine():
        return run_schedule(schedule)


def test_a_rotated_secret_loses_no_request_and_ends_the_streams_that_it_opened() -> None:
    for wires in (None, Wires()):
        result = _run(schedule := _schedule(wires=wires, rotation=_ROTATION))
        assert not result.violations, result.violations
        assert result.outcomes == {"ok": len(schedule.asks)}
        assert result.reached["frames: stream ended with its secret"]


def test_calls_out_of_turn_are_served_and_calls_that_are_sent_again_are_not() -> None:
    result = _run(schedule := _schedule(wires=Wires(), proofs=_PROOFS))
    assert not result.violations, result.violations
    assert result.outcomes == {"ok": len(schedule.asks)}
    for what in ("far ahead", "overtaken", "replayed", "of a call sent again"):
        assert result.reached[f"proofs: {what}"], what


def test_a_callee_that_accepts_counters_twice_is_found() -> None:
    with mock.patch.object(Window, "accept", return_value=True):
        result = _run(_schedule(wires=Wires(), proofs=_PROOFS))
    assert any("an eavesdropper has recorded" in violation for violation in result.violations)
