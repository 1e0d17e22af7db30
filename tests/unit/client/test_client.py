"""The client library against a real gRPC server whose answers are scripted."""

import asyncio
import gc
import time
from typing import Any

import grpc
import pytest

from tandem.client import AsyncClient, Client
from tandem.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    TandemError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from tandem.options import AllOptions, generate_request
from tandem.results import (
    Choice,
    Ledger,
    Model,
    Phase,
    PositionLogprobs,
    TokenLogprob,
    Usage,
    WorkerTime,
)
from tandem.v1 import inference_pb2
from tests.unit.client.scripted_router import (
    SUMMARY,
    TWO_CHOICES,
    Delta,
    Response,
    aborting,
    generation_request,
    router,
)

# The blocking client


def test_deltas_come_in_order_and_make_the_result() -> None:
    with router() as (_, address), Client(address) as client:
        generation = client.generate("hi", n=2)
        first = next(generation)
        rest = list(generation)
        result = generation.result()
    assert (first.choice, first.first_index, first.token_ids, first.text) == (0, 0, (7,), "a")
    assert [delta.choice for delta in rest] == [1, 1, 0, 0]
    assert result.request_id == generation.request_id
    assert result.choices == (
        Choice((7, 10, 11), "ade", (), "length", ""),
        Choice((8, 9), "bc", (), "stop", "!"),
    )
    assert (result.text, result.token_ids) == ("ade", (7, 10, 11))
    assert result.usage == Usage(3, 5, 1)
    times = (WorkerTime("p@1", 0.25, 0.125, 0.0625),)
    phases, members = (Phase("prefill", 0.25),), ("p@1", "d@2")
    assert result.ledger == Ledger(phases, 0.5, 0.25, members, "shm", 4096, ("worker_lost",), times)


def test_every_option_reaches_the_router() -> None:
    with router() as (servicer, address), Client(address) as client:
        client.generate(
            token_ids=[1, 2**32 - 1],
            model="m",
            request_id="mine",
            n=3,
            max_tokens=5,
            min_tokens=2,
            temperature=0.5,
            top_k=4,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            stop="\n",
            stop_token_ids=[9],
            ignore_eos=True,
            logprobs=0,
            cache_salt="tenant",
            priority=-2,
            is_batch=True,
            slo_ttft_s=0.5,
            slo_tpot_s=0.125,
            stream_interval=16,
        ).result()
    request = generation_request(servicer)
    assert (request.request_id, request.model, request.n, request.logprobs) == ("mine", "m", 3, 0)
    assert request.HasField("logprobs") and request.cache_salt == "tenant"
    assert (request.priority, request.is_batch) == (-2, True)
    assert (request.slo_ttft_s, request.slo_tpot_s, request.stream_interval) == (0.5, 0.125, 16)
    assert tuple(request.token_ids.ids) == (1, 2**32 - 1)
    sampling, stop = request.sampling, request.stop
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 4, 0.25, 0.125)
    assert sampling.seed == 2**64 - 1
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos, list(stop.stop)) == (5, 2, True, ["\n"])
    assert tuple(stop.stop_token_ids) == (9,)


def test_an_option_that_is_none_counts_as_not_given() -> None:
    given: Any = dict.fromkeys(AllOptions.__annotations__)
    conversation = [{"role": "user", "content": "x"}]
    for text, messages in (("x", None), (None, conversation)):
        plain, none = generate_request(text, None, messages, {}), generate_request(text, None, messages, given)
        plain.request_id = none.request_id
        assert none == plain


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"json_schema": {"type": "object"}}, inference_pb2.GRAMMAR_KIND_JSON_SCHEMA, '{"type": "object"}'),
        ({"json_schema": "{}"}, inference_pb2.GRAMMAR_KIND_JSON_SCHEMA, "{}"),
        ({"regex": "a+"}, inference_pb2.GRAMMAR_KIND_REGEX, "a+"),
        ({"choice": ["yes", "no"]}, inference_pb2.GRAMMAR_KIND_CHOICE, '["yes", "no"]'),
        ({"grammar": "start: a"}, inference_pb2.GRAMMAR_KIND_GRAMMAR, "start: a"),
    ],
)
def test_a_grammar_is_sent_with_its_kind(options: Any, kind: int, text: str) -> None:
    request = generate_request("x", None, None, options)
    assert (request.grammar.kind, request.grammar.text) == (kind, text)


def test_one_grammar_at_most_is_sent() -> None:
    assert not generate_request("x", None, None, {}).HasField("grammar")
    with pytest.raises(ValueError, match="one of regex and choice"):
        generate_request("x", None, None, {"regex": "a", "choice": ["b"]})
    with pytest.raises(TypeError, match="choice must be a sequence"):
        generate_request("x", None, None, {"choice": "b"})


def test_omitted_options_stay_unset_in_the_request() -> None:
    with router() as (servicer, address), Client(address) as client:
        generation = client.generate("")
        generation.result()
    request = generation_request(servicer)
    assert request.WhichOneof("prompt") == "text"
    assert request.request_id == generation.request_id != ""
    assert not any(request.sampling.HasField(name) for name in ("temperature", "top_k", "top_p", "min_p", "seed"))
    assert not request.stop.HasField("max_tokens")
    assert not request.HasField("slo_ttft_s") and not request.HasField("slo_tpot_s")
    assert not request.HasField("logprobs")


def test_messages_make_a_conversation() -> None:
    with router() as (servicer, address), Client(address) as client:
        client.generate(messages=[{"role": "user", "content": "hi"}]).result()
        assert client.tokenize(messages=[{"role": "user", "content": "hi"}]) == (1, 2, 2**32 - 1)
    expected = inference_pb2.ChatPrompt(
        messages=[inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="hi")]
    )
    assert [request.chat for request in servicer.seen] == [expected, expected]  # type: ignore[attr-defined]


def test_invalid_arguments_are_refused_by_the_client() -> None:
    with Client("127.0.0.1:1") as client:
        for wrong in (
            lambda: client.generate(),
            lambda: client.generate("a", token_ids=[1]),
            lambda: client.generate(token_ids=[-1]),
            lambda: client.generate(token_ids=[2**32]),
            lambda: client.generate(messages=[{"role": "user", "content": "x", "colour": "red"}]),
            lambda: client.generate("a", seed=-1),
            lambda: client.generate("a", max_tokens=-1),
            lambda: client.generate("a", n=0),
            lambda: client.tokenize(),
        ):
            with pytest.raises(ValueError, match=r"exactly one|token_ids must|colour|(seed|max_tokens|n) must be from"):
                wrong()
        with pytest.raises(TypeError, match="unknown options: temprature"):
            client.generate("a", temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1, 2], {}, r"prompt must be a str, not list: pass token ids as token_ids=\[\.\.\.\]"),
        (None, {"token_ids": "ab"}, "token_ids must be a sequence of integers"),
        (None, {"token_ids": 7}, "token_ids must be a sequence of integers"),
        ("a", {"stop_token_ids": ["x"]}, "stop_token_ids must be a sequence of integers"),
        ("a", {"max_tokens": "8"}, "max_tokens must be an integer, not str"),
        ("a", {"temperature": "hot"}, "temperature must be a number, not str"),
        ("a", {"model": 1}, "model must be a str, not int"),
        ("a", {"stop": 1}, "stop must be a str or a sequence of str"),
        ("a", {"bad_words": "no"}, "bad_words must be a list of str"),
        ("a", {"logit_bias": [7]}, "logit_bias must be a mapping from token ids to numbers"),
        ("a", {"presence_penalty": "1"}, "presence_penalty must be a number, not str"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(prompt: object, options: dict[str, Any], message: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=message):
        client.generate(prompt, **options)  # type: ignore[arg-type]


def test_an_unknown_role_of_a_message_is_refused_with_the_known_roles() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match="use one of system, user, assistant, tool"):
        client.generate(messages=[{"role": "narrator", "content": "x"}])


def test_an_unknown_finish_reason_is_an_error_with_its_number() -> None:
    newer = Delta(token_ids=[7], finish_reason=9)  # type: ignore[arg-type]
    with router(responses=[Response(deltas=[newer])]) as (_, address), Client(address) as client:
        with pytest.raises(InternalError, match="9 is not a valid FinishReason: the known ones are stop, length"):
            client.generate("x").result()


def test_logprobs_arrive_with_the_alternatives_of_each_token() -> None:
    token = inference_pb2.TokenLogprob
    position = inference_pb2.PositionLogprobs(
        chosen=token(token_id=7, logprob=-0.5), top=[token(token_id=6, logprob=-0.25), token(token_id=7, logprob=-0.5)]
    )
    delta = Delta(token_ids=[7], logprobs=[position], finish_reason=inference_pb2.FINISH_REASON_STOP)
    with (
        router(responses=[Response(deltas=[delta]), Response(summary=SUMMARY)]) as (_, address),
        Client(address) as client,
    ):
        result = client.generate("x", logprobs=2).result()
    rivals = (TokenLogprob(6, -0.25), TokenLogprob(7, -0.5))
    assert result.choices[0].logprobs == (PositionLogprobs(TokenLogprob(7, -0.5), rivals),)


def test_the_client_tokenizes_detokenizes_and_lists_models() -> None:
    with router() as (_, address), Client(address) as client:
        assert client.tokenize("x") == (1, 2, 2**32 - 1)
        assert client.detokenize([1]) == "é"
        assert client.models() == (Model("m", 10, 20, True, False),)


def test_each_call_carries_the_key_and_the_deadline() -> None:
    with router() as (servicer, address), Client(address, api_key="secret", timeout_s=50) as client:
        began_s = time.monotonic()
        client.generate("x").result()
        assert servicer.metadata["authorization"] == "Bearer secret"
        assert 50 - (time.monotonic() - began_s) < servicer.remaining_s < 51
        began_s = time.monotonic()
        client.generate("x", timeout_s=20).result()
        assert 20 - (time.monotonic() - began_s) < servicer.remaining_s < 21
        client.models()
        assert servicer.metadata["authorization"] == "Bearer secret"
        assert servicer.remaining_s < 31


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.ALREADY_EXISTS, InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, UnknownModel),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.INTERNAL, InternalError),
    ],
)
def test_errors_carry_message_reason_and_retry_time(code: grpc.StatusCode, kind: type[TandemError]) -> None:
    failure = aborting(code, "what to change", reason="the_reason", retry_after_s="1.500")
    with router(failure=failure, responses=[]) as (_, address), Client(address) as client:
        with pytest.raises(kind, match="what to change") as raised:
            client.generate("x").result()
    assert type(raised.value) is kind
    assert (raised.value.reason, raised.value.retry_after_s) == ("the_reason", 1.5)


def test_a_failure_in_mid_stream_comes_after_the_deltas() -> None:
    failure = aborting(grpc.StatusCode.UNAVAILABLE, "both pools are gone", reason="worker_lost")
    with router(failure=failure, responses=TWO_CHOICES[:2]) as (_, address), Client(address) as client:
        generation = client.generate("x")
        assert [next(generation).text for _ in range(3)] == ["a", "", "bc"]
        with pytest.raises(Unavailable, match="both pools"):
            next(generation)


def test_an_address_without_a_router_is_unavailable() -> None:
    with Client("127.0.0.1:1", connect_timeout_s=0.3) as client:
        with pytest.raises(Unavailable) as raised:
            client.generate("x").result()
        assert raised.value.reason == "unavailable"
        with pytest.raises(Unavailable):
            client.models()


def test_a_passed_deadline_raises_deadline_exceeded() -> None:
    with (
        router(hold=True) as (_, address),
        Client(address) as client,
        pytest.raises(DeadlineExceeded, match="timeout_s"),
    ):
        client.generate("x", timeout_s=0.2).result()


def test_a_repeated_or_missing_token_is_never_delivered() -> None:
    for index in (0, 2):
        broken = [TWO_CHOICES[0], Response(deltas=[Delta(choice=0, first_index=index, token_ids=[1])])]
        with router(responses=broken) as (_, address), Client(address) as client:
            generation = client.generate("x")
            assert (next(generation).text, next(generation).text) == ("a", "")
            with pytest.raises(InternalError, match="1 tokens were received"):
                next(generation)


def test_a_stream_without_a_summary_is_an_error() -> None:
    with router(responses=TWO_CHOICES[:-1]) as (_, address), Client(address) as client:
        with pytest.raises(InternalError, match="without its summary"):
            client.generate("x").result()


def test_leaving_the_block_of_a_generation_cancels_the_request() -> None:
    with router(hold=True) as (servicer, address), Client(address) as client:
        with client.generate("x") as generation:
            next(generation)
        assert servicer.left.wait(10)
        with pytest.raises(Cancelled):
            list(generation)


def test_garbage_collecting_a_generation_cancels_the_request() -> None:
    with router(hold=True) as (servicer, address), Client(address) as client:
        for _ in client.generate("x"):
            break
        gc.collect()
        assert servicer.left.wait(10)


# The asyncio client


async def test_the_async_client_gives_the_same_result() -> None:
    with router() as (servicer, address):
        async with AsyncClient(address, api_key="secret") as client:
            generation = client.generate("hi", n=2)
            texts = [delta.text async for delta in generation]
            result = await generation.result()
            assert await client.tokenize("x") == (1, 2, 2**32 - 1)
            assert await client.detokenize([1]) == "é"
            assert await client.models() == (Model("m", 10, 20, True, False),)
    assert texts == ["a", "", "bc", "", "de"]
    assert [choice.text for choice in result.choices] == ["ade", "bc"]
    assert servicer.metadata["authorization"] == "Bearer secret"


async def test_many_async_generations_run_at_once() -> None:
    with router() as (_, address):
        async with AsyncClient(address) as client:
            results = await asyncio.gather(*(client.generate("x").result() for _ in range(20)))
    assert len({result.request_id for result in results}) == 20
    assert {result.text for result in results} == {"ade"}


async def test_the_async_client_raises_the_same_errors() -> None:
    failure = aborting(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="queue_full", retry_after_s="2.000")
    with router(failure=failure, responses=[]) as (_, address):
        async with AsyncClient(address) as client:
            with pytest.raises(Overloaded) as raised:
                await client.generate("x").result()
    assert (raised.value.reason, raised.value.retry_after_s) == ("queue_full", 2.0)


async def test_leaving_the_block_of_an_async_generation_cancels_the_request() -> None:
    with router(hold=True) as (servicer, address):
        async with AsyncClient(address) as client:
            async with client.generate("x") as generation:
                await anext(generation)
            assert await asyncio.to_thread(servicer.left.wait, 10)
            with pytest.raises(Cancelled):
                await generation.result()


async def test_cancelling_the_reader_cancels_the_generation() -> None:
    with router(hold=True) as (servicer, address):
        async with AsyncClient(address) as client:
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in client.generate("x"):
                    begun.set()

            reader = asyncio.create_task(read())
            await asyncio.wait_for(begun.wait(), 10)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert await asyncio.to_thread(servicer.left.wait, 10)
