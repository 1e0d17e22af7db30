"""The client's retries after it has lost its router: the request it sends, the router it tries, its waits and its
limit.
"""

import pytest

from tandem.enum_words import FINISH_REASONS
from tandem.errors import (
    HANDSHAKE_FAILED,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from tandem.progress import Progress
from tandem.routers import addresses
from tandem.v1 import inference_pb2

Response = inference_pb2.GenerateResponse
LOST = Unavailable("Socket closed", reason="unavailable", is_lost=True)
SILENT = Unavailable("the router at a sent no message for 2.7 s", reason="keepalive_timeout", is_lost=True)
ACCEPTED = inference_pb2.AcceptedRequest(
    sampling=inference_pb2.SamplingParams(temperature=0.5, top_k=3, top_p=1, min_p=0, seed=77),
    max_tokens=9,
    acceptance=b"signed",
)


def delta(choice: int, first_index: int, token_ids: tuple[int, ...], text: str = "", reason: str = "") -> Response:
    grown = inference_pb2.ChoiceDelta(
        choice=choice,
        first_index=first_index,
        token_ids=token_ids,
        text=text,
        finish_reason=FINISH_REASONS.number(reason),
    )
    return Response(deltas=[grown])


def progress(num_routers: int = 2, n: int = 1, draw: float = 1.0, router: str = "a", request_id: str = "r") -> Progress:
    request = inference_pb2.GenerateRequest(request_id=request_id, text="x", n=n)
    known = tuple("abcdef"[:num_routers])
    return Progress(request, known=lambda: known, router=router, deadline_s=100.0, draw=lambda: draw)


def begun(num_routers: int = 2) -> Progress:
    started = progress(num_routers)
    assert started.add(Response(request_id="r", accepted=ACCEPTED)) == []
    started.add(delta(0, 0, (5, 6), "ab"))
    return started


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


@pytest.mark.parametrize("error", [LOST, SILENT, Unavailable("leaving", reason="draining")])
def test_a_request_that_no_router_accepted_is_retried_at_all_routers_until_its_deadline(error: TandemError) -> None:
    generation = progress(num_routers=3, router="b")
    now_s, waits_s, routers = 0.0, [], []
    while now_s < 98:
        waits_s.append(generation.on_lost(error, now_s))
        routers.append(generation.router)
        now_s += waits_s[-1]
    with pytest.raises(DeadlineExceeded, match=f"no router accepted the request .* the last error: {error.message}"):
        generation.on_lost(error, now_s)
    assert waits_s[:5] == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert set(waits_s[5:]) == {2.0}
    assert routers[:4] == ["c", "a", "b", "c"]
    assert not generation.request.HasField("resume_from") and generation.request.request_id == "r"


def test_while_no_router_was_ever_reached_a_request_is_retried_until_connect_by_s() -> None:
    reached = False
    request = inference_pb2.GenerateRequest(request_id="r", text="x")
    generation = Progress(
        request,
        known=lambda: ("a",),
        router="a",
        deadline_s=100.0,
        connect_by_s=30.0,
        is_reached=lambda: reached,
        draw=lambda: 1.0,
    )
    assert generation.on_lost(LOST, 29.0) == 0.1
    with pytest.raises(Unavailable) as raised:
        generation.on_lost(LOST, 29.9)
    assert raised.value is LOST
    reached = True
    assert generation.on_lost(LOST, 31.0) == 0.4


def test_each_address_is_tried_once_where_nothing_was_reached_and_no_time_is_left_to_connect() -> None:
    request = inference_pb2.GenerateRequest(request_id="r", text="x")
    generation = Progress(
        request, known=lambda: ("a", "b"), router="a", deadline_s=100.0, connect_by_s=0.0, is_reached=lambda: False
    )
    generation.on_lost(LOST, 1.0)
    assert generation.router == "b"
    with pytest.raises(Unavailable, match="Socket closed"):
        generation.on_lost(LOST, 2.0)


def test_a_certificate_or_protocol_that_differs_is_raised_when_each_router_was_tried_once() -> None:
    error = Unavailable("the server does not use TLS", reason=HANDSHAKE_FAILED, is_lost=True)
    generation = progress(num_routers=2)
    generation.on_lost(error, 0.0)
    with pytest.raises(Unavailable, match="does not use TLS"):
        generation.on_lost(error, 0.0)


def test_a_deadline_that_passes_during_a_retry_names_the_error_before_it() -> None:
    generation, passed = progress(), DeadlineExceeded("no response came within timeout_s", reason="deadline_exceeded")
    generation.on_lost(SILENT, 50.0)
    with pytest.raises(DeadlineExceeded, match="the last error: the router at a sent no message"):
        generation.on_lost(passed, 100.0)
    with pytest.raises(DeadlineExceeded) as raised:
        progress().on_lost(passed, 100.0)
    assert raised.value is passed


def test_silent_routers_get_more_time_for_a_request_that_none_has_accepted() -> None:
    """They may be slow, and a call that is cancelled and sent again makes them slower."""
    generation, factors = progress(num_routers=2), []
    for _ in range(8):
        factors.append(generation.patience)
        generation.on_lost(SILENT, 0.0)
    assert factors == [1, 1, 2, 2, 4, 4, 4, 4]
    accepted = begun()
    for _ in range(4):
        accepted.on_lost(SILENT, 0.0)
    assert accepted.patience == 1


def test_each_lost_call_may_meet_three_live_ids() -> None:
    """A slow router may have begun to serve several lost calls when it reads the next one."""
    live = InvalidRequest("belongs to a live request", reason="duplicate_request")
    generation = progress(num_routers=1)
    for _ in range(4):
        generation.on_lost(SILENT, 0.0)
        for _ in range(3):
            assert generation.on_lost(live, 0.0) == 0.0
    assert generation.request.request_id == "r.13"
    with pytest.raises(InvalidRequest):
        generation.on_lost(live, 0.0)


def test_an_unavailable_cluster_is_retried_at_most_once_per_router() -> None:
    generation, error = begun(), Unavailable("both pools are gone", reason="worker_lost")
    generation.on_lost(error, 0.0)
    with pytest.raises(Unavailable, match="both pools"):
        generation.on_lost(error, 0.0)


@pytest.mark.parametrize(
    "error", [LOST, Unavailable("leaving", reason="draining"), Overloaded("full", reason="overloaded")]
)
def test_a_begun_generation_is_retried_until_its_deadline_with_growing_waits(error: TandemError) -> None:
    generation = begun()
    generation.on_lost(LOST, 0.0)
    now_s, waits_s, routers = 0.0, [], []
    while now_s < 98:
        waits_s.append(generation.on_lost(error, now_s))
        routers.append(generation.router)
        now_s += waits_s[-1]
    with pytest.raises(DeadlineExceeded, match=error.message):
        generation.on_lost(error, now_s)
    assert waits_s[:4] == [0.2, 0.4, 0.8, 1.6]
    assert set(waits_s[4:]) == {2.0}
    assert routers[:4] == ["a", "b", "a", "b"]


def test_waits_have_jitter_so_that_clients_of_one_router_do_not_retry_at_once() -> None:
    early, late = progress(draw=0.0), progress(draw=0.5)
    assert (early.on_lost(LOST, 0.0), late.on_lost(LOST, 0.0)) == (0.0, 0.05)


def test_an_overloaded_router_is_retried_no_sooner_than_its_retry_after() -> None:
    full = Overloaded("full", reason="overloaded", retry_after_s=3.0)
    alone = begun(num_routers=1)
    alone.on_lost(LOST, 0.0)
    assert alone.on_lost(full, 0.0) == 3.2
    generation, now_s, calls = begun(), 0.0, list[tuple[str, float]]()
    for error in (LOST, full, *(LOST,) * 5):
        now_s += generation.on_lost(error, now_s)
        calls.append((generation.router, round(now_s, 1)))
    # The dead router is called again meanwhile, with pauses that double: it may have been restarted.
    assert calls == [("b", 0.1), ("a", 0.3), ("a", 0.7), ("a", 1.5), ("a", 3.1), ("b", 5.1), ("a", 7.1)]


def test_the_retry_after_of_one_router_delays_no_call_to_another() -> None:
    """The stream has 20 s left, one of three routers is dead and one is full for 30 s: the third is called at once."""
    generation = begun(num_routers=3)
    generation.on_lost(LOST, 80.0)
    assert generation.router == "b"
    assert generation.on_lost(Overloaded("full", reason="overloaded", retry_after_s=30.0), 80.0) == 0.2
    assert generation.router == "c"


def test_received_tokens_reset_the_retry_wait() -> None:
    generation = begun()
    for _ in range(4):
        generation.on_lost(LOST, 0.0)
    generation.add(delta(0, 2, (7,)))
    assert generation.on_lost(LOST, 0.0) == 0.1


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
