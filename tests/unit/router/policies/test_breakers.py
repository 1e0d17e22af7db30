"""Circuit breakers: a pair of workers whose hand-offs fail is excluded for growing pauses, then tried by one request at
a time.
"""

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages import MemberId
from router.policies.breakers import BreakerPolicy, BreakerState, Pair, PairBreakers, Trial

PAIR, OTHER = (MemberId("p0", "1"), MemberId("d0", "1")), (MemberId("p1", "1"), MemberId("d0", "1"))
POLICY = BreakerPolicy(failures=3, window_s=60.0, first_pause_s=1.0, max_pause_s=8.0)


def breakers_after(num_failures: int, now_s: float = 0.0) -> PairBreakers:
    breakers = PairBreakers(POLICY)
    for _ in range(num_failures):
        breakers.failed(breakers.begin(PAIR, now_s), now_s, jitter=0.0)
    return breakers


def reopenings(breakers: PairBreakers, number: int, now_s: float = 0.0) -> Iterable[float]:
    """Return the pauses between failing trials, each made as soon as it is allowed."""
    for _ in range(number):
        while PAIR in breakers.excluded_pairs(now_s):
            now_s += 0.125
        pause_s = breakers.failed(breakers.begin(PAIR, now_s), now_s, jitter=0.0)
        assert pause_s is not None
        yield pause_s


def test_consecutive_failures_open_the_breaker_of_their_pair_alone() -> None:
    assert breakers_after(2).excluded_pairs(0.0) == frozenset()
    assert breakers_after(3).excluded_pairs(0.0) == {PAIR}


def test_a_success_resets_the_count_of_failures() -> None:
    breakers = breakers_after(2)
    assert not breakers.succeeded(breakers.begin(PAIR, 1.0), 1.0)
    for _ in range(2):
        breakers.failed(breakers.begin(PAIR, 2.0), 2.0, jitter=0.0)
    assert breakers.excluded_pairs(2.0) == frozenset()


def test_failures_further_apart_than_the_window_do_not_open_the_pair() -> None:
    breakers = PairBreakers(POLICY)
    for now_s in (0.0, 31.0, 62.0, 93.0):
        assert breakers.failed(breakers.begin(PAIR, now_s), now_s, jitter=0.0) is None


def test_after_the_pause_only_one_request_at_a_time_tries_the_pair() -> None:
    breakers = breakers_after(3)
    assert PAIR in breakers.excluded_pairs(0.99)
    assert PAIR not in breakers.excluded_pairs(1.0)
    breakers.begin(PAIR, 1.0)
    assert PAIR in breakers.excluded_pairs(1.0)
    assert breakers.failing() == {PAIR: BreakerState.HALF_OPEN}


def test_a_trial_that_succeeds_closes_the_pair() -> None:
    breakers = breakers_after(3)
    assert breakers.succeeded(breakers.begin(PAIR, 1.0), 1.5)
    assert breakers.excluded_pairs(1.5) == frozenset()
    assert breakers.failed(breakers.begin(PAIR, 2.0), 2.0, jitter=0.0) is None  # it takes as many as the first time


def test_a_dropped_trial_leaves_the_decision_to_the_next_request() -> None:
    breakers = breakers_after(3)
    breakers.dropped(breakers.begin(PAIR, 1.0))
    assert PAIR not in breakers.excluded_pairs(1.0)
    assert breakers.succeeded(breakers.begin(PAIR, 1.0), 1.0)


def test_each_reopening_doubles_the_pause_up_to_a_maximum() -> None:
    assert list(reopenings(breakers_after(3), 5)) == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_pair_that_closed_and_soon_fails_again_pauses_for_longer() -> None:
    def pause_of_a_second_opening(after_s: float) -> float | None:
        breakers = breakers_after(3)
        breakers.succeeded(breakers.begin(PAIR, 1.0), 1.0)
        now_s = 1.0 + after_s
        return [breakers.failed(breakers.begin(PAIR, now_s), now_s, jitter=0.0) for _ in range(3)][-1]

    assert pause_of_a_second_opening(after_s=10.0) == 2.0
    assert pause_of_a_second_opening(after_s=61.0) == 1.0


def test_jitter_shortens_a_pause_by_a_half_at_most() -> None:
    breakers = breakers_after(2)
    assert breakers.failed(breakers.begin(PAIR, 0.0), 0.0, jitter=0.5) == 0.75


def test_a_hand_off_begun_before_its_breaker_opened_counts_only_on_success() -> None:
    breakers = PairBreakers(POLICY)
    trials = [breakers.begin(PAIR, 0.0) for _ in range(6)]
    pauses = [breakers.failed(trial, 0.0, jitter=0.0) for trial in trials[:5]]
    assert pauses == [None, None, 1.0, None, None]
    assert breakers.succeeded(trials[5], 0.5)
    assert breakers.excluded_pairs(0.5) == frozenset()


def test_the_failure_of_an_old_hand_off_does_not_end_a_trial() -> None:
    breakers = PairBreakers(POLICY)
    old = [breakers.begin(PAIR, 0.0) for _ in range(4)]
    for trial in old[:3]:
        breakers.failed(trial, 0.0, jitter=0.0)
    decides = breakers.begin(PAIR, 1.0)
    assert breakers.failed(old[3], 1.0, jitter=0.0) is None
    assert breakers.succeeded(decides, 1.0)


def test_a_new_incarnation_is_a_new_pair() -> None:
    breakers = breakers_after(3)
    breakers.keep({PAIR[0]})
    assert breakers.excluded_pairs(0.0) == frozenset()
    assert not breakers.failing()


def test_zero_failures_turns_the_breaker_off() -> None:
    breakers = PairBreakers(BreakerPolicy(failures=0))
    for _ in range(10):
        assert breakers.failed(breakers.begin(PAIR, 0.0), 0.0, jitter=0.0) is None


_ENDS = st.lists(st.tuples(st.sampled_from("bbsfdt"), st.integers(0, 5), st.sampled_from([PAIR, OTHER])), max_size=30)


@settings(max_examples=60)
@given(_ENDS)
def test_every_pair_is_tried_again_after_any_history(steps: list[tuple[str, int, Pair]]) -> None:
    breakers, now_s = PairBreakers(POLICY), 0.0
    live: list[Trial] = []
    for action, number, pair in steps:
        if action == "b":
            live.append(breakers.begin(pair, now_s))
        elif action == "t":
            now_s += number
        elif live:
            trial = live.pop(number % len(live))
            if action == "s":
                breakers.succeeded(trial, now_s)
                assert trial.pair not in breakers.excluded_pairs(now_s)
            elif action == "f":
                breakers.failed(trial, now_s, jitter=0.0)
            else:
                breakers.dropped(trial)
    for trial in live:
        breakers.dropped(trial)
    assert breakers.excluded_pairs(now_s + POLICY.max_pause_s) == frozenset()
