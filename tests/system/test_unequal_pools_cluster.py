"""Two real decode workers of unequal pools: the larger is killed under a stream that the smaller cannot hold."""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from cluster.serving.rpc_errors import REASON
from tandem.v1 import inference_pb2
from tests.system.asking import ask, asked, question
from tests.system.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

_FLAGS = ("--dtype", "float32", "--block-size", "16", "--max-prefill-tokens", "64")
_BEFORE_DEATH = 20  # tokens that the client has


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unequal(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """decode0 holds 512 tokens, decode1 128; neither is told a --max-model-len."""
    cluster = LocalCluster(redis_url, tmp_path_factory.mktemp("unequal"))
    sizes = {"prefill0": 32, "decode0": 32, "decode1": 8}
    try:
        modules = {name: f"{name[:-1]}_worker" for name in sizes}
        starting = (
            cluster.start_member(name, modules[name], (*_FLAGS, "--num-blocks", str(number)))
            for name, number in sizes.items()
        )
        await asyncio.gather(*starting)
        await cluster.start_member("router0", "router", ("--port", "0", "--grpc-port", "0"))
        yield cluster
    finally:
        await cluster.stop()


def _long(max_tokens: int = 300) -> inference_pb2.GenerateRequest:
    return question(tuple(range(30, 60)), max_tokens=max_tokens, ignore_eos=True)


async def test_a_stream_outlives_its_only_large_worker_and_goes_on_when_it_is_back(unequal: LocalCluster) -> None:
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


@pytest.mark.slow  # a request's whole time
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
    with pytest.raises(grpc.aio.AioRpcError, match="holds 512") as refused:
        await ask(unequal, _long(max_tokens=600))  # more than any worker ever held: refused at once
    _is_named(refused.value)
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
