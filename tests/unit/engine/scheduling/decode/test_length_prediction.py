"""Lengths are predicted from sequences that have ended, and corrected by a sequence's length so far."""

import random

import pytest

from engine.scheduling.length_prediction import LengthPredictor
from tests.unit.engine.scheduling.policies.traces import conversation_rows

NO_CAP = 1 << 20
BIN = 2**0.25  # an estimate is the upper edge of the bin that it falls into


def taught(lengths: list[int], *, quantile: float = 0.5, tenant: str = "", num_prompt: int = 100) -> LengthPredictor:
    predictor = LengthPredictor(quantile)
    for length in lengths:
        predictor.observe(tenant, num_prompt, length, was_cut=False)
    return predictor


def test_no_length_is_predicted_before_eight_sequences_have_ended() -> None:
    predictor = taught([50] * 7)
    assert predictor.predict("", 100, 0, NO_CAP) == 0
    predictor.observe("", 100, 50, was_cut=False)
    assert 50 <= predictor.predict("", 100, 0, NO_CAP) <= 50 * BIN


@pytest.mark.parametrize(("quantile", "length"), [(0.25, 50), (0.5, 100), (0.9, 180)])
def test_the_chosen_quantile_of_sequences_ends_within_its_prediction(quantile: float, length: int) -> None:
    lengths = list(range(1, 201))
    random.Random(1).shuffle(lengths)
    predicted = taught(lengths, quantile=quantile).predict("", 100, 0, NO_CAP)
    assert length / BIN <= predicted <= length * BIN * 1.1


def test_a_sequence_past_its_prediction_is_compared_with_equally_long_ones() -> None:
    predictor = taught([10, 10, 10, 1000] * 25)
    assert 10 <= predictor.predict("", 100, 0, NO_CAP) <= 10 * BIN
    assert 1000 <= predictor.predict("", 100, 20, NO_CAP) <= 1000 * BIN


@pytest.mark.parametrize("num_output", [0, 1, 9, 49, 50, 51, 64, 1000, 50_000])
def test_a_prediction_is_longer_than_the_sequence_and_never_over_its_cap(num_output: int) -> None:
    predictor = taught([50] * 20)
    assert num_output < predictor.predict("", 100, num_output, NO_CAP)
    assert predictor.predict("", 100, num_output, num_output + 1) == num_output + 1


def test_lengths_beyond_the_last_bin_are_not_cut() -> None:
    predictor = taught([3 << 20] * 20)
    assert predictor.predict("", 100, 2 << 20, 1 << 30) > 2 << 20


def test_a_sequence_longer_than_any_before_is_predicted_to_double() -> None:
    assert taught([50] * 20).predict("", 100, 999, NO_CAP) == 2000


def test_a_sequence_cut_by_its_limit_does_not_count_as_short() -> None:
    predictor = LengthPredictor()
    for length, was_cut in [(64, True), (64, True), (64, True), (1000, False)] * 25:
        predictor.observe("", 100, length, was_cut=was_cut)
    assert 1000 <= predictor.predict("", 100, 0, NO_CAP) <= 1000 * BIN


def test_sequences_cut_where_others_ended_do_not_raise_the_prediction() -> None:
    predictor = LengthPredictor(0.9)
    for was_cut in [True, False] * 30:
        predictor.observe("", 100, 64, was_cut=was_cut)
    assert predictor.predict("", 100, 0, NO_CAP) == 64


def test_when_all_sequences_were_cut_the_prediction_is_at_least_their_length() -> None:
    predictor = LengthPredictor()
    for _ in range(20):
        predictor.observe("", 100, 64, was_cut=True)
    assert predictor.predict("", 100, 0, NO_CAP) >= 64


def test_each_tenant_and_prompt_length_has_its_own_prediction() -> None:
    predictor = LengthPredictor()
    for _ in range(20):
        predictor.observe("summaries", 4000, 20, was_cut=False)
        predictor.observe("stories", 4000, 2000, was_cut=False)
        predictor.observe("stories", 60, 500, was_cut=False)
    assert predictor.predict("summaries", 4000, 0, NO_CAP) <= 20 * BIN
    assert predictor.predict("stories", 4000, 0, NO_CAP) >= 2000
    assert predictor.predict("stories", 60, 0, NO_CAP) <= 500 * BIN


def test_an_unknown_kind_of_request_uses_the_next_wider_kind() -> None:
    predictor = LengthPredictor()
    for _ in range(20):
        predictor.observe("known", 4000, 20, was_cut=False)
        predictor.observe("other", 60, 500, was_cut=False)
    assert predictor.predict("known", 9, 0, NO_CAP) <= 20 * BIN  # its tenant's, of any prompt
    assert predictor.predict("new", 60, 0, NO_CAP) >= 500  # everyone's, of such prompts


def test_predictions_follow_a_change_of_lengths() -> None:
    predictor = taught([50] * 2000)
    for _ in range(1000):
        predictor.observe("", 100, 800, was_cut=False)
    assert predictor.predict("", 100, 0, NO_CAP) >= 800


def test_the_least_recently_active_tenant_is_evicted_first() -> None:
    predictor = taught([50] * 20, tenant="heard of")
    taught_too = taught([50] * 20, tenant="silent")
    for number in range(400):
        for known in (predictor, taught_too):
            known.observe(f"tenant {number}", 100, 800, was_cut=False)
        if number == 200:
            predictor.observe("heard of", 100, 50, was_cut=False)
    assert predictor.num_tenants == taught_too.num_tenants == 256
    assert predictor.predict("heard of", 100, 0, NO_CAP) <= 50 * BIN
    assert taught_too.predict("silent", 100, 0, NO_CAP) >= 800


def test_on_the_conversation_trace_nine_in_ten_sequences_end_within_the_90_percent_prediction() -> None:
    """Each length is predicted from the earlier sequences alone."""
    predictor, within, num_predicted = LengthPredictor(0.9), 0, 0
    for row in conversation_rows(4000):
        predicted = predictor.predict("", row.num_prompt, 0, NO_CAP)
        if predicted:
            num_predicted += 1
            within += row.num_output <= predicted
        predictor.observe("", row.num_prompt, row.num_output, was_cut=False)
    assert num_predicted > 3900
    assert within / num_predicted == pytest.approx(0.92, abs=0.03)  # the bins round up
