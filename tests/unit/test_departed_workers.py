"""Workers that left are remembered for a while: a request that only they can hold waits for their return."""

from cluster.member import Member
from cluster.messages import MemberId, Role
from router.fleet.departed_workers import KEPT_S, DepartedWorkers


def _member(name: str, incarnation: str = "1") -> Member:
    return Member(id=MemberId(name, incarnation), role=Role.DECODE, address="", model="m")


def test_a_worker_that_left_is_remembered_for_a_while() -> None:
    departed, one, other = DepartedWorkers(), _member("d0"), _member("d1")
    departed.note([one, other], 0.0)
    assert departed.members(1.0) == []
    departed.note([other], 10.0)
    assert departed.members(10.0) == departed.members(9.9 + KEPT_S) == [one]
    assert departed.members(10.0 + KEPT_S) == []


def test_a_worker_that_is_back_is_not_remembered_as_it_was() -> None:
    departed = DepartedWorkers()
    departed.note([_member("d0")], 0.0)
    departed.note([], 1.0)
    departed.note([_member("d0", "2")], 2.0)
    assert departed.members(2.0) == []


def test_what_left_long_ago_is_dropped() -> None:
    departed = DepartedWorkers()
    for number in range(100):
        departed.note([_member(f"d{number}")], number * KEPT_S)
    assert len(departed._departed) == 1
