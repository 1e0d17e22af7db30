"""Tests that an acceptance permits only the request that was accepted, with its prompt, parameters and API key.

Routers, calls and signatures are real; the workers are scripted, so that each token shows its stream.
"""

import json
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.text.tokenization import Tokenization
from tandem.v1 import inference_pb2
from tests.system.rigs.members.router_harness import DEMO_MODEL, PROMPT, ask, expected_tokens
from tests.system.rigs.members.scripted_workers import scripted_token
from tests.system.rigs.members.takeover_rig import (
    HOUR_S,
    MAX_TOKENS,
    Request,
    Response,
    live_at,
    question,
    resuming,
    served,
    tokens,
)


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
        refused = router.router.telemetry.value(
            "tandem_requests_refused_total", reason="acceptance_invalid", service_class="interactive"
        )
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
async def test_an_acceptance_is_valid_for_the_accepted_request_only(changes: dict[str, Any], reason: str) -> None:
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
        assert await fourth.refusal(resumed, "owner") == foreign, (
            "a router without an API key accepts no acceptance of another client"
        )
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
