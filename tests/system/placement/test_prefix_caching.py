"""Prompts with equal beginnings, with real processes: cached blocks are neither computed nor moved, and change no
token.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from cluster.protocol import wire
from tandem.internal.v1 import worker_pb2_grpc
from tandem.v1 import inference_pb2
from tests.faults.control import FaultControl
from tests.polling import until
from tests.prefill_jobs import prefill_job
from tests.system.rigs.members.asking import Answer, ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_BLOCK_SIZE = 16
_NUM_BLOCKS = 40  # less than the requests below need at once, and than the 49 distinct blocks that their prompts fill
_FLAGS = ("--dtype", "float32", "--max-prefill-tokens", "64", "--num-blocks", str(_NUM_BLOCKS), "--max-num-seqs", "8")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small_pools(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(redis_url, tmp_path_factory.mktemp("prefixes"), flags=_FLAGS)
    try:
        yield await cluster.start(prefill=1, decode=1)
    finally:
        codes = await cluster.stop()
    assert set(codes.values()) == {0}, cluster.output()[-4000:]


def _tokens(seed: int, length: int) -> tuple[int, ...]:
    numbers = random.Random(seed)
    return tuple(numbers.randrange(10, 900) for _ in range(length))


async def test_a_prefix_is_computed_and_moved_once(small_pools: LocalCluster) -> None:
    prompt = _tokens(1, 10 * _BLOCK_SIZE + 3)
    first = await ask(small_pools, question(prompt, max_tokens=8))
    again = await ask(small_pools, question(prompt, max_tokens=8))
    longer = await ask(small_pools, question(prompt + first.token_ids + _tokens(2, 20), max_tokens=8))

    assert again.token_ids == first.token_ids
    assert [answer.usage.cached_tokens for answer in (first, again, longer)] == [0, 160, 160]
    block_bytes = int((await small_pools.inspect("decode0")).figures["block_bytes"])
    # Of the third prompt decode had ten blocks; what it generated after the first did not fill the eleventh.
    assert [answer.ledger.kv_bytes // block_bytes for answer in (first, again, longer)] == [11, 1, 2]
    await small_pools.until_free()


async def test_tenants_share_no_cached_blocks(small_pools: LocalCluster) -> None:
    prompt = _tokens(3, 5 * _BLOCK_SIZE)
    cached = []
    before = await small_pools.figures("decode")
    for salt in ("a", "b", "a"):
        answer = await ask(small_pools, question(prompt, max_tokens=4, cache_salt=salt))
        cached.append((answer.usage.cached_tokens, answer.ledger.kv_bytes > 0))
    after = await small_pools.figures("decode")

    assert cached[:2] == [(0, True), (0, True)]
    # What other tests left in its small pool may be worth more to decode than what the first tenant left.
    assert cached[2] == (64, False) or (cached[2] == (64, True) and after["evicted_blocks"] > before["evicted_blocks"])


async def test_answers_are_those_of_requests_that_share_nothing(small_pools: LocalCluster) -> None:
    """Many concurrent requests use pools that are too small for all, with several choices and clients that leave. Then
    each request runs alone."""
    requests = [_request(number) for number in range(36)]
    before = await small_pools.figures("prefill")
    slots = asyncio.Semaphore(8)

    async def one(number: int) -> Answer | None:
        async with slots:
            if number % 6 == 5:
                await _leave_early(small_pools, requests[number])
                return None
            return await ask(small_pools, requests[number])

    shared = await asyncio.gather(*map(one, range(len(requests))))
    after, decode = await small_pools.figures("prefill"), await small_pools.figures("decode")

    assert after["tokens_cached"] - before["tokens_cached"] > 1000
    assert after["evicted_blocks"] > 0 and decode["evicted_blocks"] > 0
    for number, answer in enumerate(shared):
        if answer is not None:
            requests[number].cache_salt = f"alone {number}"
            alone = await ask(small_pools, requests[number])
            assert alone.usage.cached_tokens == 0
            assert alone.choices == answer.choices, f"request {number} of {after}"
    await small_pools.until_free()


def _request(number: int) -> inference_pb2.GenerateRequest:
    beginning = _tokens(100 + number % 3, 9 * _BLOCK_SIZE + 5)
    middle = _tokens(200 + number % 7, (number % 4) * 11)
    prompt = beginning + middle + _tokens(300 + number, number % 5)
    return question(prompt, max_tokens=6 + number % 20, n=1 + 2 * (number % 4 == 3), ignore_eos=True)


async def _leave_early(cluster: LocalCluster, request: inference_pb2.GenerateRequest) -> None:
    async with asked(cluster, request) as answer:
        await answer.until(2)
        answer.go_away()


async def test_a_prefix_is_pulled_from_another_worker_when_that_is_cheaper(cluster: LocalCluster) -> None:
    """Prefill workers take turns: the worker that did not compute a prompt pulls it once a pull is estimated to be
    cheaper.
    """
    for number in range(8):  # until both know what computing costs them
        await ask(cluster, question(_tokens(400 + number, 40), max_tokens=2))
    before = await cluster.figures("prefill")

    for number in range(20):
        prompt = _tokens(500 + number, 40 * _BLOCK_SIZE + 1)
        first, again = [await ask(cluster, question(prompt, max_tokens=6)) for _ in range(2)]
        assert again.token_ids == first.token_ids
        after = await cluster.figures("prefill")
        if after["tokens_pulled"] > before["tokens_pulled"]:
            break

    pulled = after["tokens_pulled"] - before["tokens_pulled"]
    assert pulled == 40 * _BLOCK_SIZE == again.usage.cached_tokens, f"{before} {after}"
    assert first.ledger.members[0] != again.ledger.members[0]
    await cluster.until_free()


async def test_a_prompt_is_placed_on_the_worker_that_caches_it_until_that_worker_leaves(cluster: LocalCluster) -> None:
    """The router that places it never sent the prompt to that worker, and learns of the cached blocks from the worker
    alone."""
    prompts = [_tokens(600 + number, 6 * _BLOCK_SIZE + 1) for number in range(4)]
    placed = [(await ask(cluster, question(prompt, max_tokens=2))).ledger.members[0] for prompt in prompts]
    assert {member.partition("@")[0] for member in placed} == {"prefill0", "prefill1"}

    await cluster.until_free()

    async with _another_router(cluster) as other:
        await _until_indexed(other, await _num_cached(cluster))
        for prompt, member in [*zip(prompts, placed, strict=True)] * 2:
            answer = await ask(other, question(prompt, max_tokens=2))
            assert (answer.ledger.members[0], answer.usage.cached_tokens) == (member, 6 * _BLOCK_SIZE)

        gone = cluster.members[placed[0].partition("@")[0]]
        left = next(name for name in cluster.workers("prefill") if name != gone.name)
        gone.send_signal(signal.SIGKILL)
        await _until_indexed(other, await _num_cached(cluster, besides=gone.name))
        answer = await ask(other, question(prompts[0], max_tokens=2))
        assert answer.ledger.members[0].partition("@")[0] == left


@asynccontextmanager
async def _another_router(cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    """Start one more router of the same cluster and send requests to it. It places by cached prefixes and load alone:
    no step time measured beside other work decides."""
    flags = ("--port", "0", "--grpc-port", "0", "--placement", "prefix-aware")
    router = await cluster.start_member("another", "router", flags)
    del cluster.members["another"]
    other = copy(cluster)
    other.members = cluster.members | {"router0": router}
    try:
        yield other
    finally:
        router.send_signal(signal.SIGTERM)
        assert await router.exit_code() == 0, "".join(router.output)[-4000:]
        if router.reader is not None:
            await router.reader


async def _num_cached(cluster: LocalCluster, besides: str = "") -> int:
    names = [name for role in ("prefill", "decode") for name in cluster.workers(role) if name != besides]
    return sum([(await cluster.inspect(name)).blocks["cached"] for name in names])


async def _until_indexed(cluster: LocalCluster, num_blocks: int) -> None:
    """Wait until its router has indexed this many blocks."""
    async with httpx.AsyncClient() as http:
        url = f"http://{cluster.members['router0'].ready['http']}/metrics"

        async def indexed() -> list[str]:
            lines = (await http.get(url)).text.splitlines()
            return [line for line in lines if line.startswith("tandem_prefix_index_blocks ")]

        await until(indexed, [f"tandem_prefix_index_blocks {float(num_blocks)}"].__eq__, what="the router's index")


async def test_a_restarted_prefill_worker_finds_its_prefixes_on_disk(redis_url: str, tmp_path: Path) -> None:
    """The test calls the worker as routers do. Its pool holds one prompt, its host memory two, its disk all.

    The worker reads what it holds if that is quicker than computing. It predicts 20 s for computing, so that no load on
    this machine makes reading slower."""
    tiers = ("--prefix-host-memory", "2560KiB", "--prefix-disk", str(tmp_path / "prefixes"))
    flags = ("--dtype", "float32", "--num-blocks", "44", *tiers)
    cluster, control = LocalCluster(redis_url, tmp_path), FaultControl(tmp_path)
    prompts = [_tokens(700 + number, 40 * _BLOCK_SIZE + 1) for number in range(3)]
    await control.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT_CONTROL", str(control.path))
        patch.setenv("PROMPT_SECONDS", "20")
        for expected, on_disk in (([0, 0, 0], 0), ([640, 640, 640], 120)):
            worker = await cluster.start_member("prefill0", "tests.faults.hanging_worker", flags)
            try:
                async with cluster.channel("prefill0") as channel:
                    stub = worker_pb2_grpc.PrefillWorkerStub(channel)
                    await control.worker("prefill0")
                    found = []
                    for number, prompt in enumerate(prompts):
                        found.append(await _prefilled(stub, prompt))
                        await _until_stored(cluster, on_disk + 40 * (number + 1))
                assert found == expected
            finally:
                worker.send_signal(signal.SIGTERM)
                assert await worker.exit_code() == 0, "".join(worker.output)[-4000:]
            control.forget("prefill0")
    await control.stop()


async def _until_stored(cluster: LocalCluster, num_blocks: int) -> None:
    """Wait until the blocks of a prompt are in the tiers, because the next prompt needs its blocks of the pool: blocks
    that are evicted before they are copied would not be found again. 80 blocks fit into host memory, 120 on disk.
    """
    async with asyncio.timeout(60):
        figures: dict[str, float] = {}
        while figures.get("host_tier_blocks", 0) + figures.get("disk_tier_blocks", 0) < min(num_blocks, 200):
            figures = await cluster.figures("prefill")


async def _prefilled(stub: worker_pb2_grpc.PrefillWorkerStub, token_ids: tuple[int, ...]) -> int:
    """Prefill the prompt and return how many of its tokens were cached."""
    job = wire.prefill_job_to_wire(prefill_job(token_ids))
    events = [event async for event in stub.Prefill(job, timeout=60)]
    return int(events[-1].first_tokens.num_cached)
