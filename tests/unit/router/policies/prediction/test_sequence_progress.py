"""The sequences of a draining worker that should move instead of waiting for their end there."""

import pytest

from cluster.outstanding_work import SequenceWork
from cluster.request_size import RequestSize
from router.policies.prediction.work_ahead import (
    OutputLengths,
    SequenceBatch,
    SequenceProgress,
    batch_of,
    sequences_to_move,
)

_PAUSES_S = [number / 8 for number in range(100)]


def _progress(num_left: int, token_s: float | None) -> SequenceProgress:
    """The progress of a sequence with `num_left` tokens left; `token_s` is its measured pace, or None if not yet
    measured.
    """
    progress = SequenceProgress(num_left + 3)
    for number in range(3):
        progress.record_token(number * (token_s or 0.0))
    if token_s is None:
        progress = SequenceProgress(num_left)
    return progress


def test_a_sequence_expected_to_end_within_half_of_the_time_left_stays() -> None:
    all_progress = {1: _progress(100, 0.1), 2: _progress(101, 0.1)}
    assert sequences_to_move(all_progress, now_s=5.0, drain_deadline_s=25.05) == [2]
    assert sequences_to_move(all_progress, now_s=5.0, drain_deadline_s=26.0) == []


def test_a_sequence_of_unknown_speed_moves_however_few_tokens_are_left() -> None:
    once = SequenceProgress(2)
    once.record_token(1.0)
    assert sequences_to_move({1: SequenceProgress(1), 2: once}, now_s=0.0, drain_deadline_s=1e9) == [1, 2]


def test_sequences_with_most_tokens_left_move_first() -> None:
    all_progress = {1: _progress(50, 1.0), 2: _progress(900, 1.0), 3: _progress(200, None)}
    assert sequences_to_move(all_progress, now_s=0.0, drain_deadline_s=10.0) == [2, 3, 1]


def test_every_sequence_moves_when_no_time_is_left() -> None:
    assert sequences_to_move({1: _progress(1, 0.001)}, now_s=10.0, drain_deadline_s=10.0) == [1]


def test_the_measured_speed_follows_a_slower_batch() -> None:
    progress = _progress(1000, 0.01)
    assert progress.will_end_within(11.0)
    for number in range(20):
        progress.record_token(1.0 + number)
    assert not progress.will_end_within(11.0)


def test_a_failed_move_is_retried_after_a_pause_that_grows() -> None:
    progress, now_s, pauses_s = _progress(100, 1.0), 0.0, list[float]()
    for _ in range(8):
        progress.record_failed_move(now_s)
        assert sequences_to_move({1: progress}, now_s, now_s + 1.0) == []
        pauses_s.append(next(pause_s for pause_s in _PAUSES_S if progress.may_move(now_s + pause_s)))
        now_s += pauses_s[-1]
        assert sequences_to_move({1: progress}, now_s, now_s + 1.0) == [1]
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[0] < 0.5 < 2.0 < pauses_s[-1] == pauses_s[-2]


def test_a_preempted_sequence_may_move_after_its_next_token() -> None:
    progress = _progress(100, 1.0)
    progress.is_waiting = True
    for _ in range(5):
        progress.record_failed_move(10.0)
    assert sequences_to_move({1: progress}, 10.5, 11.0) == []
    progress.record_token(10.5)
    assert sequences_to_move({1: progress}, 10.5, 11.0) == [1] and not progress.is_waiting


def test_outputs_are_expected_to_be_as_long_as_those_of_requests_that_allowed_as_much() -> None:
    outputs = OutputLengths()
    assert outputs.expected(1000) == 1000.0  # nothing has ended yet
    for _ in range(100):
        outputs.record(100, 1000)
        outputs.record(8, 8)
    assert outputs.expected(1000) == pytest.approx(100.0)
    assert outputs.expected(8) == 8.0
    assert outputs.expected(1) == 1.0


def test_a_sequence_that_outlives_its_expected_length_is_still_expected_to_run_for_a_while() -> None:
    progress = SequenceProgress(100, RequestSize(50, 100), num_expected=40.0)
    assert progress.work() == (False, 50, 40.0)
    for _ in range(60):
        progress.record_token(0.0)
    assert progress.work() == (True, 110, 10.0)
    for _ in range(35):
        progress.record_token(0.0)
    assert progress.work() == (True, 145, 5.0)  # it may get no more


def test_a_batch_counts_joining_sequences_and_those_of_other_routers() -> None:
    running, joining = (SequenceProgress(left, RequestSize(100, left)) for left in (21, 40))
    running.record_token(0.0)
    assert batch_of([running, joining]) == SequenceBatch(num_running=1, num_joining=1, context=201, left=30.0)
    others = SequenceWork(num_running=2, num_joining=1, context=99, left=40.0)
    assert batch_of([running, joining], others) == SequenceBatch(3, 2, 300, 20.0)
    assert batch_of([]) == SequenceBatch()
