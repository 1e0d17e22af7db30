"""Two real decode workers of unequal pools: the larger is killed while it runs a stream that only it can hold."""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from cluster.registry.registry import Registry
from cluster.registry.scale_registry import Following
from cluster.registry.scale_target import ScaleTarget
from cluster.serving.rpc_errors import REASON
from router.fleet.membership import ABSENCE_S
from tandem.v1 import inference_pb2
from tests.system.rigs.members.asking import ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

_FLAGS = ("--dtype", "float32", "--block-size", "16", "--max-prefill-tokens", "64")
_BEFORE_DEATH = 20  # tokens that the client has received
_ROUTER = ("--port", "0", "--grpc-port", "0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unequal(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """A cluster in which decode0 holds 512 tokens and decode1 128. Neither has a --max-model-len."""
    cluster = LocalCluster(redis_url, tmp_path_factory.mktemp("unequal"))
    sizes = {"prefill0": 32, "decode0": 32, "decode1": 8}
    try:
        modules = {name: f"{name[:-1]}_worker" for name in sizes}
        starting = (
            cluster.start_member(name, modules[name], (*_FLAGS, "--num-blocks", str(number)))
            for name, number in sizes.items()
        )
        await asyncio.gather(*starting)
        await cluster.start_member("router0", "router", _ROUTER)
        yield cluster
    finally:
        await cluster.stop()


def _long(max_tokens: int = 300) -> inference_pb2.GenerateRequest:
    return question(tuple(range(30, 60)), max_tokens=max_tokens, ignore_eos=True)


async def test_a_complete_cluster_refuses_a_request_that_no_worker_can_hold_at_once(unequal: LocalCluster) -> None:
    """Without a scale target, a router that has just started waits `ABSENCE_S` for workers that may be absent."""
    await unequal.mend()
    began_s = asyncio.get_running_loop().time()
    router = await unequal.start_member("router1", "router", _ROUTER)
    registry = Registry(url=unequal.redis_url, cluster_name=unequal.name, ttl_s=60.0)
    follower = Following(registry, "test", ScaleTarget(prefill=1, decode=2))
    try:
        assert await follower.report(reached=1) == ""
        async with asyncio.timeout_at(began_s + ABSENCE_S), unequal.channel(router.name) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="holds 512") as refused:
                await _end(unequal.inference(channel).Generate(_long(max_tokens=600)))
    finally:
        await follower.unfollow()
        await registry.close()
        router.send_signal(signal.SIGTERM)
        assert await unequal.members.pop(router.name).exit_code() == 0
    _is_named(refused.value)


@pytest.mark.slow
async def test_a_stream_outlives_its_only_large_worker_and_continues_when_the_worker_is_back(
    unequal: LocalCluster,
) -> None:
    await unequal.mend()
    undisturbed = await ask(unequal, _long())
    async with asked(unequal, _long()) as answer:
        await answer.until(_BEFORE_DEATH)
        await _kill(unequal, "decode0")
        small = await ask(unequal, question(tuple(range(30, 60)), max_tokens=20, ignore_eos=True))
        assert len(small.token_ids) == 20, "the small worker serves what fits"
        await unequal.mend()
        await answer.end()
    assert answer.token_ids == undisturbed.token_ids
    assert "no_worker_large_enough" in answer.ledger.reasons, answer.ledger.reasons
    await unequal.until_free()


@pytest.mark.slow  # the whole timeout of a request passes
async def test_without_a_large_worker_the_cluster_is_named_as_too_small(unequal: LocalCluster) -> None:
    await unequal.mend()
    async with unequal.channel() as channel:
        call = unequal.inference(channel).Generate(_long(), timeout=12.0)
        for _ in range(_BEFORE_DEATH):
            await call.read()
        await _kill(unequal, "decode0")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await _end(call)
    _is_named(ended.value)
    fitting = await ask(unequal, question(tuple(range(30, 60)), max_tokens=20, ignore_eos=True))
    assert fitting.token_ids
    await unequal.until_free()


async def _end(call: "grpc.aio.UnaryStreamCall[Any, Any]") -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def _is_named(error: grpc.aio.AioRpcError) -> None:
    assert error.code() is grpc.StatusCode.UNAVAILABLE, error
    assert dict(error.trailing_metadata() or ()).get(REASON) == "no_worker_large_enough", error


async def _kill(cluster: LocalCluster, name: str) -> None:
    cluster.members[name].send_signal(signal.SIGKILL)
    assert await cluster.members[name].exit_code() == -signal.SIGKILL
