"""Whose grammar is compiled next, and which source has used up its compile time."""

import pytest

from cluster.accounts.keys import Caller
from cluster.errors import LimitReached, Overloaded
from router.grammars.compile_turns import COMPILE_LIMIT, CompileTurns, source_of

_LONGEST_S = 0.4  # the CPU time at which a compilation is ended


def test_one_source_never_has_both_slots() -> None:
    turns = CompileTurns[str](2)
    for name in ("a1", "a2", "b1", "c1"):
        turns.ask(name[0], name, 0.0)
    assert [turns.start(0.0) for _ in range(3)] == ["a1", "b1", None]
    assert turns.end("a", 0.1, 0.1) == []
    assert [turns.start(0.1) for _ in range(2)] == ["c1", None], "the source that has used nothing is next"
    turns.end("b", 0.3, 0.3)
    assert [turns.start(0.3) for _ in range(2)] == ["a2", None]
    turns.end("a", 0.1, 0.4)
    turns.end("c", 0.1, 0.4)
    turns.check()


def test_a_source_that_floods_is_refused_for_as_long_as_its_budget_needs_and_no_other_source_is() -> None:
    turns, now_s, num_compiled = CompileTurns[int](2), 0.0, 0
    for number in range(100):
        turns.ask("flood", number, now_s)
    refused: list[int] = []
    while not refused:
        assert turns.start(now_s) == num_compiled
        num_compiled += 1
        now_s += _LONGEST_S
        refused = turns.end("flood", _LONGEST_S, now_s)
    assert num_compiled == 13, "4 s, and 0.2 s more for each second that passed"
    assert refused == list(range(13, 100)) and turns.start(now_s) is None
    with pytest.raises(LimitReached, match=COMPILE_LIMIT) as error:
        turns.ask("flood", 0, now_s)
    wait_s = error.value.retry_after_s
    assert wait_s is not None and wait_s == turns.refusal("flood", now_s).retry_after_s
    turns.ask("other", 200, now_s)
    assert turns.start(now_s) == 200
    turns.ask("flood", 300, now_s + wait_s + 1e-6)
    assert turns.start(now_s + wait_s + 1e-6) == 300


def test_waiting_jobs_are_bounded_for_each_source_and_for_all() -> None:
    turns = CompileTurns[int](1)
    for number in range(128):
        turns.ask("a", number, 0.0)
    with pytest.raises(LimitReached, match=COMPILE_LIMIT):
        turns.ask("a", 128, 0.0)
    for source in ("b", "c", "d"):
        for number in range(128):
            turns.ask(source, number, 0.0)
    with pytest.raises(Overloaded, match="too many grammars"):
        turns.ask("e", 0, 0.0)


def test_sources_are_forgotten_but_not_while_their_grammars_wait() -> None:
    turns = CompileTurns[str](2)
    turns.ask("waits", "first", 0.0)
    turns.ask("waits", "second", 0.0)
    assert turns.start(0.0) == "first"
    for number in range(5_000):
        turns.ask(f"address {number}", "", 0.0)
        assert turns.start(0.0) == ""
        turns.end(f"address {number}", 0.001, 0.0)
    assert len(turns._sources) <= 4_096
    turns.end("waits", 0.001, 0.0)
    assert turns.start(0.0) == "second"


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("", "10.0.0.1", False),
    ],
)
def test_an_address_stands_for_its_host_and_in_ipv6_for_its_network(first: str, second: str, are_one: bool) -> None:
    assert (source_of(Caller(), first) == source_of(Caller(), second)) is are_one


def test_keys_of_one_tenant_are_one_source_at_every_address() -> None:
    acme, other = Caller("acme", "k1"), Caller("other", "k3")
    assert source_of(acme, "10.0.0.1") == source_of(Caller("acme", "k2"), "10.0.0.2")
    assert source_of(acme, "10.0.0.1") != source_of(other, "10.0.0.1")
