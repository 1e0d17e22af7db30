"""The explanations of requests: found by id and label, complete, and bounded."""

import pytest

from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from router.policies.effect import Basis
from router.policies.placement import Candidate, Placement, PlacementReason
from router.policies.prediction.latency import Prediction
from router.request.account import RequestAccount
from router.request.explanations import (
    MAX_ATTEMPTS,
    MAX_EXPLAINED,
    MAX_FOUND,
    Explanation,
    Explanations,
    PlacedAttempt,
    PlacementLog,
)
from router.requests import ChoiceDelta

PREDICTION = Prediction(
    ttft_s=0.5,
    itl_s=0.01,
    running_itl_s=0.0,
    delay_s=0.0,
    kv_bytes=0.0,
    num_cached=0,
    modelled_ttft_s=0.5,
    modelled_itl_s=0.01,
)


def placement(decode: str = "d0") -> Placement:
    pair = Candidate(MemberId("p0", "1"), MemberId(decode, "1"), 0, 0, PREDICTION)
    alone = Candidate(None, MemberId(decode, "1"), 0, 0, PREDICTION)
    return Placement(*pair.members, PlacementReason.TTFT, False, (pair, alone), 2)


def ended(request_id: str, label: str = "", began_s: float = 0.0) -> Explanation:
    attempts = (PlacedAttempt(placement(), 0.0),)
    return Explanation(request_id, label, "ok", began_s, 4, 8, 0.6, 0.02, attempts)


def test_a_request_is_found_by_its_id_and_by_its_label() -> None:
    explanations = Explanations()
    explanations.add(ended("r1", "mine"))
    explanations.add(ended("r2", "mine"))
    explanations.add(ended("r3"))
    assert [found.request_id for found in explanations.find("r3")] == ["r3"]
    assert [found.request_id for found in explanations.find("mine")] == ["r2", "r1"]
    assert explanations.find("other") == explanations.find("") == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mine", ["r2", "r1", "r0"]),
        ("cmpl-mine", ["r2", "r1", "r0"]),
        ("chatcmpl-mine", ["r2", "r1", "r0"]),
        ("msg_mine", ["r2", "r1", "r0"]),
        ("mine-1", ["r2"]),
        ("min", []),
        ("cmpl-", []),
        ("chat", []),
    ],
)
def test_an_http_request_is_found_by_its_id_in_the_answer_and_with_all_its_prompts(name: str, found: list[str]) -> None:
    explanations = Explanations()
    for number, label in enumerate(("mine", "mine-0", "mine-1", "", "mine-x")):
        explanations.add(ended(f"r{number}", label))
    assert [each.request_id for each in explanations.find(name)] == found


def test_live_requests_come_first_and_the_newest_of_them_at_the_top() -> None:
    explanations = Explanations()
    explanations.add(ended("r1", "mine", began_s=9.0))
    live = [ended("r2", "mine", began_s=1.0), ended("r3", "mine", began_s=2.0)]
    assert [found.request_id for found in explanations.find("mine", live)] == ["r3", "r2", "r1"]


def test_the_last_thousand_requests_are_kept_and_of_one_label_the_newest_are_returned() -> None:
    explanations = Explanations()
    for number in range(MAX_EXPLAINED + 5):
        explanations.add(ended(f"r{number}", "same"))
    assert len(explanations) == MAX_EXPLAINED
    assert explanations.find("r4") == []
    assert explanations.find("r5")
    newest = [f"r{number}" for number in range(MAX_EXPLAINED + 4, MAX_EXPLAINED + 4 - MAX_FOUND, -1)]
    assert [found.request_id for found in explanations.find("same")] == newest


def test_a_request_that_was_never_placed_is_not_kept() -> None:
    explanations = Explanations()
    explanations.add(Explanation("r1", "", "overloaded", 0.0, 4, 0, None, None, ()))
    assert len(explanations) == 0


def test_every_attempt_has_an_entry_and_the_failed_one_names_its_reason() -> None:
    log = PlacementLog()
    first, second = placement("d0"), placement("d1")
    log.add(first, 1.0)
    log.add(second, 2.0)
    log.record_failure(first, "decode_worker_lost")
    assert [(attempt.placement, attempt.at_s, attempt.failure) for attempt in log.attempts] == [
        (first, 1.0, "decode_worker_lost"),
        (second, 2.0, ""),
    ]


def test_of_many_attempts_the_first_and_the_last_ones_are_kept() -> None:
    log = PlacementLog()
    for number in range(20):
        log.add(placement(), float(number))
    assert [attempt.at_s for attempt in log.attempts] == [0.0, *range(20 - MAX_ATTEMPTS + 1, 20)]


def test_the_predictions_of_ended_requests_are_compared() -> None:
    explanations = Explanations()
    assert explanations.comparison().ttft.basis is Basis.UNKNOWN
    explanations.add(ended("r1"))
    assert explanations.comparison().ttft.basis is Basis.PREDICTED


def test_requests_of_the_batch_class_are_explained_and_not_compared() -> None:
    log = PlacementLog()
    log.add(placement(), 0.0, is_batch=True)
    explanations = Explanations()
    explanations.add(Explanation("r1", "", "ok", 0.0, 4, 8, 900.0, 0.02, log.attempts))
    assert explanations.find("r1")
    assert explanations.comparison().ttft.basis is Basis.UNKNOWN


def test_the_account_of_a_request_explains_it_with_its_real_times() -> None:
    account = RequestAccount(Telemetry(), 10.0, label="mine")
    account.record_admission(7)
    account.placements.add(placement(), 10.5)
    account.record_delivery([ChoiceDelta(choice=0, first_index=0, token_ids=(1,))], 11.0)
    account.record_delivery([ChoiceDelta(choice=1, first_index=0, token_ids=(1,))], 11.5)
    live = account.explanation("r1", 9.0)
    assert (live.outcome, live.num_tokens, live.itl_s) == ("", 2, None)
    account.record_delivery([ChoiceDelta(choice=0, first_index=1, token_ids=(2, 3, 4))], 12.5)
    found = account.explanation("r1", 9.0, "ok")
    assert (found.label, found.began_s, found.num_prompt_tokens, found.num_tokens) == ("mine", 10.0, 7, 5)
    assert (found.first_token_s, found.itl_s) == (11.0, 0.5)
    assert found.attempts == (PlacedAttempt(placement(), 10.5),)


def test_a_request_without_a_token_has_no_times() -> None:
    account = RequestAccount(Telemetry(), 10.0)
    account.record_delivery([ChoiceDelta(choice=0, first_index=0, text="held back")], 11.0)
    found = account.explanation("r1", 9.0, "deadline_exceeded")
    assert (found.first_token_s, found.itl_s) == (None, None)
