"""The life of a pair's communicator: every move that is legal, no other one, and no pair is tried without end."""

import itertools
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transports.nccl.pair import IllegalMove, PairLife, PairLimits, PairState

LIMITS = PairLimits(retry_s=10.0, max_retry_s=45.0)
NOW_S = 100.0

# What each event does, and from where it may come; `poison` alone is welcome everywhere.
EVENTS: dict[str, tuple[Callable[[PairLife], None], set[PairState]]] = {
    "begin": (lambda life: life.begin(NOW_S), {PairState.ABSENT}),
    "withdraw": (lambda life: life.withdraw(), {PairState.AGREEING}),
    "agreed": (lambda life: life.agreed(NOW_S), {PairState.AGREEING}),
    "initialised": (lambda life: life.initialised(NOW_S), {PairState.INITIALISING}),
    "warmed": (lambda life: life.warmed(), {PairState.WARMING}),
    "start": (lambda life: life.start_transfer(life.number + 1, NOW_S), {PairState.IDLE}),
    "end": (lambda life: life.end_transfer(), {PairState.TRANSFERRING}),
    "poison": (lambda life: life.poison("broken"), set(PairState)),
    "abort": (lambda life: life.abort(NOW_S), {PairState.POISONED}),
    "aborted": (lambda life: life.aborted(NOW_S), {PairState.ABORTING}),
    "closed": (lambda life: life.aborted(NOW_S, failed=False), {PairState.ABORTING}),
}
PATHS: dict[PairState, list[str]] = {
    PairState.ABSENT: [],
    PairState.AGREEING: ["begin"],
    PairState.INITIALISING: ["begin", "agreed"],
    PairState.WARMING: ["begin", "agreed", "initialised"],
    PairState.IDLE: ["begin", "agreed", "initialised", "warmed"],
    PairState.TRANSFERRING: ["begin", "agreed", "initialised", "warmed", "start"],
    PairState.POISONED: ["begin", "poison"],
    PairState.ABORTING: ["begin", "poison", "abort"],
    PairState.UNUSABLE: ["begin", "poison", "abort", "aborted"],
}


def life_in(state: PairState) -> PairLife:
    life = PairLife(LIMITS)
    for event in PATHS[state]:
        EVENTS[event][0](life)
    assert life.state is state
    return life


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PairState, EVENTS)))
def test_an_event_is_taken_exactly_where_it_makes_sense(state: PairState, event: str) -> None:
    life = life_in(state)
    perform, allowed = EVENTS[event]
    if state in allowed:
        perform(life)
    else:
        with pytest.raises(IllegalMove, match=state):
            perform(life)
        assert life.state is state


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=60))
def test_nothing_is_transferred_without_a_warm_communicator_and_an_abort_ends_every_failure(events: list[str]) -> None:
    life = PairLife(LIMITS)
    seen = [life.state]
    for event in events:
        with suppress(IllegalMove):
            EVENTS[event][0](life)
        if life.state is not seen[-1]:
            seen.append(life.state)
    for before, state in itertools.pairwise(seen):
        if state is PairState.TRANSFERRING:
            assert before is PairState.IDLE
        if before is PairState.POISONED:
            assert state is PairState.ABORTING
        if state is PairState.IDLE:
            assert before in (PairState.WARMING, PairState.TRANSFERRING)


def test_every_step_that_waits_for_somebody_has_its_deadline() -> None:
    for state in PairState:
        life = life_in(state)
        waits = state in {
            PairState.AGREEING,
            PairState.INITIALISING,
            PairState.WARMING,
            PairState.TRANSFERRING,
            PairState.ABORTING,
        }
        assert (life.deadline_s is not None) == waits
        assert not life.is_overdue(NOW_S)
        assert life.is_overdue(NOW_S + 1000) == waits


def test_a_call_that_hangs_keeps_its_pair_out_for_good() -> None:
    for state in (PairState.INITIALISING, PairState.WARMING, PairState.TRANSFERRING, PairState.ABORTING):
        life = life_in(state)
        assert life.is_promising(NOW_S) == (state is not PairState.ABORTING)
        assert not life.is_promising(NOW_S + 10_000)
        life.poison("it hangs")
        assert not life.is_promising(NOW_S + 10_000)


def test_a_pair_is_promising_where_it_works_or_may_be_tried() -> None:
    assert life_in(PairState.ABSENT).is_promising(NOW_S) and life_in(PairState.IDLE).is_promising(NOW_S + 10_000)
    unusable = life_in(PairState.UNUSABLE)
    assert not unusable.is_promising(NOW_S + 9.9) and unusable.is_promising(NOW_S + 10.0)


def test_a_transfer_out_of_order_is_refused() -> None:
    life = life_in(PairState.IDLE)
    for number in (0, 2):
        with pytest.raises(IllegalMove, match=f"transfer {number} after 0"):
            life.start_transfer(number, NOW_S)
    life.start_transfer(1, NOW_S)
    life.end_transfer()
    with pytest.raises(IllegalMove, match="transfer 1 after 1"):
        life.start_transfer(1, NOW_S)


def test_numbers_begin_again_with_a_new_communicator() -> None:
    life = life_in(PairState.TRANSFERRING)
    life.poison("peer lost")
    life.abort(NOW_S)
    life.aborted(NOW_S)
    for event in PATHS[PairState.IDLE]:
        EVENTS[event][0](life)
    life.start_transfer(1, NOW_S)


def fail(life: PairLife, path: list[str], now_s: float) -> None:
    life.begin(now_s)
    for event in path[1:]:
        EVENTS[event][0](life)
    life.poison("broken")
    life.abort(now_s)
    life.aborted(now_s)


def test_a_pair_that_worked_is_rebuilt_at_once_when_its_peer_is_lost() -> None:
    life = PairLife(LIMITS)
    fail(life, PATHS[PairState.TRANSFERRING], NOW_S)
    assert life.state is PairState.ABSENT and life.can_begin(NOW_S)


@pytest.mark.parametrize("state", [PairState.AGREEING, PairState.INITIALISING, PairState.WARMING])
def test_a_pair_that_never_worked_is_left_alone_for_longer_each_time(state: PairState) -> None:
    life = PairLife(LIMITS)
    now_s = NOW_S
    for pause_s in (10.0, 20.0, 40.0, 45.0, 45.0):
        fail(life, PATHS[state], now_s)
        assert life.state is PairState.UNUSABLE and life.why == "broken"
        assert not life.can_begin(now_s + pause_s - 0.01)
        with pytest.raises(IllegalMove, match="broken"):
            life.begin(now_s)
        now_s += pause_s
        assert life.can_begin(now_s)


def test_a_pair_that_warms_but_never_transfers_is_left_alone_too() -> None:
    life = PairLife(LIMITS)
    fail(life, PATHS[PairState.TRANSFERRING], NOW_S)
    fail(life, PATHS[PairState.TRANSFERRING], NOW_S)
    assert not life.can_begin(NOW_S + 9.9) and life.can_begin(NOW_S + 10.0)


def test_a_completed_transfer_forgives_what_was_before() -> None:
    life = PairLife(LIMITS)
    fail(life, PATHS[PairState.TRANSFERRING], NOW_S)
    fail(life, [*PATHS[PairState.TRANSFERRING], "end", "start"], NOW_S)
    assert life.can_begin(NOW_S)


def test_a_refusal_or_an_orderly_end_is_no_failure() -> None:
    life = PairLife(LIMITS)
    life.begin(NOW_S)
    life.withdraw()
    assert life.can_begin(NOW_S)
    for event in [*PATHS[PairState.IDLE], "poison", "abort", "closed"]:
        EVENTS[event][0](life)
    assert life.can_begin(NOW_S)


def test_of_several_reasons_the_first_one_counts() -> None:
    life = life_in(PairState.IDLE)
    life.poison("the peer is gone")
    life.poison("the channel was closed")
    assert life.why == "the peer is gone"
