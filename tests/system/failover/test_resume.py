"""Tests that when a router dies at any point of a stream, another one continues it, and nothing is lost or repeated.

Both routers and the client are real; the workers are scripted, so that each token shows its stream.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.accounts.keys import Gate
from cluster.serving.serving import GrpcServer
from router.grpc_api.service import InferenceService, WriteTimeout
from tandem.client import AsyncClient, Client
from tandem.errors import DeadlineExceeded
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.system.rigs.members.router_harness import PROMPT, RouterUnderTest, ask, expected_tokens, router_under_test
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import ScriptedPrefill, scripted_token

MAX_TOKENS = 12
Response = inference_pb2.GenerateResponse


class MortalService(InferenceService):
    """A service whose server ends before the first response for which `dies_before(tokens sent, response)` holds."""

    def __init__(self, router: RouterUnderTest, stop: Callable[[], Any]) -> None:
        self.told: tuple[str, ...] = ()
        super().__init__(
            pipeline=router.pipeline,
            tokenization=router.tokenization,
            stalls=WriteTimeout(60.0, router.telemetry),
            advertised_routers=lambda: self.told,
            gate=Gate(),
        )
        self.dies_before: Callable[[int, Response], bool] = lambda num_tokens, response: False
        self._stop = stop
        self._stopping: asyncio.Task[None] | None = None

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Response]:
        num_tokens = 0
        async for response in super().Generate(request, context):
            if self.dies_before(num_tokens, response):
                self._stopping = asyncio.create_task(self._stop())
                await asyncio.Event().wait()  # until the server's end cancels it
            yield response
            num_tokens += sum(len(delta.token_ids) for delta in response.deltas)


class ServedRouter:
    def __init__(self, router: RouterUnderTest, prefill: ScriptedPrefill, decode: ScriptedDecode) -> None:
        self.router, self.prefill, self.decode = router, prefill, decode
        self.server = GrpcServer(service_names=["tandem.v1.Inference"], telemetry=router.telemetry)
        self.service = MortalService(router, lambda: self.server.stop(0))
        inference_pb2_grpc.add_InferenceServicer_to_server(self.service, self.server.grpc)
        self.address = f"127.0.0.1:{self.server.bind('127.0.0.1', 0)}"


@asynccontextmanager
async def served(**settings: object) -> AsyncIterator[ServedRouter]:
    async with router_under_test(**settings) as router:
        one = ServedRouter(router, await router.add_prefill("p0"), await router.add_decode("d0"))
        await router.connected()
        await one.server.start()
        try:
            yield one
        finally:
            await one.server.stop(0)


def before_the_acceptance(num_tokens: int, response: Response) -> bool:
    return True


def before_token(number: int) -> Callable[[int, Response], bool]:
    """Die as soon as this many tokens of all choices together have been sent."""
    return lambda num_tokens, response: num_tokens >= number and not response.HasField("accepted")


def before_the_end(num_tokens: int, response: Response) -> bool:
    return response.HasField("summary")


def before_the_last_tokens(num_tokens: int, response: Response) -> bool:
    return any(delta.finish_reason for delta in response.deltas)


REQUEST = ask(max_tokens=MAX_TOKENS, n=2)  # its seed is 1


def undisturbed(router: RouterUnderTest) -> tuple[list[tuple[int, ...]], int]:
    """Return the tokens of both choices, and the stop token that ends the first one early."""
    first, second = (tuple(expected_tokens(router, REQUEST, choice)) for choice in (0, 1))
    assert first[3] not in second
    return [first[:4], second], first[3]


@pytest.mark.parametrize(
    "dies_before",
    [
        before_the_acceptance,
        before_token(0),
        before_token(1),
        before_token(5),
        before_token(9),
        before_the_last_tokens,
        before_the_end,
    ],
    ids=["acceptance", "first-token", "token-1", "token-5", "token-9", "last-tokens", "end-message"],
)
async def test_a_resumed_client_gets_the_answer_of_an_undisturbed_one(
    dies_before: Callable[[int, Response], bool],
) -> None:
    async with served() as first, served() as second:
        expected, stop_token_id = undisturbed(first.router)
        first.service.dies_before = dies_before
        async with AsyncClient([first.address, second.address], timeout_s=20) as client:
            result = await client.generate(
                token_ids=PROMPT, n=2, seed=1, max_tokens=MAX_TOKENS, stop_token_ids=[stop_token_id], logprobs=1
            ).result()
        decode = second.router.tokenization.decode
        assert [choice.token_ids for choice in result.choices] == expected
        assert [choice.text for choice in result.choices] == [decode(expected[0][:-1]), decode(expected[1])]
        assert [choice.finish_reason for choice in result.choices] == ["stop", "length"]
        for choice in result.choices:
            assert tuple(position.chosen.token_id for position in choice.logprobs) == choice.token_ids
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(PROMPT), 4 + MAX_TOKENS)
        assert result.ledger.reasons == (() if dies_before is before_the_acceptance else ("resumed",))
        if dies_before is before_the_end:
            assert not second.prefill.jobs and not second.decode.jobs, "there was nothing left to compute"


@pytest.mark.parametrize("dies_before", [before_token(0), before_token(5)], ids=["first-token", "token-5"])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "blocking"])
async def test_a_client_of_one_address_resumes_at_a_router_named_by_the_first(
    dies_before: Callable[[int, Response], bool], is_async: bool
) -> None:
    """The client receives the other address before the first token."""
    async with served() as first, served() as second:
        expected, _ = undisturbed(first.router)
        first.service.told = (first.address, second.address)
        first.service.dies_before = dies_before
        if is_async:
            async with AsyncClient(first.address, timeout_s=20) as client:
                result = await client.generate(token_ids=PROMPT, seed=1, max_tokens=MAX_TOKENS).result()
        else:
            with Client(first.address, timeout_s=20) as blocking:
                generation = blocking.generate(token_ids=PROMPT, seed=1, max_tokens=MAX_TOKENS)
                result = await asyncio.to_thread(generation.result)
        assert result.token_ids[:4] == expected[0]
        assert (len(result.token_ids), result.ledger.reasons) == (MAX_TOKENS, ("resumed",))


async def test_a_client_without_discovery_asks_only_the_given_router() -> None:
    async with served() as first, served() as second:
        first.service.told = (first.address, second.address)
        first.service.dies_before = before_the_acceptance
        async with AsyncClient(first.address, timeout_s=3, discover=False) as client:
            with pytest.raises(DeadlineExceeded, match=f"no process accepts connections at {first.address}"):
                await client.generate(token_ids=PROMPT, max_tokens=MAX_TOKENS).result()
        assert not second.prefill.jobs


async def test_seed_and_parameters_of_the_first_router_hold_at_the_second() -> None:
    """The seed, the sampling parameters and the length that the request left open are kept."""
    async with served() as first, served() as second:
        first.service.dies_before = before_token(5)
        async with AsyncClient([first.address, second.address], timeout_s=20) as client:
            result = await client.generate("def read(path):").result()
        (before,), (after,) = first.prefill.jobs, second.prefill.jobs
        assert (after.seeds, after.sampling, after.stops) == (before.seeds, before.sampling, before.stops)
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert after.num_committed >= 5
        assert after.is_interrupted, "it goes before prompts that had no turn yet"
        tokens = [scripted_token(before.token_ids, before.seeds[0], i) for i in range(before.stops.max_tokens)]
        assert list(result.token_ids) == tokens
        assert result.text == second.router.tokenization.decode(tokens)
