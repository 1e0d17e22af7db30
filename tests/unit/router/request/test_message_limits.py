"""Messages that grow with a request's tokens, at their largest and by their real protobuf sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import RequestTooLarge
from cluster.messages import (
    DecodeJob,
    LogitRules,
    MemberId,
    PrefillJob,
    PrefixSource,
    Sampling,
    SequenceStart,
    TokenStops,
)
from cluster.protocol import wire
from router.grpc_api.inference_wire import generate_request_from_wire
from router.request.logit_rules import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from router.request.request_acceptance import ACCEPTANCE_BYTES
from router.request.validation import MessageLimits
from tandem.v1 import inference_pb2

LARGEST = (1 << 32) - 1  # of every 32-bit field
LARGEST_TOKEN = (1 << 28) - 1  # four bytes as a varint: no vocabulary is larger
MANY = 1 << 40

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=128)


@st.composite
def asked(draw: st.DrawFn) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        request_id=draw(names),
        label=draw(names),
        cache_salt=draw(names),
        model=draw(names),
        stop=inference_pb2.StopConditions(
            stop=draw(st.lists(texts, max_size=4)),
            stop_token_ids=[LARGEST_TOKEN] * draw(st.integers(0, 200)),
            min_tokens=draw(st.integers(0, 5)),
        ),
        priority=draw(st.integers(-(1 << 31), (1 << 31) - 1)),
        n=draw(st.sampled_from((0, 1, 2, 7, 128))),
        sampling=inference_pb2.SamplingParams(
            logit_bias={LARGEST_TOKEN - i: 1.0 for i in range(draw(st.integers(0, 5)))},
            allowed_token_ids=[LARGEST_TOKEN] * draw(st.integers(0, 100)),
            bad_words=draw(st.lists(texts, max_size=3)),
        ),
    )
    kind = draw(st.sampled_from(("text", "token_ids", "chat")))
    if kind == "text":
        request.text = draw(texts)
    elif kind == "token_ids":
        request.token_ids.ids.extend([LARGEST_TOKEN] * draw(st.integers(0, 3000)))
    else:
        request.chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content=draw(texts))
    return request


def with_all_its_tokens(request: inference_pb2.GenerateRequest, max_tokens: int) -> inference_pb2.GenerateRequest:
    """Return the request as the client library resumes it, with every field at its maximum."""
    resumed = inference_pb2.GenerateRequest()
    resumed.CopyFrom(request)
    resumed.sampling.MergeFrom(
        inference_pb2.SamplingParams(
            temperature=2,
            top_k=LARGEST,
            top_p=0.5,
            min_p=0.5,
            seed=(1 << 64) - 1,
            presence_penalty=1,
            frequency_penalty=1,
            repetition_penalty=2,
        )
    )
    resumed.stop.max_tokens = max_tokens
    resumed.resume_from.acceptance = bytes(ACCEPTANCE_BYTES)
    resumed.resume_from.resume_number = LARGEST
    for _ in range(request.n or 1):
        resumed.resume_from.choices.add(
            token_ids=(LARGEST_TOKEN,) * max_tokens,
            num_characters=LARGEST,
            finish_reason=inference_pb2.FINISH_REASON_LENGTH,
        )
    return resumed


@settings(max_examples=60)
@given(asked(), st.integers(0, 40_000))
def test_an_admitted_request_fits_one_message_when_resumed_with_all_its_tokens(
    request: inference_pb2.GenerateRequest, room: int
) -> None:
    """No request is refused that would fit with a few tokens to spare."""
    limits = MessageLimits(client_bytes=request.ByteSize() + room, worker_bytes=MANY)
    num_bytes, n = generate_request_from_wire(request, None).num_bytes, request.n or 1
    most = limits.most_output(num_bytes, 1, n)
    if most >= 1:
        limits.check(num_bytes, 1, n, most)
        assert with_all_its_tokens(request, most).ByteSize() <= limits.client_bytes
    with pytest.raises(RequestTooLarge, match="--max-message-bytes"):
        limits.check(num_bytes, 1, n, max(1, most + 1))
    slack = (300 + 60 * n) // (4 * n) + 1
    assert with_all_its_tokens(request, max(0, most) + slack).ByteSize() > limits.client_bytes or room == 0


RULES = LogitRules(
    tuple((LARGEST - i, 1.0) for i in range(MAX_LOGIT_BIAS)),
    *(2.0, 2.0, 2.0),
    (LARGEST,) * MAX_ALLOWED_TOKEN_IDS,
    ((LARGEST,),) * MAX_BAD_WORDS + ((LARGEST,) * (MAX_BAD_WORD_TOKENS - MAX_BAD_WORDS),),
)
SAMPLING = Sampling(temperature=2.0, top_k=LARGEST, top_p=0.5, min_p=0.5, num_logprobs=20, rules=RULES)
WORKER = MemberId("m" * 63, "i" * 32)


@settings(max_examples=40)
@given(
    num_prompt=st.integers(1, 2000),
    n=st.sampled_from((1, 2, 5, 128)),
    room=st.integers(0, 60_000),
    num_stops=st.integers(0, 1100),
)
def test_an_admitted_request_fits_every_job_that_its_router_sends_to_workers(
    num_prompt: int, n: int, room: int, num_stops: int
) -> None:
    limits = MessageLimits(client_bytes=MANY, worker_bytes=64 * 1024 + 4 * num_prompt + 48 * n + room)
    most = limits.most_output(0, num_prompt, n)
    if most < 1:
        return
    prompt, committed = (LARGEST,) * num_prompt, (LARGEST,) * most
    stops = TokenStops(most, LARGEST, frozenset(range(LARGEST - num_stops, LARGEST)))
    common = {"sampling": SAMPLING, "stops": stops, "timeout_s": 1e9, "age_s": 1e9, "is_unproven": True}
    names = {"request_id": "\U0001f600" * 128, "attempt": LARGEST, "cache_salt": "\U0001f600" * 256}
    start = DecodeJob(
        router=WORKER,
        prompt_token_ids=prompt,
        sequences=tuple(SequenceStart(LARGEST - i, (1 << 64) - 1, committed) for i in range(n)),
        signed_ticket=bytes(4096),
        priority=-(1 << 31),
        is_batch=True,
        **common,  # type: ignore[arg-type]
        **names,  # type: ignore[arg-type]
    )
    prefill = PrefillJob(
        token_ids=prompt + committed,
        seeds=((1 << 64) - 1,) * n,
        num_committed=most,
        importer=WORKER,
        prefix_sources=(PrefixSource(WORKER, "a" * 255, LARGEST),) * 8,
        priority=-(1 << 31),
        is_batch=True,
        **common,  # type: ignore[arg-type]
        **names,  # type: ignore[arg-type]
    )
    assert wire.decode_job_to_wire(start).ByteSize() <= limits.worker_bytes
    assert wire.prefill_job_to_wire(prefill).ByteSize() <= limits.worker_bytes


def test_a_request_that_cannot_be_resumed_is_limited_by_the_workers_messages_alone() -> None:
    limits = MessageLimits(client_bytes=1000, worker_bytes=1 << 24)
    limits.check(0, 10, 1, 100_000)
    with pytest.raises(RequestTooLarge, match="smaller n"):
        limits.check(0, 10, 128, 100_000)
    with pytest.raises(RequestTooLarge, match="ask for a smaller n, shorten the prompt"):
        limits.check(999, 10, 1, 1)
