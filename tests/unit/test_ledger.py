"""The phase ledger: always exactly one phase, so the parts sum to the wall time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.ledger import LedgerRecorder, PhaseName
from router.requests import WorkerTime


@given(
    steps=st.lists(st.tuples(st.sampled_from(PhaseName), st.floats(0, 100), st.floats(0, 200)), max_size=30),
    tail_s=st.floats(0, 10),
)
def test_phases_sum_to_the_wall_time_whatever_other_clocks_say(
    steps: list[tuple[PhaseName, float, float]], tail_s: float
) -> None:
    """Each step: what begins, how long after the one before it is told, and how long ago it is said to have begun."""
    now_s = 1000.0
    recorder = LedgerRecorder(now_s)
    for phase, passed_s, ago_s in steps:
        now_s += passed_s
        recorder.enter(phase, now_s - ago_s)
    recorder.end(now_s + tail_s)
    ledger = recorder.ledger(now_s + 50)
    assert sum(phase.duration_s for phase in ledger.phases) == pytest.approx(ledger.wall_s, abs=1e-6)
    assert ledger.wall_s == pytest.approx(now_s + tail_s - 1000.0)
    assert all(phase.duration_s >= 0 for phase in ledger.phases)
    assert len({phase.name for phase in ledger.phases}) == len(ledger.phases)


def test_a_phase_that_is_entered_again_goes_on_adding_up() -> None:
    recorder = LedgerRecorder(0.0)
    for phase, at_s in ((PhaseName.DECODE, 1.0), (PhaseName.RETRY, 3.0), (PhaseName.DECODE, 3.5)):
        recorder.enter(phase, at_s)
    recorder.end(6.0)
    assert {phase.name: phase.duration_s for phase in recorder.ledger(6.0).phases} == {
        "tokenize": 1.0,
        "decode": 4.5,
        "retry": 0.5,
    }


def test_the_first_token_is_the_first_one_handed_over() -> None:
    recorder = LedgerRecorder(10.0)
    recorder.token_handed_over(12.0)
    recorder.token_handed_over(13.0)
    recorder.end(14.0)
    assert recorder.ledger(15.0).ttft_s == 2.0


def test_members_stand_in_the_order_they_joined_and_once() -> None:
    recorder = LedgerRecorder(0.0)
    for member in ("p@1", "d@1", "p@1", "d@2"):
        recorder.member(member)
    recorder.moved("tcp", 100)
    recorder.moved("shm", 50)
    ledger = recorder.ledger(1.0)
    assert ledger.members == ("p@1", "d@1", "d@2")
    assert (ledger.transport, ledger.kv_bytes) == ("shm", 150)


def test_what_workers_spent_stands_beside_the_phases_and_changes_none() -> None:
    recorder = LedgerRecorder(10.0)
    recorder.enter(PhaseName.RETRY, 11.0)
    recorder.worked("p@1", 14.0, queue_s=1.0, compute_s=0.5)
    recorder.end(15.0)
    ledger = recorder.ledger(15.0)
    assert ledger.worker_times == (WorkerTime("p@1", 4.0, 1.0, 0.5),)
    assert sum(phase.duration_s for phase in ledger.phases) == ledger.wall_s
