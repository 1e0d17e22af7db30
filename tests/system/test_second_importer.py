"""A real decode worker dies while it pulls: another one gets the KV of the same prefill."""

import asyncio
import signal

import pytest

from tests.system.asking import ask, asked, question
from tests.system.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

_DEADLINE_S = 60.0
_LONG = tuple(20 + i % 800 for i in range(960))  # fifteen chunks


async def test_a_decode_worker_killed_during_a_pull_causes_no_second_prefill(cluster: LocalCluster) -> None:
    request = question(_LONG, max_tokens=8, ignore_eos=True, cache_salt="its importer lives")
    undisturbed = await ask(cluster, request)
    request.cache_salt = "its importer dies"
    before = await _num_computed(cluster)
    async with asked(cluster, request) as answer:
        victim = await _puller(cluster, before)
        cluster.members[victim].send_signal(signal.SIGKILL)
        assert await cluster.members[victim].exit_code() == -signal.SIGKILL
        await answer.end()
    assert answer.token_ids == undisturbed.token_ids
    assert answer.ledger.reasons == ["decode_worker_lost", "ticket_reissued"]
    assert await _num_computed(cluster) - before == len(_LONG)
    await cluster.until_free()


async def _num_computed(cluster: LocalCluster) -> float:
    return (await cluster.figures("prefill"))["tokens_computed"]


async def _puller(cluster: LocalCluster, num_computed: float) -> str:
    """Return the decode worker that has an import of which some blocks are computed."""
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            for name in cluster.workers("decode"):
                is_importing = (await cluster.inspect(name)).figures["imports"]
                if is_importing and await _num_computed(cluster) > num_computed:
                    return name
