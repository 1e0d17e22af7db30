"""Decisions about hedges: when one begins, how many there may be, and which execution of work may append tokens."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.hedging import Action, Execution, HedgeBudget, Race, RaceOutcome, claim, decide, may_append


@dataclass(eq=False)
class Contested:
    execution: Execution
    race: Race | None = None


def _choices(number: int = 2) -> tuple[list[Contested], Execution]:
    execution = Execution()
    return [Contested(execution) for _ in range(number)], execution


@pytest.mark.parametrize(
    ("num_missed", "is_replaceable", "may_hedge"), list(itertools.product(range(4), (False, True), (False, True)))
)
def test_a_replaceable_suspect_is_hedged_where_possible_and_otherwise_given_up_after_two_missed_checks(
    num_missed: int, is_replaceable: bool, may_hedge: bool
) -> None:
    action = decide(num_missed, is_replaceable=is_replaceable, may_hedge=may_hedge)
    if not num_missed or not is_replaceable:
        assert action is Action.WAIT
    elif may_hedge:
        assert action is Action.HEDGE
    else:
        assert action is (Action.WAIT if num_missed == 1 else Action.GIVE_UP)


def test_at_most_a_twentieth_of_running_requests_has_a_hedge_and_one_is_always_allowed() -> None:
    for num_running, most in ((0, 1), (1, 1), (39, 1), (40, 2), (1000, 50)):
        budget = HedgeBudget()
        while budget.may_begin(num_running):
            budget.begin()
        assert budget.num_hedges == most
        budget.end()
        assert budget.may_begin(num_running)


def test_the_suspect_appends_until_the_hedge_has_its_first_token_and_never_after() -> None:
    choices, suspect = _choices()
    hedge, ended = Execution(), list[None]()
    race = Race(choices, hedge, lambda: ended.append(None))
    assert may_append(choices[0], hedge)
    assert (race.outcome, len(ended)) == (RaceOutcome.TAKEN_OVER, 1)
    assert not any(may_append(choice, suspect) for choice in choices), "of all its choices"
    assert all(may_append(choice, hedge) for choice in choices)
    race.call_off()
    assert race.outcome is RaceOutcome.TAKEN_OVER and len(ended) == 1


def test_a_token_of_the_suspect_before_the_hedge_has_one_cancels_the_hedge() -> None:
    choices, suspect = _choices()
    hedge, ended = Execution(), list[None]()
    race = Race(choices, hedge, lambda: ended.append(None))
    assert may_append(choices[1], suspect)
    assert (race.outcome, len(ended)) == (RaceOutcome.CALLED_OFF, 1)
    assert not any(may_append(choice, hedge) for choice in choices)
    claim(choices, hedge)
    assert not any(may_append(choice, hedge) for choice in choices), "it is over, whatever it still tries"
    assert all(may_append(choice, suspect) for choice in choices)
    race.take_over()
    assert race.outcome is RaceOutcome.CALLED_OFF and len(ended) == 1


def test_a_hedge_without_a_token_is_cancelled_by_a_claim_of_the_current_execution() -> None:
    choices, current = _choices()
    hedge = Execution()
    race = Race(choices, hedge, lambda: None)
    claim(choices, hedge)
    assert race.outcome is None and all(choice.execution is current for choice in choices)
    claim(choices, current)
    assert race.outcome is RaceOutcome.CALLED_OFF
    assert not may_append(choices[0], hedge) and may_append(choices[0], current)


def test_an_execution_that_starts_another_attempt_takes_choices_back_from_an_ended_hedge() -> None:
    choices, current = _choices()
    hedge = Execution()
    Race(choices, hedge, lambda: None).take_over()
    hedge.is_over = True
    assert not any(may_append(choice, execution) for choice in choices for execution in (hedge, current))
    claim(choices, current)
    assert all(may_append(choice, current) for choice in choices)
    assert not any(may_append(choice, hedge) for choice in choices)


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["say", "hedge", "claim", "call_off", "take_over"]), st.integers(0, 7), st.integers(0, 2)
    ),
    max_size=60,
)


@given(steps=_STEPS)
def test_at_most_one_execution_may_append_to_a_choice_and_a_fenced_one_never_appends_again(
    steps: list[tuple[str, int, int]],
) -> None:
    choices, root = _choices(3)
    executions, races, fenced = [root], list[Race](), set[tuple[int, Execution]]()
    for what, which, where in steps:
        execution, choice = executions[which % len(executions)], choices[where]
        before = [each.execution for each in choices]
        if what == "say":
            if may_append(choice, execution):
                assert choice.execution is execution and not execution.is_over and choice.race is None
                assert (where, execution) not in fenced
        elif what == "hedge" and choice.race is None and len(executions) < 8:
            executions.append(Execution())
            races.append(Race([each for each in choices if each.race is None], executions[-1], lambda: None))
        elif what == "claim" and execution is root:
            claim([choice], execution)
            fenced.discard((where, execution))
        elif races:
            race = races[which % len(races)]
            race.call_off() if what == "call_off" else race.take_over()
        fenced |= {(at, old) for at, old in enumerate(before) if choices[at].execution is not old}
