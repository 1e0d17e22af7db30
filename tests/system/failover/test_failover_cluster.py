"""Real workers die and freeze while clients without any retry logic are served."""

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest

from cluster.protocol.wire import pack_ids
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.system.rigs.members.asking import ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_DEADLINE_S = 60.0
_NUM_STREAMS = 3
_BEFORE_DEATH = 20  # parts that every stream has had
_LONG = tuple(20 + i % 800 for i in range(960))  # fifteen chunks


async def test_http_streams_survive_a_prefill_and_a_decode_worker(cluster: LocalCluster) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://{cluster.members['router0'].ready['http']}/v1",
        api_key="-",
        max_retries=0,
        timeout=_DEADLINE_S,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    ) as client:
        questions: list[Any] = [
            {"model": "", "prompt": [*range(30 + i, 70)], "max_tokens": 120, "temperature": temperature, "seed": 7}
            | {"extra_body": {"ignore_eos": True}}
            for i, temperature in enumerate((0.0, 0.0, 0.8))
        ]
        undisturbed = [(await client.completions.create(**question)).choices[0].text for question in questions]
        streams = [await client.completions.create(**question, stream=True) for question in questions]
        parts = [aiter(stream) for stream in streams]
        texts = ["".join([(await anext(part)).choices[0].text for _ in range(_BEFORE_DEATH)]) for part in parts]
        for victim in ("decode0", "prefill0"):
            cluster.members[victim].send_signal(signal.SIGKILL)
            assert await cluster.members[victim].exit_code() == -signal.SIGKILL
        rest = await asyncio.gather(*(_rest(part) for part in parts))
        assert [before + after for before, after in zip(texts, rest, strict=True)] == undisturbed
    await cluster.until_free()


async def _rest(parts: Any) -> str:
    return "".join([part.choices[0].text async for part in parts if part.choices])


@pytest.mark.slow  # two thirds of a lease and the grace
async def test_a_stopped_prefill_worker_delays_but_loses_no_request(cluster: LocalCluster) -> None:
    request = question(_LONG, max_tokens=8, ignore_eos=True, cache_salt="never asked before")
    async with AsyncExitStack() as stack:
        answer = await stack.enter_async_context(asked(cluster, request))
        frozen = await _busy_prefill(cluster)
        stack.enter_context(cluster.members[frozen].stopped())
        await answer.end()
    # Its hedge's first token or the end of its lease, whichever comes first.
    assert answer.ledger.reasons in (["prefill_hedged"], ["prefill_worker_lost"]), answer.ledger
    assert answer.token_ids == (await ask(cluster, request)).token_ids
    await cluster.until_free()


async def _busy_prefill(cluster: LocalCluster) -> str:
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            for name in cluster.workers("prefill"):
                if (await cluster.inspect(name)).figures["running"]:
                    return name


@pytest.mark.slow  # a lease
async def test_a_prefill_whose_router_died_before_starting_decode_is_dropped_within_a_lease(
    cluster: LocalCluster,
) -> None:
    """Blocks of a ticket without an importer would otherwise be leased for --attach-timeout-s, a minute."""
    request = worker_pb2.PrefillRequest(
        request_id="of a router that has gone",
        attempt=1,
        token_ids=pack_ids(tuple(range(40, 140))),
        sampling=worker_pb2.ResolvedSampling(top_p=1.0),
        stops=worker_pb2.TokenStops(max_tokens=8),
        seeds=[1],
        importer=f"decode0@{cluster.members['decode0'].incarnation}",
        timeout_s=_DEADLINE_S,
    )
    async with cluster.channel("prefill0") as channel:
        events = [event async for event in worker_pb2_grpc.PrefillWorkerStub(channel).Prefill(request)]
    assert [event.WhichOneof("event") for event in events] == ["accepted", "first_tokens"]
    assert await cluster.blocks_in_use("prefill0")
    await cluster.until_free()
