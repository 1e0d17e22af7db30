"""A router is killed or frozen while it serves: clients that know another one get every token, once, and the same."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem.client import AsyncClient, AsyncGeneration
from tandem.results import Choice
from tests.polling import until as until_seen
from tests.system.rigs.processes.local_cluster import LocalCluster, Member

pytestmark = pytest.mark.asyncio(loop_scope="session")
TIMEOUT_S = 90.0
MAX_TOKENS = 64
KEEPALIVE_TIMEOUT_S = 2.0
NOTICED_S = 14.0  # a silent router, by its clients: gRPC's keepalive takes 15 s
FLAGS = ("--port", "0", "--grpc-port", "0", "--placement", "least-loaded")


@asynccontextmanager
async def second_router(cluster: LocalCluster) -> AsyncIterator[Member]:
    """Start a second router, which ends no request and delivers few tokens of each. The test leaves the cluster with
    its first router alone."""
    member = await cluster.start_member("second", "tests.faults.holding_router", FLAGS)
    try:
        yield member
    finally:
        if member.process.returncode is None:
            member.process.kill()
        await member.exit_code()
        assert member.reader is not None
        await member.reader
        del cluster.members[member.name]


def started(client: AsyncClient, number: int) -> AsyncGeneration:
    """Start greedy and sampled requests of different lengths, two of them with two choices."""
    return client.generate(
        token_ids=range(30, 60 + number),
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        temperature=0.0 if number % 2 else 1.0,
        seed=number,
        n=2 if number in (2, 3) else 1,
        logprobs=1,
    )


def content(choice: Choice) -> tuple[object, ...]:
    chosen = tuple(position.chosen.token_id for position in choice.logprobs)
    return choice.token_ids, choice.text, choice.finish_reason, chosen


@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_clients_of_a_killed_or_stopped_router_lose_no_token(cluster: LocalCluster, blow: signal.Signals) -> None:
    """Eight streams, from one that gets two tokens of its first router to one that gets more than twenty."""
    staying = cluster.members["router0"].grpc_address
    async with AsyncClient(staying, timeout_s=TIMEOUT_S) as client:
        undisturbed = await asyncio.gather(*(started(client, number).result() for number in range(8)))
    async with second_router(cluster) as dying:
        async with AsyncClient(
            [dying.grpc_address, staying], timeout_s=TIMEOUT_S, keepalive_timeout_s=KEEPALIVE_TIMEOUT_S
        ) as client:
            generations = [started(client, number) for number in range(8)]
            await asyncio.gather(*(until(generation, 2) for generation in generations))
            dying.send_signal(blow)
            async with asyncio.timeout(NOTICED_S if blow is signal.SIGSTOP else None):
                await asyncio.gather(*(resumed(generation, staying) for generation in generations))
            results = await asyncio.gather(*(generation.result() for generation in generations))
    for result, expected in zip(results, undisturbed, strict=True):
        assert list(map(content, result.choices)) == list(map(content, expected.choices))
        assert result.usage.completion_tokens == expected.usage.completion_tokens
    assert [result.ledger.reasons[:1] for result in results] == [("resumed",)] * 8
    await cluster.until_free()


@pytest.mark.slow
async def test_a_request_to_the_only_router_outlives_seconds_in_which_it_is_stopped(cluster: LocalCluster) -> None:
    """A stopped router accepts no request. The client sends the request again, and gets each token once."""
    router = cluster.members["router0"]
    async with AsyncClient(router.grpc_address, timeout_s=TIMEOUT_S, keepalive_timeout_s=KEEPALIVE_TIMEOUT_S) as client:
        undisturbed = await started(client, 2).result()
        with router.stopped():
            generation = started(client, 2)
            reading = asyncio.create_task(generation.result())
            await until_seen(lambda: losses(generation), lambda number: number == 2, what="two lost calls")
        result = await reading
    assert list(map(content, result.choices)) == list(map(content, undisturbed.choices))
    await cluster.until_free()


async def losses(generation: AsyncGeneration) -> int:
    return generation._progress._num_lost


async def until(generation: AsyncGeneration, num_tokens: int) -> None:
    """Wait until this token. Tokens of a decode worker follow a settled hand-off."""
    while (delta := await anext(generation)).first_index + len(delta.token_ids) < num_tokens:
        pass


async def resumed(generation: AsyncGeneration, router: str) -> None:
    """Read until a token comes from this router."""
    while generation._progress.router != router:
        await anext(generation)
