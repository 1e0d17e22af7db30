"""What the client has of an answer, and the request that it sends after it has lost its router."""

import pytest

from tandem.enum_words import FINISH_REASONS
from tandem.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from tandem.routers import addresses
from tandem.v1 import inference_pb2
from tests.unit.client.lost_generations import ACCEPTED, LOST, Response, begun, delta, progress


def test_a_resumed_request_carries_received_tokens_and_accepted_sampling_to_another_router() -> None:
    generation = progress(n=3)
    generation.add(Response(deltas=delta(0, 0, (5, 6), "aé").deltas, accepted=ACCEPTED))
    generation.add(delta(2, 0, (7,), "b", reason="stop"))
    generation.on_lost(LOST, 0.0)
    asked = generation.request
    assert (generation.router, asked.request_id, asked.text, asked.n) == ("b", "r", "x", 3)
    assert (asked.sampling, asked.stop.max_tokens) == (ACCEPTED.sampling, 9)
    has = [
        (tuple(c.token_ids), c.num_characters, FINISH_REASONS.word(c.finish_reason)) for c in asked.resume_from.choices
    ]
    assert has == [((5, 6), 2, ""), ((), 0, ""), ((7,), 1, "stop")]
    assert asked.resume_from.acceptance == b"signed"


def test_an_accepted_request_is_resumed_before_its_first_token() -> None:
    generation = progress()
    generation.add(Response(request_id="r", accepted=ACCEPTED))
    for _ in range(3):
        generation.on_lost(LOST, 0.0)
    asked = generation.request
    assert (asked.request_id, asked.resume_from.acceptance) == ("r", b"signed")
    assert [tuple(choice.token_ids) for choice in asked.resume_from.choices] == [()]


def test_every_resumption_has_a_higher_number_than_all_earlier_ones() -> None:
    """The number grows even after progress, because a delayed call may be older than the last token."""
    generation, numbers = begun(), []
    for index in range(2, 5):
        for error in (LOST, Overloaded("full", reason="overloaded")):
            generation.on_lost(error, 0.0)
            numbers.append(generation.request.resume_from.resume_number)
        generation.add(Response(request_id="r", accepted=ACCEPTED))
        generation.add(delta(0, index, (7,)))
    assert numbers == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("num_routers", [1, 2])
def test_a_call_with_a_superseded_resume_number_is_repeated_with_a_higher_number(num_routers: int) -> None:
    """A proxy sent the call twice: the router serves its first copy, and the client reads the refusal of the second."""
    generation = begun(num_routers)
    generation.on_lost(LOST, 0.0)
    for number in (2, 3, 4):
        generation.on_lost(InvalidRequest("a newer stream is live", reason="resume_superseded"), 0.0)
        assert generation.request.resume_from.resume_number == number


def test_a_stream_taken_over_by_another_call_is_not_resumed() -> None:
    """No call of this generation does that to its own newest one, so another client has its acceptance."""
    generation = begun()
    generation.on_lost(LOST, 0.0)
    taken = Cancelled("the client has resumed this request on another stream", reason="cancelled")
    with pytest.raises(Cancelled):
        generation.on_lost(taken, 0.0)


def test_an_acceptance_alone_does_not_shorten_the_waits() -> None:
    """Otherwise the client would retry routers that accept a request and cannot serve it without a pause."""
    generation = begun()
    waits_s = []
    for _ in range(3):
        waits_s.append(generation.on_lost(LOST, 0.0))
        generation.add(Response(request_id="r", accepted=ACCEPTED))
    assert waits_s == [0.1, 0.2, 0.4]


def test_a_request_lost_before_its_acceptance_is_sent_again_unchanged() -> None:
    generation = progress()
    generation.add(Response(request_id="r"))  # a sign of life
    generation.on_lost(LOST, 0.0)
    assert not generation.request.HasField("resume_from")
    assert generation.request.request_id == "r"


def test_after_a_loss_a_request_whose_id_is_still_live_is_sent_with_a_new_id() -> None:
    """The router has not seen yet that the link of this client broke."""
    generation = progress(request_id="i" * 128)
    generation.on_lost(LOST, 0.0)
    live = InvalidRequest("belongs to a live request", reason="duplicate_request")
    router = generation.router
    assert generation.on_lost(live, 0.0) == 0.0
    assert (generation.router, generation.request.request_id) == (router, "i" * 126 + ".2")
    generation.on_lost(live, 0.0)
    generation.add(Response(deltas=delta(0, 0, (5,), "a", "length").deltas, accepted=ACCEPTED))
    generation.add(Response(summary=inference_pb2.Summary()))
    assert generation.result().request_id == generation.request.request_id == "i" * 126 + ".3"


def test_a_duplicate_id_is_an_error_at_the_first_call_and_after_three_new_ids() -> None:
    live = InvalidRequest("belongs to a live request", reason="duplicate_request")
    with pytest.raises(InvalidRequest):
        progress().on_lost(live, 0.0)
    generation = progress()
    generation.on_lost(LOST, 0.0)
    for _ in range(3):
        generation.on_lost(live, 0.0)
    with pytest.raises(InvalidRequest):
        generation.on_lost(live, 0.0)


@pytest.mark.parametrize("reason", ["prompt_changed", "request_changed"])
def test_a_router_that_resolves_the_request_differently_is_skipped_and_the_last_refusal_raises(reason: str) -> None:
    generation, refusal = begun(num_routers=3), InvalidRequest("another prompt", reason=reason)
    generation.on_lost(LOST, 0.0)
    generation.on_lost(refusal, 0.0)
    assert generation.router == "c"
    with pytest.raises(InvalidRequest, match="another prompt"):
        generation.on_lost(refusal, 0.0)


def test_tokens_without_an_acceptance_cannot_be_resumed() -> None:
    generation = progress()
    generation.add(delta(0, 0, (5,), "a"))
    with pytest.raises(Unavailable, match="Socket closed"):
        generation.on_lost(LOST, 0.0)


def test_tokens_after_a_lost_stream_are_appended_to_tokens_before() -> None:
    generation = begun()
    generation.on_lost(LOST, 0.0)
    generation.add(delta(0, 2, (7,), "c", reason="length"))
    generation.add(Response(summary=inference_pb2.Summary()))
    choice = generation.result().choices[0]
    assert (choice.token_ids, choice.text, choice.finish_reason) == ((5, 6, 7), "abc", "length")


def test_a_router_that_restarts_the_answer_yields_only_new_tokens() -> None:
    """A router older than resuming sends the whole answer again, in portions of any size."""
    generation = begun()
    generation.on_lost(LOST, 0.0)
    assert generation.add(delta(0, 0, (5,), "a")) == []
    (grown,) = generation.add(delta(0, 1, (6, 7), "bc", reason="length"))
    assert (grown.first_index, grown.token_ids, grown.text, grown.finish_reason) == (2, (7,), "c", "length")


@pytest.mark.parametrize(
    ("response", "named"),
    [
        (delta(0, 3, (7,)), "continues at token 3, but 2 tokens were received"),
        (delta(0, 1, (6,)), "continues at token 1, but 2 tokens were received"),
        (delta(0, 0, (5, 9)), "other tokens"),
    ],
)
def test_a_gap_or_a_changed_token_is_an_error_and_never_delivered(response: Response, named: str) -> None:
    generation = begun()
    generation.on_lost(LOST, 0.0)
    with pytest.raises(InternalError, match=named):
        generation.add(response)


def test_a_choice_gets_no_token_after_its_end() -> None:
    generation = begun()
    generation.add(delta(0, 2, (7,), "c", reason="stop"))
    with pytest.raises(InternalError, match="after its end"):
        generation.add(delta(0, 3, (8,)))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("what to change", reason="invalid_request"),
        Unauthenticated("which key", reason="unauthenticated"),
        Overloaded("read faster", reason="slow_client"),
        Overloaded("larger than max", reason="resource_exhausted"),
        DeadlineExceeded("too late", reason="deadline_exceeded"),
        InternalError("its own fault", reason="internal"),
        Unavailable("no worker can hold it", reason="no_worker_large_enough"),
    ],
)
def test_an_error_caused_by_the_request_is_not_retried(error: TandemError) -> None:
    generation = begun()
    generation.on_lost(LOST, 0.0)
    with pytest.raises(type(error)) as raised:
        generation.on_lost(error, 0.0)
    assert raised.value is error


def test_router_addresses_may_be_separated_by_commas_or_in_a_list() -> None:
    assert addresses("a:1") == ("a:1",)
    assert addresses("a:1, b:2,") == addresses(["a:1", "b:2"]) == ("a:1", "b:2")
    for nothing in ("", ","):
        with pytest.raises(ValueError, match="host:port"):
            addresses(nothing)


def _prompt(first_position: int, *token_ids: int) -> Response:
    tokens = [inference_pb2.PromptTokenLogprobs(token={"token_id": token_id}, rank=1) for token_id in token_ids]
    return Response(prompt_logprobs=inference_pb2.PromptLogprobs(first_position=first_position, tokens=tokens))


def test_log_probabilities_of_the_prompt_that_another_router_sends_again_count_once() -> None:
    generation = progress()
    generation.add(Response(accepted=ACCEPTED))
    generation.add(_prompt(1, 7, 8))
    generation.on_lost(LOST, 0.0)
    for part in (_prompt(1, 7), _prompt(2, 8, 9), _prompt(4, 10)):
        generation.add(part)
    generation.add(delta(0, 0, (5,), reason="length"))
    generation.add(Response(summary=inference_pb2.Summary()))
    assert [token.token.token_id for token in generation.result().prompt_logprobs] == [7, 8, 9, 10]


def test_a_gap_in_the_log_probabilities_of_the_prompt_is_an_error() -> None:
    generation = progress()
    generation.add(_prompt(1, 7))
    with pytest.raises(InternalError, match="continue at token 3, but 2 were received"):
        generation.add(_prompt(3, 9))
