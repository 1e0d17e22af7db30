"""An answer under a schema, a forced call of a tool and four choices under penalties are disturbed: their decode worker
is killed or drained, they are moved, and their router is killed. test_penalties_after_kills.py kills decode workers of
the last."""

import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from cluster.process import ExitStatus
from tandem.client import AsyncClient, AsyncGeneration
from tandem.results import Result
from tests.system.api.test_structured_output import SCHEMA
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800), pytest.mark.slow]

_NUM_KILLS = 20
_MOST_ATTEMPTS = 20
_LAST_TOKENS = 40  # which a worker may generate before the test has found it
# A worker that drains keeps what is expected to end within half of its grace. These answers may have 900 tokens.
_DRAIN_GRACE_S = 2
_FLAGS = ("--dtype", "float32", "--num-blocks", "512", "--drain-grace-s", str(_DRAIN_GRACE_S))
_SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 3}
_PROMPT = {"prompt": "def city():\n    return "}
_REQUEST: dict[str, Any] = {**_PROMPT, **_SAMPLING, "max_tokens": 900, "json_schema": SCHEMA}
_PENALTIES: dict[str, Any] = {
    **(_PROMPT | _SAMPLING),
    "max_tokens": 1000,
    "ignore_eos": True,
    "n": 4,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.4,
    "logit_bias": {40: 1.5},
    "bad_words": ["self"],
}
_TOOL: dict[str, Any] = {
    "name": "write_report",
    "parameters": {
        "type": "object",
        "properties": {
            "cities": {"type": "array", "items": {"enum": ["Paris", "Rome"]}, "minItems": 8, "maxItems": 12},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 12},
        },
        "required": ["cities", "days"],
        "additionalProperties": False,
    },
}
_CALL: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Report."}],
    "tools": [{"type": "function", "function": _TOOL}],
    "tool_choice": ["write_report"],
    "template_arguments": {"enable_thinking": False},
    **_SAMPLING,
    "max_tokens": 900,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Two routers, two prefill and two decode workers in float32."""
    directory: Path = tmp_path_factory.mktemp("schema")
    cluster = LocalCluster(redis_url, directory, flags=_FLAGS)
    try:
        yield await cluster.start(prefill=2, decode=2, routers=2, router_flags=("--tool-call-parser", "hermes"))
    finally:
        await cluster.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.members["router0"].grpc_address, timeout_s=600) as client:
        yield client


async def _read(generation: AsyncGeneration, num_tokens: int) -> int:
    """Read at least so many tokens, and return how many were read."""
    read = 0
    while read < num_tokens:
        read += len((await anext(generation)).token_ids)
    return read


async def _kill(cluster: LocalCluster, name: str) -> None:
    cluster.members[name].send_signal(signal.SIGKILL)
    assert await cluster.members[name].exit_code() == -signal.SIGKILL


def _check_answer(result: Result) -> None:
    jsonschema.validate(json.loads(result.text), SCHEMA)


def _check_call(result: Result) -> None:
    (call,) = result.choices[0].tool_calls
    jsonschema.validate(json.loads(call.arguments), _TOOL["parameters"])


@pytest.mark.parametrize(
    ("request_", "check"), [(_REQUEST, _check_answer), (_CALL, _check_call)], ids=["schema", "call"]
)
async def test_decode_killed_at_twenty_indices_changes_no_part_of_an_answer(
    cluster: LocalCluster, client: AsyncClient, request_: dict[str, Any], check: Callable[[Result], None]
) -> None:
    """Which parts of a streamed call come before the kill, and which behind it, varies."""
    undisturbed = await client.generate(**request_).result()
    check(undisturbed)
    num_tokens = len(undisturbed.token_ids)
    indices = {1 + turn * (num_tokens - _LAST_TOKENS) // _NUM_KILLS for turn in range(_NUM_KILLS)}
    assert len(indices) == _NUM_KILLS, f"an answer of {num_tokens} tokens is too short"
    for index in sorted(indices):
        await _kill_after(index, cluster, client, request_, undisturbed)


async def _kill_after(
    num_tokens: int, cluster: LocalCluster, client: AsyncClient, request: dict[str, Any], undisturbed: Result
) -> None:
    """Kill the decode worker of an answer after so many tokens. The answer must be the undisturbed one."""
    for _ in range(_MOST_ATTEMPTS):  # an answer may end before its worker is killed
        generation = client.generate(**request)
        read = await _read(generation, 1)
        victim = await cluster.decode_worker()  # found early, because the answer goes on meanwhile
        await _read(generation, num_tokens - read)
        if victim is not None:
            await _kill(cluster, victim)
        result = await generation.result()
        await cluster.mend()
        assert _answers(result) == _answers(undisturbed)
        if "decode_worker_lost" in result.ledger.reasons:
            return
    pytest.fail(f"no answer lost its worker after {num_tokens} tokens")


async def _migrate(cluster: LocalCluster) -> None:
    for source in cluster.workers("decode"):
        if (await cluster.migrate(source)).num_moved:
            return


async def _drain(cluster: LocalCluster) -> None:
    name = await cluster.decode_worker()
    if name is not None:
        cluster.members[name].send_signal(signal.SIGTERM)
        # On a busy machine its grace may end first. The answer continues elsewhere then, too.
        assert await cluster.members[name].exit_code() in (ExitStatus.OK, ExitStatus.DRAIN_INCOMPLETE)


async def _kill_its_router(cluster: LocalCluster) -> None:
    await _kill(cluster, "router0")


def _answers(result: Result) -> list[object]:
    calls = [[(call.name, call.arguments) for call in choice.tool_calls] for choice in result.choices]
    return [calls, *((choice.token_ids, choice.text, choice.finish_reason) for choice in result.choices)]


def _was_moved(result: Result) -> bool:
    names = {member.partition("@")[0] for member in result.ledger.members}
    return names >= {"decode0", "decode1"} or "resumed" in result.ledger.reasons


@pytest.mark.parametrize("disturb", [_migrate, _drain, _kill_its_router])
@pytest.mark.parametrize("request_", [_REQUEST, _CALL, _PENALTIES], ids=["schema", "call", "penalties"])
async def test_an_answer_that_is_moved_or_resumed_elsewhere_is_the_undisturbed_one(
    cluster: LocalCluster,
    client: AsyncClient,
    request_: dict[str, Any],
    disturb: Callable[[LocalCluster], Awaitable[None]],
) -> None:
    undisturbed = await client.generate(**request_).result()
    for _ in range(_MOST_ATTEMPTS):  # an answer may end before it is disturbed
        generation = client.generate(**request_)
        await _read(generation, 6)
        await disturb(cluster)
        result = await generation.result()
        await cluster.mend()
        assert _answers(result) == _answers(undisturbed)
        if _was_moved(result):
            return
    pytest.fail("no answer was disturbed")
