"""The pools on a local Ray: started, answering, restarted after a kill, scaled."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from cluster.errors import DeadlineExceeded
from cluster.messages import Role
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import ScaleTargets
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.system.local_cluster import DEMO_MODEL

ray = pytest.importorskip("ray", reason="ray is not installed: it is the extra [ray]")

from deploy.ray.follower import RayFollower  # noqa: E402
from deploy.ray.pools import RayPools, Resources  # noqa: E402

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def pools(redis_url: str, cluster_name: str, tmp_path: Path) -> Iterator[RayPools]:
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        namespace=cluster_name,
        runtime_env={"env_vars": {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}},
        log_to_driver=False,
    )
    pools = RayPools(
        namespace=cluster_name,
        settings={
            "redis": redis_url,
            "cluster_name": cluster_name,
            "cluster_key_file": tmp_path / "cluster.key",
            "model": DEMO_MODEL,
            "advertise_host": "127.0.0.1",
        },
        resources={role: Resources(num_cpus=1) for role in Role},
    )
    try:
        yield pools
        pools.stop()
    finally:
        ray.shutdown()


def _generate(address: str) -> tuple[int, ...]:
    with grpc.insecure_channel(address) as channel:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=range(20, 60)),
            sampling=inference_pb2.SamplingParams(temperature=0.0),
            stop=inference_pb2.StopConditions(max_tokens=8, ignore_eos=True),
        )
        tokens: list[int] = []
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=90):
            for delta in response.deltas:
                tokens.extend(delta.token_ids)
        return tuple(tokens)


def test_ray_starts_restarts_and_scales_the_pools(pools: RayPools) -> None:
    pools.scale(Role.PREFILL, 1)
    pools.scale(Role.DECODE, 1)
    (line,) = pools.scale(Role.ROUTER, 1, {"port": 0, "grpc_port": 0})
    address = dict(word.split("=", 1) for word in line.split()[1:])["grpc"]
    first = _generate(address)
    assert len(first) == 8

    (name,) = pools.members(Role.PREFILL)
    before = ray.get(pools.actor(name).pid.remote())
    os.kill(before, signal.SIGKILL)
    assert "grpc=" in _ready_again(pools, name)
    assert ray.get(pools.actor(name).pid.remote()) != before
    assert _generate(address) == first

    pools.scale(Role.DECODE, 2)
    assert len(pools.members(Role.DECODE)) == 2
    pools.scale(Role.DECODE, 1)
    assert len(pools.members(Role.DECODE)) == 1
    assert _generate(address) == first


def _ready_again(pools: RayPools, name: str) -> str:
    """Ray queues calls to an actor that it is restarting, or reports that it died during this one."""
    for _ in range(20):
        try:
            return str(ray.get(pools.actor(name).ready.remote(90.0)))
        except ray.exceptions.RayActorError:
            continue
    raise AssertionError(f"{name} did not come back")


def test_members_that_are_not_ready_in_time_are_named(pools: RayPools, redis_url: str, cluster_name: str) -> None:
    settings = {"redis": redis_url, "cluster_name": cluster_name, "model": DEMO_MODEL}
    hasty = RayPools(
        namespace=cluster_name, settings=settings, resources={Role.DECODE: Resources(1000.0)}, start_timeout_s=0.0
    )
    with pytest.raises(DeadlineExceeded, match=r"Ray actor prefill-0 on node \w+ is not ready after 0 s: its prefill"):
        hasty.scale(Role.PREFILL, 1)
    with pytest.raises(DeadlineExceeded, match=r"has not started decode-0 within 0 s: .* \{'CPU': 1000.0\} free"):
        hasty.scale(Role.DECODE, 1)
    ray.kill(hasty.actor("decode-0"), no_restart=True)


def test_pools_on_ray_follow_the_scale_target(pools: RayPools, redis_url: str, cluster_name: str) -> None:
    pools.scale(Role.PREFILL, 1)
    pools.scale(Role.DECODE, 1)
    asyncio.run(_scaled_up_and_down(pools, redis_url, cluster_name))
    assert (len(pools.members(Role.PREFILL)), len(pools.members(Role.DECODE))) == (0, 2)


async def _scaled_up_and_down(pools: RayPools, redis_url: str, cluster_name: str) -> None:
    async def loads() -> dict[str, float]:
        return {}

    registry = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=5.0)
    targets = ScaleTargets(registry)
    follower = RayFollower(pools=pools, registry=registry, loads=loads, say=print)
    following = asyncio.create_task(follower.run())
    try:
        async with asyncio.timeout(200), aclosing(targets.watch()) as seen:
            while (target := await anext(seen)) is None or not target.follower:
                pass
            wanted = await targets.set({Role.PREFILL: 0, Role.DECODE: 2})
            while (target := await anext(seen)) is None or target.reached < wanted.version:
                pass
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await registry.close()
