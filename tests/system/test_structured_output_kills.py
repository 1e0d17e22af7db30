"""An answer under a schema, with its decode worker killed at twenty tokens, drained, and its router killed."""

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from tandem.client import AsyncClient, AsyncGeneration
from tests.system.local_cluster import LocalCluster
from tests.system.test_structured_output import SCHEMA

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600), pytest.mark.slow]

_NUM_KILLS = 20
_REQUEST: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 300, "json_schema": SCHEMA}
_PROMPT = "def city():\n    return "


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Two routers, two prefill and two decode workers in float32."""
    directory: Path = tmp_path_factory.mktemp("schema")
    cluster = LocalCluster(redis_url, directory, flags=("--dtype", "float32", "--num-blocks", "256"))
    try:
        yield await cluster.start(prefill=2, decode=2, routers=2)
    finally:
        await cluster.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.members["router0"].grpc_address, timeout_s=120) as client:
        yield client


async def _undisturbed(client: AsyncClient) -> tuple[str, int]:
    """Return the text of the answer and its number of tokens."""
    result = await client.generate(_PROMPT, **_REQUEST).result()
    jsonschema.validate(json.loads(result.text), SCHEMA)
    return result.text, len(result.token_ids)


async def _read(generation: AsyncGeneration, num_tokens: int) -> str:
    text, read = "", 0
    while read < num_tokens:
        delta = await anext(generation)
        text, read = text + delta.text, read + len(delta.token_ids)
    return text


async def _kill(cluster: LocalCluster, name: str) -> None:
    cluster.members[name].send_signal(signal.SIGKILL)
    assert await cluster.members[name].exit_code() == -signal.SIGKILL


async def _rest(generation: AsyncGeneration) -> str:
    return "".join([delta.text async for delta in generation])


async def test_decode_killed_at_twenty_indices_changes_no_text(cluster: LocalCluster, client: AsyncClient) -> None:
    text, num_tokens = await _undisturbed(client)
    for index in sorted({1 + turn * (num_tokens - 4) // _NUM_KILLS for turn in range(_NUM_KILLS)}):
        for victim in ("decode0", "decode1", "decode0", "decode1"):  # until it is the worker of the sequence
            generation = client.generate(_PROMPT, **_REQUEST)
            await _read(generation, index)
            await _kill(cluster, victim)
            result = await generation.result()
            assert result.text == text
            await cluster.mend()
            if result.ledger.reasons:
                break


async def test_a_drained_decode_worker_hands_its_answer_over(cluster: LocalCluster, client: AsyncClient) -> None:
    text, _ = await _undisturbed(client)
    generation = client.generate(_PROMPT, **_REQUEST)
    begun = await _read(generation, 6)
    cluster.members["decode0"].send_signal(signal.SIGTERM)
    assert begun + await _rest(generation) == text
    assert await cluster.members["decode0"].exit_code() == 0
    await cluster.mend()


async def test_an_answer_is_resumed_at_another_router(cluster: LocalCluster, client: AsyncClient) -> None:
    text, _ = await _undisturbed(client)
    generation = client.generate(_PROMPT, **_REQUEST)
    begun = await _read(generation, 6)
    await _kill(cluster, "router0")
    assert begun + await _rest(generation) == text
