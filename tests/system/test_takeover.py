"""Tests which clients may resume a request: an attacker's client and the owner's against real routers.

Routers, calls and signatures are real; the workers are scripted, so that each token shows its stream.
"""

import asyncio
import json
import random
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from cluster.serving.serving import MAX_MESSAGE_BYTES, GrpcServer, open_channel
from router.grpc_api.service import AdminService, ApiKeyInterceptor, InferenceService, WriteTimeout
from router.text.tokenization import Tokenization
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.system.router_harness import DEMO_MODEL, PROMPT, RouterUnderTest, ask, expected_tokens, router_under_test
from tests.system.scripted_workers import ScriptedDecode, ScriptedPrefill, scripted_token

MAX_TOKENS = 12
HOUR_S = 3600.0
LARGEST_NUMBER = (1 << 32) - 1
Request: TypeAlias = inference_pb2.GenerateRequest
Response: TypeAlias = inference_pb2.GenerateResponse


class Served:
    """A router of the cluster behind its real gRPC server."""

    def __init__(
        self, router: RouterUnderTest, prefill: ScriptedPrefill, decode: ScriptedDecode, channel: grpc.aio.Channel
    ) -> None:
        self.router, self.prefill, self.decode = router, prefill, decode
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.admin = admin_pb2_grpc.AdminStub(channel)

    async def answer(self, request: Request, api_key: str = "") -> list[Response]:
        call = self.stub.Generate(request, timeout=20, metadata=_shown(api_key))
        return [response async for response in call]

    async def refusal(self, request: Request, api_key: str = "") -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.answer(request, api_key)
        trailing = dict(refused.value.trailing_metadata() or ())
        return refused.value.code(), str(trailing["tandem-reason"])


def _shown(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


@asynccontextmanager
async def served(api_key: str = "", **settings: Any) -> AsyncIterator[Served]:
    async with router_under_test(**settings) as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        server = GrpcServer(
            service_names=["tandem.v1.Inference", "tandem.v1.Admin"],
            telemetry=router.telemetry,
            interceptors=[ApiKeyInterceptor(api_key)] if api_key else [],
            max_message_bytes=settings.get("max_message_bytes", MAX_MESSAGE_BYTES),
        )
        inference = InferenceService(
            pipeline=router.pipeline,
            tokenization=router.tokenization,
            stalls=WriteTimeout(60.0, router.telemetry),
            asks_for_keys=bool(api_key),
        )
        admin: Any = AdminService(
            pipeline=router.pipeline,
            fleet=router.fleet,
            migrations=router.migrations,
            drains=None,  # type: ignore[arg-type]  # neither is asked for here
            scaling=None,  # type: ignore[arg-type]
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server.grpc)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server.grpc)
        address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start()
        try:
            async with open_channel(address) as channel:
                yield Served(router, prefill, decode, channel)
        finally:
            await server.stop(0)


def question(**fields: Any) -> Request:
    asked: dict[str, Any] = {
        "request_id": "mine",
        "token_ids": inference_pb2.TokenIds(ids=PROMPT),
        "sampling": inference_pb2.SamplingParams(temperature=0, seed=1),
        "stop": inference_pb2.StopConditions(max_tokens=MAX_TOKENS),
    }
    return Request(**asked | fields)


def resuming(request: Request, acceptance: bytes, *token_ids: list[int], number: int = 1) -> Request:
    """Return the request as the client library resumes it for the `number`th time."""
    resumed = Request()
    resumed.CopyFrom(request)
    choices = [inference_pb2.ResumedChoice(token_ids=ids) for ids in token_ids]
    resume_from = inference_pb2.ResumeFrom(choices=choices, acceptance=acceptance, resume_number=number)
    resumed.resume_from.CopyFrom(resume_from)
    return resumed


def tokens(responses: list[Response]) -> list[int]:
    return [i for response in responses for delta in response.deltas for i in delta.token_ids]


class Live:
    """A client's stream that has begun and is held before its fourth token."""

    def __init__(self, at: Served, call: Any, first: Response) -> None:
        self._at, self._call = at, call
        self.acceptance: bytes = first.accepted.acceptance
        assert first.request_id == "mine" and self.acceptance and not first.deltas

    async def goes_on(self) -> list[int]:
        """Let the stream continue to its end, and check that it is complete."""
        self._at.decode.resumed.set()
        responses = [response async for response in self._call]
        assert responses[-1].HasField("summary")
        return tokens(responses)

    async def is_ended(self) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="come back") as ended:
            async for _ in self._call:
                pass
        assert ended.value.code() is grpc.StatusCode.CANCELLED


async def live_at(at: Served, request: Request | None = None, api_key: str = "") -> Live:
    at.decode.pause_at = 4
    call = at.stub.Generate(request or question(), timeout=30, metadata=_shown(api_key))
    first = await anext(aiter(call))
    async with asyncio.timeout(10):
        await at.decode.paused.wait()
    return Live(at, call, first)


async def test_the_acceptance_comes_before_any_worker_answers() -> None:
    async with served() as router:
        router.prefill.before_first_tokens.close()
        call = router.stub.Generate(question(), timeout=20)
        async with asyncio.timeout(10):
            first = await anext(aiter(call))
        assert first.accepted.acceptance and first.accepted.max_tokens == MAX_TOKENS and not first.deltas
        call.cancel()


async def test_a_client_that_reconnects_to_its_router_takes_over_its_request() -> None:
    """The client's link was cut, and the router has not noticed the end of the first stream."""
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(router)
        assert await router.refusal(question()) == (grpc.StatusCode.ALREADY_EXISTS, "duplicate_request")
        router.decode.pause_at = None
        responses = await router.answer(resuming(question(), live.acceptance, expected[:2]))
        assert tokens(responses) == expected[2:]
        assert responses[0].accepted.acceptance == live.acceptance, "it stays good for a second loss"
        await live.is_ended()
        assert router.decode.cancelled_handles, "its first sequence was told to stop"


SUPERSEDED = (grpc.StatusCode.FAILED_PRECONDITION, "resume_superseded")


async def test_a_delayed_call_does_not_end_the_stream_of_a_newer_one() -> None:
    """The network held the client's second resumption back until its third one was live; a proxy repeats the third."""
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        first = await live_at(router)
        newest = await live_at(router, resuming(question(), first.acceptance, expected[:2], number=3))
        await first.is_ended()
        for number in (1, 2, 3):
            delayed = resuming(question(), first.acceptance, expected[:1], number=number)
            assert await router.refusal(delayed) == SUPERSEDED
        refused = router.router.telemetry.value("tandem_requests_refused_total", reason="resume_superseded")
        assert refused == 3
        assert await newest.goes_on() == expected[2:]


async def test_among_concurrent_resumptions_the_highest_number_is_served_in_any_order() -> None:
    numbers = [4, 1, LARGEST_NUMBER, 3, 2]
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        first = await live_at(router)
        router.decode.pause_at = None
        resumed = [resuming(question(), first.acceptance, expected[:2], number=number) for number in numbers]
        router.prefill.before_first_tokens.close()
        calls = [asyncio.create_task(router.answer(request)) for request in resumed]
        newest = calls[numbers.index(LARGEST_NUMBER)]
        older = [call for call in calls if call is not newest]
        ended, _ = await asyncio.wait(older, timeout=10)
        assert ended == set(older)
        for call in older:
            with pytest.raises(grpc.aio.AioRpcError, match=r"come back|newer"):
                await call
        router.prefill.before_first_tokens.open()
        assert tokens(await newest) == expected[2:]
        await first.is_ended()


async def test_a_delayed_call_is_served_where_no_newer_stream_is_live() -> None:
    """The router has nothing to compare it with. Its client no longer waits for it, so it ends with its connection."""
    async with served() as first, served() as second:
        expected = expected_tokens(first.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(first)
        first.decode.pause_at = None
        newest = resuming(question(), live.acceptance, expected[:2], number=2)
        delayed = resuming(question(), live.acceptance, expected[:1], number=1)
        assert tokens(await first.answer(newest)) == expected[2:]
        assert tokens(await first.answer(delayed)) == expected[1:], "the newer stream has ended"
        assert tokens(await second.answer(delayed)) == expected[1:], "the newer stream was never here"
        await live.is_ended()


async def test_a_resumption_without_its_number_is_refused_and_ends_nothing() -> None:
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(router)
        wrong = resuming(question(), live.acceptance, expected[:2], number=0)
        assert await router.refusal(wrong) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
        assert await live.goes_on() == expected


async def test_a_request_that_lost_its_router_before_any_token_keeps_its_turn_elsewhere() -> None:
    async with served() as first, served() as second:
        live = await live_at(first)
        responses = await second.answer(resuming(question(), live.acceptance, []))
        assert tokens(responses) == expected_tokens(second.router, ask(max_tokens=MAX_TOKENS))
        assert responses[-1].summary.ledger.reasons == ["resumed"]
        await live.goes_on()


async def test_a_request_id_alone_does_not_take_over_a_live_stream() -> None:
    """The ids that `Requests` lists to every client do not suffice."""
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(router)
        (listed,) = (await router.admin.Requests(admin_pb2.RequestsRequest(), timeout=10)).requests
        assert listed.request_id == "mine"
        for token_ids in ([], expected[:2]):
            wrong = resuming(question(), b"", token_ids)
            assert await router.refusal(wrong) == (grpc.StatusCode.FAILED_PRECONDITION, "acceptance_missing")
        assert await live.goes_on() == expected


async def test_an_acceptance_of_another_stream_with_the_same_id_prompt_and_parameters_ends_nothing() -> None:
    """An attacker who knows all of a request asks for the same at another router, and shows what it got there."""
    async with served() as router, served() as elsewhere:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(router)
        elsewhere.decode.pause_at = None
        forged = (await elsewhere.answer(question()))[0].accepted.acceptance
        assert forged != live.acceptance
        router.decode.pause_at = None
        assert tokens(await router.answer(resuming(question(), forged, expected[:2]))) == expected[2:], (
            "its own request"
        )
        assert await live.goes_on() == expected


async def test_an_id_in_use_at_another_router_does_not_block_a_resumption() -> None:
    async with served() as first, served() as second:
        expected = expected_tokens(first.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(first)
        squatter = await live_at(second)
        second.decode.pause_at = None
        assert tokens(await second.answer(resuming(question(), live.acceptance, expected[:1]))) == expected[1:]
        assert await squatter.goes_on() == expected
        await live.goes_on()


async def test_a_mutated_or_shortened_acceptance_is_refused_and_ends_nothing() -> None:
    async with served() as router:
        live = await live_at(router)
        dice = random.Random(5)
        good = live.acceptance
        bad = [
            good[:place] + bytes([good[place] ^ 1 << dice.randrange(8)]) + good[place + 1 :]
            for place in range(len(good))
        ]
        bad += [good[:length] for length in range(1, len(good), 7)] + [good + b"\0", bytes(len(good)), b"\xff" * 40]
        for acceptance in bad:
            wrong = resuming(question(), acceptance, [])
            assert await router.refusal(wrong) == (grpc.StatusCode.FAILED_PRECONDITION, "acceptance_invalid")
        refused = router.router.telemetry.value("tandem_requests_refused_total", reason="acceptance_invalid")
        assert refused == len(bad)
        await live.goes_on()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_id": "another"}, "acceptance_invalid"),
        ({"token_ids": inference_pb2.TokenIds(ids=(*PROMPT, 9))}, "prompt_changed"),
        ({"token_ids": inference_pb2.TokenIds(ids=PROMPT[:-1])}, "prompt_changed"),
        ({"text": "another"}, "prompt_changed"),
        ({"n": 2}, "request_changed"),
        ({"sampling": inference_pb2.SamplingParams(temperature=1, seed=1)}, "request_changed"),
        ({"sampling": inference_pb2.SamplingParams(temperature=0, seed=2)}, "request_changed"),
        ({"stop": inference_pb2.StopConditions(max_tokens=MAX_TOKENS + 1)}, "request_changed"),
        ({"stop": inference_pb2.StopConditions(max_tokens=MAX_TOKENS, stop=["x"])}, "request_changed"),
        ({"cache_salt": "another tenant's"}, "request_changed"),
        ({"priority": -5}, "request_changed"),
    ],
    ids=str,
)
async def test_an_acceptance_is_good_for_what_was_accepted_only(changes: dict[str, Any], reason: str) -> None:
    async with served() as router:
        live = await live_at(router)
        wrong = question(**changes)
        if "text" in changes:
            wrong.text = changes["text"]
        resumed = resuming(wrong, live.acceptance, *[[]] * (wrong.n or 1))
        assert await router.refusal(resumed) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
        assert await live.goes_on() == expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))


async def test_an_acceptance_belongs_to_the_api_key_of_its_request() -> None:
    """Routers of one cluster may require different keys. A stolen acceptance needs its owner's key too."""
    async with served("owner") as first, served("owner") as second, served("thief") as third, served() as fourth:
        expected = expected_tokens(first.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(first, api_key="owner")
        resumed = resuming(question(), live.acceptance, expected[:2])
        foreign = (grpc.StatusCode.FAILED_PRECONDITION, "acceptance_of_another_client")
        assert await third.refusal(resumed, "thief") == foreign
        assert await fourth.refusal(resumed, "owner") == foreign, "one that asks for no key takes nobody's word"
        assert (await first.refusal(resumed, "thief"))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert tokens(await second.answer(resumed, "owner")) == expected[2:]
        assert await live.goes_on() == expected


@pytest.mark.parametrize("jump_s", [-30 * 24 * HOUR_S, -5 * HOUR_S, 5 * HOUR_S, 30 * 24 * HOUR_S])
async def test_a_router_whose_clock_jumps_loses_no_stream(jump_s: float) -> None:
    """The age of an acceptance affects only the place in the queue."""
    shift_s = 0.0
    async with served(wall_clock=lambda: time.time() + shift_s) as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(router)
        shift_s = jump_s
        router.decode.pause_at = None
        assert tokens(await router.answer(resuming(question(), live.acceptance, expected[:2]))) == expected[2:]
        await live.is_ended()
        assert router.prefill.jobs[-1].num_committed == 2
        assert router.prefill.jobs[-1].is_interrupted == (jump_s < 0), "late, it waits its turn as a new request"


async def test_an_impossible_resumption_is_refused_and_the_live_stream_continues() -> None:
    async with served() as router:
        expected = expected_tokens(router.router, ask(max_tokens=MAX_TOKENS))
        live = await live_at(router)
        ended = [*expected, *expected][: MAX_TOKENS + 1]
        for wrong in (
            resuming(question(), live.acceptance),
            resuming(question(), live.acceptance, [], []),
            resuming(question(request_id=""), live.acceptance, []),
            resuming(question(), live.acceptance, ended),
            resuming(question(), live.acceptance, [1_000_000]),
        ):
            assert await router.refusal(wrong) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
        assert await live.goes_on() == expected


def model_with(tmp_path: Path, name: str, change: Callable[[Path], None]) -> Tokenization:
    """Write the demo model's small files with changes."""
    folder = tmp_path / name
    folder.mkdir()
    for file in DEMO_MODEL.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder / file.name)
    change(folder)
    return Tokenization.load(str(folder), served_model_name="demo_model")


def dated(folder: Path) -> None:
    set_template(folder, "{{ strftime_now('%d %B %Y %H:%M:%S') }}{{ messages[0].content }}")


def set_template(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)


def other_template(folder: Path) -> None:
    set_template(folder, "another {{ messages[0].content }}")


def other_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = content["model"]["merges"][:40]
    path.write_text(json.dumps(content))


CHAT = inference_pb2.ChatPrompt(
    messages=[inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="def f(x):")]
)


def resolved_question(first: Response, **prompt: Any) -> Request:
    request = Request(request_id="mine", **prompt)
    request.sampling.CopyFrom(first.accepted.sampling)
    request.stop.max_tokens = first.accepted.max_tokens
    return request


@pytest.mark.parametrize("later_s", [86_400.0, -43_200.0, 3.0])
async def test_a_chat_that_resumes_after_midnight_continues_its_own_prompt(tmp_path: Path, later_s: float) -> None:
    midnight_s = 1_798_761_600.0  # 2027-01-01 00:00 UTC
    model = model_with(tmp_path, "dated", dated)
    before, after = (lambda: midnight_s - 1.0), (lambda: midnight_s - 1.0 + later_s)
    async with (
        served(tokenization=model, wall_clock=before) as first,
        served(tokenization=model, wall_clock=after) as second,
    ):
        first.decode.pause_at = second.decode.pause_at = None
        stop = inference_pb2.StopConditions(max_tokens=MAX_TOKENS)
        responses = await first.answer(Request(request_id="mine", chat=CHAT, stop=stop))
        prompt, seeds = first.prefill.jobs[0].token_ids, first.prefill.jobs[0].seeds
        assert model.decode(prompt).startswith("31 December 2026 23:59:59")
        whole = [scripted_token(prompt, seeds[0], index) for index in range(MAX_TOKENS)]
        assert tokens(responses) == whole
        request = resolved_question(responses[0], chat=CHAT)
        resumed = await second.answer(resuming(request, responses[0].accepted.acceptance, whole[:5]))
        assert tokens(resumed) == whole[5:]
        assert second.prefill.jobs[0].token_ids == prompt + tuple(whole[:5])


@pytest.mark.parametrize(
    ("change", "prompt", "reason"),
    [
        (other_template, {"chat": CHAT}, "prompt_changed"),
        (other_tokenizer, {"text": "def f(x):"}, "prompt_changed"),
        (other_tokenizer, {"chat": CHAT}, "prompt_changed"),
        (other_tokenizer, {"token_ids": inference_pb2.TokenIds(ids=PROMPT)}, "request_changed"),
    ],
)
async def test_a_router_that_renders_a_different_prompt_refuses_to_resume_by_name(
    tmp_path: Path, change: Callable[[Path], None], prompt: dict[str, Any], reason: str
) -> None:
    other = model_with(tmp_path, "other", change)
    async with served() as first, served(tokenization=other) as second:
        responses = await first.answer(Request(request_id="mine", **prompt))
        acceptance = responses[0].accepted.acceptance
        wrong = resuming(resolved_question(responses[0], **prompt), acceptance, tokens(responses)[:2])
        assert await second.refusal(wrong) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
        assert not second.prefill.jobs and not second.decode.jobs


@pytest.mark.parametrize("n", [1, 3])
async def test_ids_of_the_greatest_length_are_served_and_resumed(n: int) -> None:
    async with served() as first, served() as second:
        request = question(request_id="é" * 128, label="l" * 160, n=n)
        responses = await first.answer(request)
        summary = responses[-1].summary
        assert (summary.usage.completion_tokens, summary.ledger.label) == (n * MAX_TOKENS, "l" * 160)
        resumed = resuming(request, responses[0].accepted.acceptance, *[[]] * n)
        assert (await second.answer(resumed))[-1].summary.usage.completion_tokens == n * MAX_TOKENS
        for name, value in (("request_id", "r" * 129), ("label", "l" * 161)):
            wrong = question(**{name: value})
            assert await first.refusal(wrong) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")


async def test_every_admitted_request_can_be_resumed_with_all_its_tokens() -> None:
    """The request with the most tokens that a router admits fits the message limit when it is resumed with all of
    them."""
    async with served(max_message_bytes=6000) as first, served(max_message_bytes=6000) as second:
        too_large = question(n=8, stop=inference_pb2.StopConditions(max_tokens=1000))
        call = first.stub.Generate(too_large, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError, match="max_tokens of at most") as refused:
            await call.read()
        assert dict(refused.value.trailing_metadata() or ())["tandem-reason"] == "request_too_large"
        found = re.search("at most ([0-9]+)", refused.value.details() or "")
        assert found is not None
        most = int(found[1])
        request = question(n=8, stop=inference_pb2.StopConditions(max_tokens=most))
        responses = await first.answer(request)
        choices: list[list[int]] = [[] for _ in range(8)]
        for response in responses:
            for delta in response.deltas:
                choices[delta.choice].extend(delta.token_ids)
        assert [len(choice) for choice in choices] == [most] * 8
        resumed = resuming(request, responses[0].accepted.acceptance, *choices)
        resumed.sampling.CopyFrom(responses[0].accepted.sampling)
        for choice in resumed.resume_from.choices:
            choice.finish_reason = inference_pb2.FINISH_REASON_LENGTH
        largest = inference_pb2.GenerateRequest()
        largest.CopyFrom(resumed)
        for choice in largest.resume_from.choices:
            choice.token_ids[:] = [(1 << 28) - 1] * most  # four bytes each, the most that a token id takes
        assert resumed.ByteSize() < largest.ByteSize() and 5000 < largest.ByteSize() <= 6000
        assert (await second.answer(resumed))[-1].summary.usage.completion_tokens == 8 * most
        open_length = question(n=8, stop=inference_pb2.StopConditions())
        assert (await first.answer(open_length))[0].accepted.max_tokens == most, "as many as fit, where none are named"
