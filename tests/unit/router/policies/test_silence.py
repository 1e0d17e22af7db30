"""A worker's silence counts only if this router receives messages from another worker in that time."""

import math

from hypothesis import given
from hypothesis import strategies as st

from router.policies.hedging import Silence

_HEARTBEAT_S, _ASKED_AFTER_S, _TIMEOUT_S = 1.0, 2.0, 0.5


def _missed(*asked_s: float, another_sent_s: float, sent_s: float = 0.0) -> Silence:
    silence = Silence()
    for each in asked_s:
        silence.record_timeout(each, sent_s=sent_s)
        silence.count(another_sent_s)
    return silence


def test_a_missed_check_counts_if_another_worker_sent_something_since_it_began() -> None:
    assert _missed(2.0, another_sent_s=2.1).num_missed(0.0) == 1
    assert _missed(2.0, 2.7, another_sent_s=2.1).num_missed(0.0) == 2


def test_a_missed_check_does_not_count_while_no_other_worker_sends_anything() -> None:
    for another_sent_s in (0.9, -math.inf):  # before the check, and in a cluster of one worker
        silence = _missed(2.0, 2.7, 3.4, another_sent_s=another_sent_s)
        assert silence.num_missed(0.0) == 0
        assert silence.continues(0.0) and not silence.is_of_worker(another_sent_s)


def test_checks_count_from_the_one_in_which_another_worker_was_received_again() -> None:
    silence = _missed(2.0, 2.7, another_sent_s=1.0)
    silence.record_timeout(3.4, sent_s=0.0)
    silence.count(another_sent_s=3.8)
    assert silence.num_missed(0.0) == 1, "the worker may answer just as late as the other one"


def test_a_check_that_fails_at_once_counts_without_news_of_other_workers() -> None:
    for another_sent_s in (0.9, -math.inf):
        silence = Silence()
        silence.record_failure(2.0, sent_s=0.0)
        silence.count(another_sent_s)
        assert silence.num_missed(0.0) == 1 and silence.is_of_worker(another_sent_s)


def test_a_connection_that_breaks_after_checks_timed_out_proves_nothing() -> None:
    """The router's own keepalive breaks connections over which nothing comes back."""
    silence = _missed(2.0, another_sent_s=0.9)
    silence.record_failure(2.7, sent_s=0.0)
    silence.count(0.9)
    assert silence.num_missed(0.0) == 0 and not silence.is_of_worker(0.9)


def test_a_message_of_the_worker_ends_its_silence() -> None:
    silence = _missed(2.0, 2.7, another_sent_s=2.1)
    assert silence.num_missed(2.8) == 0 and not silence.continues(2.8)
    silence.record_timeout(5.0, sent_s=2.8)
    silence.count(another_sent_s=4.9)
    assert silence.num_missed(2.8) == 0 and not silence.is_of_worker(4.9), "it was received before this silence"
    silence.record_timeout(5.7, sent_s=2.8)
    silence.count(another_sent_s=5.8)
    assert silence.num_missed(2.8) == 1


@given(
    last_sent_s=st.lists(st.floats(10.0 - _HEARTBEAT_S, 10.0), min_size=1, max_size=6),
    num_checks=st.integers(1, 5),
)
def test_no_check_counts_at_a_router_that_was_cut_off_from_all_workers(
    last_sent_s: list[float], num_checks: int
) -> None:
    """The cut is at 10 s, and every worker sent a heartbeat within the second before it."""
    for number, sent_s in enumerate(last_sent_s):
        others_s = [each for other, each in enumerate(last_sent_s) if other != number]
        asked_s = [sent_s + _ASKED_AFTER_S + check * _TIMEOUT_S for check in range(num_checks)]
        silence = _missed(*asked_s, another_sent_s=max(others_s, default=-math.inf), sent_s=sent_s)
        assert silence.num_missed(sent_s) == 0
