"""The life of a link's communicator: every legal move, no other one, and a bound on the attempts of a broken link."""

import itertools
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transports.nccl.communicator_life import (
    CommunicatorLife,
    CommunicatorLimits,
    CommunicatorState,
    IllegalMove,
)

LIMITS = CommunicatorLimits(retry_s=10.0, max_retry_s=45.0)
NOW_S = 100.0

# Each event's call and its legal states; only `poison` is legal in every state.
EVENTS: dict[str, tuple[Callable[[CommunicatorLife], None], set[CommunicatorState]]] = {
    "begin": (lambda life: life.begin(NOW_S), {CommunicatorState.ABSENT}),
    "withdraw": (lambda life: life.withdraw(), {CommunicatorState.AGREEING}),
    "agreed": (lambda life: life.agreed(NOW_S), {CommunicatorState.AGREEING}),
    "initialised": (lambda life: life.initialised(NOW_S), {CommunicatorState.INITIALISING}),
    "warmed": (lambda life: life.warmed(), {CommunicatorState.WARMING}),
    "start": (lambda life: life.start_transfer(life.number + 1, NOW_S), {CommunicatorState.IDLE}),
    "end": (lambda life: life.end_transfer(), {CommunicatorState.TRANSFERRING}),
    "poison": (lambda life: life.poison("broken"), set(CommunicatorState)),
    "abort": (lambda life: life.abort(NOW_S), {CommunicatorState.POISONED}),
    "aborted": (lambda life: life.aborted(NOW_S), {CommunicatorState.ABORTING}),
    "closed": (lambda life: life.aborted(NOW_S, failed=False), {CommunicatorState.ABORTING}),
}
PATHS: dict[CommunicatorState, list[str]] = {
    CommunicatorState.ABSENT: [],
    CommunicatorState.AGREEING: ["begin"],
    CommunicatorState.INITIALISING: ["begin", "agreed"],
    CommunicatorState.WARMING: ["begin", "agreed", "initialised"],
    CommunicatorState.IDLE: ["begin", "agreed", "initialised", "warmed"],
    CommunicatorState.TRANSFERRING: ["begin", "agreed", "initialised", "warmed", "start"],
    CommunicatorState.POISONED: ["begin", "poison"],
    CommunicatorState.ABORTING: ["begin", "poison", "abort"],
    CommunicatorState.UNUSABLE: ["begin", "poison", "abort", "aborted"],
}


def life_in(state: CommunicatorState) -> CommunicatorLife:
    life = CommunicatorLife(LIMITS)
    for event in PATHS[state]:
        EVENTS[event][0](life)
    assert life.state is state
    return life


@pytest.mark.parametrize(("state", "event"), list(itertools.product(CommunicatorState, EVENTS)))
def test_an_event_is_accepted_only_in_its_legal_states(state: CommunicatorState, event: str) -> None:
    life = life_in(state)
    perform, allowed = EVENTS[event]
    if state in allowed:
        perform(life)
    else:
        with pytest.raises(IllegalMove, match=state):
            perform(life)
        assert life.state is state


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=60))
def test_transfers_need_a_warm_communicator_and_every_failure_ends_with_an_abort(events: list[str]) -> None:
    life = CommunicatorLife(LIMITS)
    seen = [life.state]
    for event in events:
        with suppress(IllegalMove):
            EVENTS[event][0](life)
        if life.state is not seen[-1]:
            seen.append(life.state)
    for before, state in itertools.pairwise(seen):
        if state is CommunicatorState.TRANSFERRING:
            assert before is CommunicatorState.IDLE
        if before is CommunicatorState.POISONED:
            assert state is CommunicatorState.ABORTING
        if state is CommunicatorState.IDLE:
            assert before in (CommunicatorState.WARMING, CommunicatorState.TRANSFERRING)


def test_every_step_that_waits_for_the_peer_has_a_deadline() -> None:
    for state in CommunicatorState:
        life = life_in(state)
        waits = state in {
            CommunicatorState.AGREEING,
            CommunicatorState.INITIALISING,
            CommunicatorState.WARMING,
            CommunicatorState.TRANSFERRING,
            CommunicatorState.ABORTING,
        }
        assert (life.deadline_s is not None) == waits
        assert not life.is_overdue(NOW_S)
        assert life.is_overdue(NOW_S + 1000) == waits


def test_hanging_call_keeps_its_link_unusable() -> None:
    for state in (
        CommunicatorState.INITIALISING,
        CommunicatorState.WARMING,
        CommunicatorState.TRANSFERRING,
        CommunicatorState.ABORTING,
    ):
        life = life_in(state)
        assert life.is_promising(NOW_S) == (state is not CommunicatorState.ABORTING)
        assert not life.is_promising(NOW_S + 10_000)
        life.poison("it hangs")
        assert not life.is_promising(NOW_S + 10_000)


def test_link_is_promising_if_working_or_due_for_a_retry() -> None:
    assert life_in(CommunicatorState.ABSENT).is_promising(NOW_S) and life_in(CommunicatorState.IDLE).is_promising(
        NOW_S + 10_000
    )
    unusable = life_in(CommunicatorState.UNUSABLE)
    assert not unusable.is_promising(NOW_S + 9.9) and unusable.is_promising(NOW_S + 10.0)


def test_a_transfer_out_of_order_is_refused() -> None:
    life = life_in(CommunicatorState.IDLE)
    for number in (0, 2):
        with pytest.raises(IllegalMove, match=f"transfer {number} after 0"):
            life.start_transfer(number, NOW_S)
    life.start_transfer(1, NOW_S)
    life.end_transfer()
    with pytest.raises(IllegalMove, match="transfer 1 after 1"):
        life.start_transfer(1, NOW_S)


def test_transfer_numbers_restart_with_a_new_communicator() -> None:
    life = life_in(CommunicatorState.TRANSFERRING)
    life.poison("peer lost")
    life.abort(NOW_S)
    life.aborted(NOW_S)
    for event in PATHS[CommunicatorState.IDLE]:
        EVENTS[event][0](life)
    life.start_transfer(1, NOW_S)


def fail(life: CommunicatorLife, path: list[str], now_s: float) -> None:
    life.begin(now_s)
    for event in path[1:]:
        EVENTS[event][0](life)
    life.poison("broken")
    life.abort(now_s)
    life.aborted(now_s)


def test_link_that_worked_is_rebuilt_at_once_after_its_peer_is_lost() -> None:
    life = CommunicatorLife(LIMITS)
    fail(life, PATHS[CommunicatorState.TRANSFERRING], NOW_S)
    assert life.state is CommunicatorState.ABSENT and life.can_begin(NOW_S)


@pytest.mark.parametrize(
    "state", [CommunicatorState.AGREEING, CommunicatorState.INITIALISING, CommunicatorState.WARMING]
)
def test_backoff_of_a_link_that_never_worked_doubles(state: CommunicatorState) -> None:
    life = CommunicatorLife(LIMITS)
    now_s = NOW_S
    for pause_s in (10.0, 20.0, 40.0, 45.0, 45.0):
        fail(life, PATHS[state], now_s)
        assert life.state is CommunicatorState.UNUSABLE and life.why == "broken"
        assert not life.can_begin(now_s + pause_s - 0.01)
        with pytest.raises(IllegalMove, match="broken"):
            life.begin(now_s)
        now_s += pause_s
        assert life.can_begin(now_s)


def test_link_that_warms_but_never_transfers_gets_a_backoff() -> None:
    life = CommunicatorLife(LIMITS)
    fail(life, PATHS[CommunicatorState.TRANSFERRING], NOW_S)
    fail(life, PATHS[CommunicatorState.TRANSFERRING], NOW_S)
    assert not life.can_begin(NOW_S + 9.9) and life.can_begin(NOW_S + 10.0)


def test_completed_transfer_resets_the_failures() -> None:
    life = CommunicatorLife(LIMITS)
    fail(life, PATHS[CommunicatorState.TRANSFERRING], NOW_S)
    fail(life, [*PATHS[CommunicatorState.TRANSFERRING], "end", "start"], NOW_S)
    assert life.can_begin(NOW_S)


def test_a_refusal_or_an_orderly_end_is_no_failure() -> None:
    life = CommunicatorLife(LIMITS)
    life.begin(NOW_S)
    life.withdraw()
    assert life.can_begin(NOW_S)
    for event in [*PATHS[CommunicatorState.IDLE], "poison", "abort", "closed"]:
        EVENTS[event][0](life)
    assert life.can_begin(NOW_S)


def test_the_first_of_several_reasons_is_reported() -> None:
    life = life_in(CommunicatorState.IDLE)
    life.poison("the peer is gone")
    life.poison("the channel was closed")
    assert life.why == "the peer is gone"
