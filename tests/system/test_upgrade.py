"""Members of two versions in one cluster: they serve together, leave under load, and every one can be replaced."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tandem.client import AsyncClient, AsyncGeneration
from tandem.results import Choice, Result
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tests.later_version import with_unknown_fields
from tests.system.local_cluster import LocalCluster, Member
from tests.system.previous_version import EarlierVersion, earlier_version

pytestmark = pytest.mark.asyncio(loop_scope="session")
TIMEOUT_S = 90.0
ROUTER_FLAGS = ("--port", "0", "--grpc-port", "0", "--placement", "least-loaded")
EARLIER = {"earlier_router": "router", "earlier_prefill": "prefill_worker", "earlier_decode": "decode_worker"}
NUM_QUESTIONS = 8


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> EarlierVersion:
    return earlier_version(tmp_path_factory.mktemp("previous"))


def asked(client: AsyncClient, number: int, *, max_tokens: int = 12) -> AsyncGeneration:
    """Greedy ones and sampled ones, prompts of one to four blocks, one in four with two choices."""
    return client.generate(
        token_ids=range(40 + number, 56 + 8 * number),
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0.0 if number % 2 else 1.0,
        seed=number,
        n=2 if number % 4 == 2 else 1,
        logprobs=1,
    )


def content(result: Result) -> list[tuple[object, ...]]:
    return [_content(choice) for choice in result.choices]


def _content(choice: Choice) -> tuple[object, ...]:
    return choice.token_ids, choice.text, choice.finish_reason


async def answers(addresses: Sequence[str], *, max_tokens: int = 12) -> list[Result]:
    async with AsyncClient(addresses, timeout_s=TIMEOUT_S) as client:
        generations = [asked(client, number, max_tokens=max_tokens) for number in range(NUM_QUESTIONS)]
        return await asyncio.gather(*(generation.result() for generation in generations))


@asynccontextmanager
async def joined(cluster: LocalCluster, version: EarlierVersion) -> AsyncIterator[list[Member]]:
    """A router, a prefill and a decode worker of that version; leaves the cluster without them."""
    workers = cluster.members["prefill0"].flags
    starting = (
        cluster.start_member(name, module, ROUTER_FLAGS if module == "router" else workers, wrapper=version.wrapper)
        for name, module in EARLIER.items()
    )
    try:
        yield await asyncio.gather(*starting)
    finally:
        for name in EARLIER:
            member = cluster.members.pop(name, None)
            if member is not None:
                await _ended(member)


async def _ended(member: Member) -> None:
    if member.process.returncode is None:
        member.process.kill()
    await member.exit_code()
    if member.reader is not None:
        await member.reader


async def every_pair_has_served(address: str, expected: Sequence[Result]) -> None:
    """Prefill of either version with decode of either version, by this router, every answer the same."""
    met: set[tuple[bool, ...]] = set()
    async with asyncio.timeout(TIMEOUT_S):
        while len(met) < 4:
            for result, wanted in zip(await answers([address]), expected, strict=True):
                assert content(result) == content(wanted)
                assert result.ledger.reasons == ()
                met.add(tuple(member.partition("@")[0] in EARLIER for member in result.ledger.members))
    assert met == set(itertools.product((False, True), repeat=2))


async def test_members_of_the_previous_version_serve_beside_present_ones_and_leave_under_load(
    cluster: LocalCluster, previous: EarlierVersion
) -> None:
    present = cluster.members["router0"].grpc_address
    expected, long = await answers([present]), await answers([present], max_tokens=120)
    async with joined(cluster, previous) as earlier:
        await every_pair_has_served(present, expected)
        await every_pair_has_served(earlier[0].grpc_address, expected)
        async with AsyncClient([earlier[0].grpc_address, present], timeout_s=TIMEOUT_S) as client:
            generations = [asked(client, number, max_tokens=120) for number in range(NUM_QUESTIONS)]
            await asyncio.gather(*(anext(generation) for generation in generations))
            for member in earlier[:2]:
                member.send_signal(signal.SIGTERM)
            async with cluster.channel("earlier_decode") as channel:  # which knows fewer fields than its caller
                request = with_unknown_fields(worker_pb2.DrainWorkerRequest())
                await worker_pb2_grpc.WorkerStub(channel).DrainWorker(request, timeout=TIMEOUT_S)
            results = await asyncio.gather(*(generation.result() for generation in generations))
        assert [await member.exit_code() for member in earlier] == [0, 0, 0], cluster.output()[-4000:]
    assert list(map(content, results)) == list(map(content, long))
    await cluster.until_free()
