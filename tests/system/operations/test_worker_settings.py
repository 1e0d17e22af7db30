"""A worker's settings change while it runs, with the file of --config; one that needs a restart is named."""

import asyncio
from functools import partial
from pathlib import Path

from cluster.auth.key_file import load_keys
from cluster.registry.registry import Registry
from tandem.client import AsyncClient
from tandem.errors import Overloaded
from tests.polling import until
from tests.system.rigs.processes.local_cluster import LocalCluster


async def test_a_workers_queue_and_target_change_and_a_memory_setting_is_logged_as_unchangeable(
    redis_url: str, tmp_path: Path
) -> None:
    settings = tmp_path / "worker.yaml"
    settings.write_text("max_queue: 100\n")
    flags = ("--config", str(settings), "--max-num-seqs", "1", "--num-blocks", "128")
    cluster = LocalCluster(redis_url, tmp_path, flags=flags)
    try:
        await cluster.start(prefill=0, router_flags=("--placement", "auto", "--max-attempts", "1"))
        assert await _num_refused(cluster) == 0
        settings.write_text("max_queue: 1\nblock_size: 32\nslo_tpot_ms: 25\n")
        await _until_logged(cluster, "--max-queue is now 1")
        await _until_logged(cluster, "--block-size cannot change while the process runs: restart it to use 32")
        await until(partial(_num_refused, cluster), what="of eight requests at once some are refused")
        registry = Registry(url=redis_url, cluster_name=cluster.name, ttl_s=5.0, keys=load_keys(cluster.key_file))

        async def is_registered() -> bool:
            return [m.capacity.slo_tpot_us for m in await registry.members() if m.capacity is not None] == [25_000]

        await until(is_registered, what="routers predict with the new target")
        await registry.close()
    finally:
        await cluster.stop()


async def _num_refused(cluster: LocalCluster) -> int:
    """Send eight requests at once to the worker, which runs one at a time. Return how many are refused."""
    async with AsyncClient(cluster.members["router0"].grpc_address) as client:
        asking = (client.generate(f"def f{number}(", max_tokens=16, ignore_eos=True).result() for number in range(8))
        answers = await asyncio.gather(*asking, return_exceptions=True)
    refusals = [answer for answer in answers if isinstance(answer, BaseException)]
    assert all(isinstance(refusal, Overloaded) for refusal in refusals), refusals
    return len(refusals)


async def _until_logged(cluster: LocalCluster, text: str) -> None:
    async def logged() -> bool:
        await cluster.status()
        return any(text in line for line in cluster.members["decode0"].output)

    await until(logged, what=f"decode0 logs {text}")
