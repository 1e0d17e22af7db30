"""The list of routers that a client keeps: configured addresses and those named in responses."""

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


def test_routers_named_in_a_response_are_stored_and_dialled_when_needed() -> None:
    known, dialled = routers("a:1")
    known.learn("a:1", told("a:1", "c:1", "b:1"))
    assert known.known() == ("a:1", "b:1", "c:1")
    assert dialled.addresses == []
    known.stub("c:1")
    known.stub("c:1")
    assert dialled.addresses == ["c:1"]


def test_routers_no_longer_named_are_removed_and_configured_routers_are_kept() -> None:
    known, _ = routers("a:1", "b:1")
    known.learn("a:1", told("a:1", "c:1"))
    known.learn("c:1", told("c:1", "d:1"))
    assert known.known() == ("a:1", "b:1", "c:1", "d:1")
    known.learn("a:1", told("a:1"))
    assert known.known() == ("a:1", "b:1")


def test_a_router_behind_another_address_is_not_stored_twice() -> None:
    known, _ = routers("balancer:1")
    known.learn("balancer:1", told("10.0.0.1:1", "10.0.0.2:1"))
    assert known.known() == ("balancer:1", "10.0.0.2:1")
    known.learn("10.0.0.2:1", told("10.0.0.2:1", "10.0.0.1:1"))
    assert known.known() == ("balancer:1", "10.0.0.2:1")


def test_the_loopback_address_of_another_machine_is_not_this_machine() -> None:
    known, _ = routers("far:1")
    known.learn("far:1", told("127.0.0.1:1", "127.0.0.1:2"))
    assert known.known() == ("far:1",)
    near, _ = routers("localhost:1")
    near.learn("localhost:1", told("127.0.0.1:1", "127.0.0.1:2"))
    assert near.known() == ("localhost:1", "127.0.0.1:2")


@pytest.mark.parametrize("metadata", [None, [], [("other", "x")], [(ROUTERS_KEY, "")]])
def test_a_response_that_names_no_router_does_not_change_the_list(metadata: list[tuple[str, str]] | None) -> None:
    known, _ = routers("a:1")
    known.learn("a:1", told("a:1", "b:1"))
    known.learn("a:1", metadata)
    assert known.known() == ("a:1", "b:1")


def test_without_discovery_only_the_configured_routers_are_used() -> None:
    known, _ = routers("a:1", discover=False)
    known.learn("a:1", told("a:1", "b:1"))
    assert known.known() == ("a:1",)


def test_a_call_begins_with_the_router_that_answered_last() -> None:
    known, _ = routers("a:1", "b:1")
    known.learn("a:1", told("a:1", "c:1"))
    known.first = "c:1"
    assert list(known.in_turn()) == ["c:1", "a:1", "b:1"]
    known.first = "long-gone:1"
    assert list(known.in_turn()) == ["a:1", "b:1", "c:1"]


def test_the_oldest_channels_to_removed_routers_are_closed_beyond_a_bound() -> None:
    known, dialled = routers("a:1")
    closed = []
    for number in range(200):
        closed += known.learn("a:1", told("a:1", f"b{number}:1"))
        known.stub(f"b{number}:1")
    assert [channel.address for channel in closed] == [f"b{number}:1" for number in range(len(closed))]
    assert len(dialled.addresses) - len(closed) <= 65
