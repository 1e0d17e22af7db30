"""Deregistered workers are remembered for a limited time: a request that only they can hold waits for their return."""

from cluster.member import Member
from cluster.messages import MemberId, Role
from router.fleet.membership import ABSENCE_S, DeregisteredWorkers


def _member(name: str, incarnation: str = "1") -> Member:
    return Member(id=MemberId(name, incarnation), role=Role.DECODE, address="", model="m")


def test_a_deregistered_worker_is_remembered_for_a_limited_time() -> None:
    deregistered, one, other = DeregisteredWorkers(), _member("d0"), _member("d1")
    deregistered.note([one, other], 0.0)
    assert deregistered.members(1.0) == []
    deregistered.note([other], 10.0)
    assert deregistered.members(10.0) == deregistered.members(9.9 + ABSENCE_S) == [one]
    assert deregistered.members(10.0 + ABSENCE_S) == []


def test_a_worker_that_registered_again_is_no_longer_deregistered() -> None:
    deregistered = DeregisteredWorkers()
    deregistered.note([_member("d0")], 0.0)
    deregistered.note([], 1.0)
    deregistered.note([_member("d0", "2")], 2.0)
    assert deregistered.members(2.0) == []


def test_a_worker_deregistered_long_ago_is_removed() -> None:
    deregistered = DeregisteredWorkers()
    for number in range(100):
        deregistered.note([_member(f"d{number}")], number * ABSENCE_S)
    assert len(deregistered._deregistered) == 1
