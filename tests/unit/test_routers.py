"""Which routers a client knows, and how it hears of them."""

from collections.abc import Callable, MutableSequence
from typing import Any

import pytest

from tandem.routers import ROUTERS_KEY, Routers


class Dialled:
    """Channels by address, in order; nothing is ever connected."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def __call__(self, address: str) -> Any:
        self.addresses.append(address)
        return _Channel(address)


class _Channel:
    def __init__(self, address: str) -> None:
        self.address = address

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *_, **__: None


def routers(*given: str, discover: bool = True) -> tuple[Routers[Any], Dialled]:
    dialled = Dialled()
    return Routers(given, dialled, discover=discover, shuffle=_in_order), dialled


def _in_order(found: MutableSequence[str]) -> None:
    found[:] = sorted(found)


def told(*addresses: str) -> list[tuple[str, str]]:
    return [("other", "x"), (ROUTERS_KEY, ",".join(addresses))]


def test_the_routers_that_an_answer_names_are_known_and_dialled_when_they_are_needed() -> None:
    known, dialled = routers("a:1")
    known.learn("a:1", told("a:1", "c:1", "b:1"))
    assert known.known() == ("a:1", "b:1", "c:1")
    assert dialled.addresses == ["a:1"]
    known.stub("c:1")
    known.stub("c:1")
    assert dialled.addresses == ["a:1", "c:1"]


def test_who_is_named_no_more_is_forgotten_and_who_was_given_never() -> None:
    known, _ = routers("a:1", "b:1")
    known.learn("a:1", told("a:1", "c:1"))
    known.learn("c:1", told("c:1", "d:1"))
    assert known.known() == ("a:1", "b:1", "c:1", "d:1")
    known.learn("a:1", told("a:1"))
    assert known.known() == ("a:1", "b:1")


def test_a_router_behind_another_address_is_not_known_twice() -> None:
    known, _ = routers("balancer:1")
    known.learn("balancer:1", told("10.0.0.1:1", "10.0.0.2:1"))
    assert known.known() == ("balancer:1", "10.0.0.2:1")
    known.learn("10.0.0.2:1", told("10.0.0.2:1", "10.0.0.1:1"))
    assert known.known() == ("balancer:1", "10.0.0.2:1")


def test_the_loopback_of_another_machine_is_not_ours() -> None:
    known, _ = routers("far:1")
    known.learn("far:1", told("127.0.0.1:1", "127.0.0.1:2"))
    assert known.known() == ("far:1",)
    near, _ = routers("localhost:1")
    near.learn("localhost:1", told("127.0.0.1:1", "127.0.0.1:2"))
    assert near.known() == ("localhost:1", "127.0.0.1:2")


@pytest.mark.parametrize("metadata", [None, [], [("other", "x")], [(ROUTERS_KEY, "")]])
def test_an_answer_that_names_none_changes_nothing(metadata: list[tuple[str, str]] | None) -> None:
    known, _ = routers("a:1")
    known.learn("a:1", told("a:1", "b:1"))
    known.learn("a:1", metadata)
    assert known.known() == ("a:1", "b:1")


def test_who_does_not_want_to_be_told_knows_the_given_ones_alone() -> None:
    known, _ = routers("a:1", discover=False)
    known.learn("a:1", told("a:1", "b:1"))
    assert known.known() == ("a:1",)


def test_a_call_begins_with_the_one_that_answered_last() -> None:
    known, _ = routers("a:1", "b:1")
    known.learn("a:1", told("a:1", "c:1"))
    known.first = "c:1"
    assert list(known.in_turn()) == ["c:1", "a:1", "b:1"]
    known.first = "long-gone:1"
    assert list(known.in_turn()) == ["a:1", "b:1", "c:1"]


def test_channels_to_routers_long_gone_are_given_up_before_they_are_too_many() -> None:
    known, dialled = routers("a:1")
    closed = []
    for number in range(200):
        closed += known.learn("a:1", told("a:1", f"b{number}:1"))
        known.stub(f"b{number}:1")
    assert [channel.address for channel in closed] == [f"b{number}:1" for number in range(len(closed))]
    assert len(dialled.addresses) - len(closed) <= 65
