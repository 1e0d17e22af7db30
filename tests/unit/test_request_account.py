"""The phase ledger: always exactly one phase, so the parts sum to the wall time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.observe.telemetry import Telemetry
from router.request.account import PhaseName, RequestAccount
from router.requests import ChoiceDelta, WorkerTime


@given(
    steps=st.lists(st.tuples(st.sampled_from(PhaseName), st.floats(0, 100), st.floats(0, 200)), max_size=30),
    tail_s=st.floats(0, 10),
)
def test_phases_sum_to_the_wall_time_whatever_times_other_clocks_report(
    steps: list[tuple[PhaseName, float, float]], tail_s: float
) -> None:
    """Each step gives the phase that begins, the time since the step before, and the reported age of the phase."""
    now_s = 1000.0
    account = RequestAccount(Telemetry(), now_s)
    for phase, passed_s, ago_s in steps:
        now_s += passed_s
        account.enter(phase, now_s - ago_s)
    account.end(now_s + tail_s)
    ledger = account.ledger(now_s + 50)
    assert sum(phase.duration_s for phase in ledger.phases) == pytest.approx(ledger.wall_s, abs=1e-6)
    assert ledger.wall_s == pytest.approx(now_s + tail_s - 1000.0)
    assert all(phase.duration_s >= 0 for phase in ledger.phases)
    assert len({phase.name for phase in ledger.phases}) == len(ledger.phases)


def test_the_times_of_a_repeated_phase_are_added() -> None:
    account = RequestAccount(Telemetry(), 0.0)
    for phase, at_s in ((PhaseName.DECODE, 1.0), (PhaseName.RETRY, 3.0), (PhaseName.DECODE, 3.5)):
        account.enter(phase, at_s)
    account.end(6.0)
    assert {phase.name: phase.duration_s for phase in account.ledger(6.0).phases} == {
        "tokenize": 1.0,
        "decode": 4.5,
        "retry": 0.5,
    }


def test_the_first_token_time_is_that_of_the_first_delivered_token() -> None:
    account = RequestAccount(Telemetry(), 10.0)
    account.record_delivery((ChoiceDelta(0, 0, (7,)),), 12.0)
    account.record_delivery((ChoiceDelta(0, 0, (7,)),), 13.0)
    account.end(14.0)
    assert account.ledger(15.0).ttft_s == 2.0


def test_members_are_listed_once_in_the_order_of_their_first_use() -> None:
    account = RequestAccount(Telemetry(), 0.0)
    for member in ("p@1", "d@1", "p@1", "d@2"):
        account.add_member(member)
    account.add_transfer("tcp", 100)
    account.add_transfer("shm", 50)
    ledger = account.ledger(1.0)
    assert ledger.members == ("p@1", "d@1", "d@2")
    assert (ledger.transport, ledger.kv_bytes) == ("shm", 150)


def test_worker_times_are_listed_beside_the_phases_and_do_not_change_them() -> None:
    account = RequestAccount(Telemetry(), 10.0)
    account.enter(PhaseName.RETRY, 11.0)
    account.add_worker_time("p@1", 14.0, queue_s=1.0, compute_s=0.5)
    account.end(15.0)
    ledger = account.ledger(15.0)
    assert ledger.worker_times == (WorkerTime("p@1", 4.0, 1.0, 0.5),)
    assert sum(phase.duration_s for phase in ledger.phases) == ledger.wall_s
