"""A rolling restart of every member under load loses no answer and changes none."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.process import ExitStatus
from tandem.client import AsyncClient
from tests.system.rigs.processes.local_cluster import LocalCluster

_DEADLINE_S = 120.0
_NUM_CLIENTS = 4
_PROMPTS = [tuple(range(30 + number, 90 + 7 * number)) for number in range(6)]
_ORDER = ("router0", "prefill0", "decode0", "router1", "prefill1", "decode1")


@dataclass(slots=True)
class _Load:
    """Clients that send the same requests in turn until they are stopped."""

    expected: dict[tuple[int, ...], list[int]]
    num_answers: int = 0
    differing: list[tuple[int, ...]] = field(default_factory=list)
    answered: asyncio.Condition = field(default_factory=asyncio.Condition)
    is_over: bool = False

    async def ask(self, address: str, first: int) -> None:
        async with AsyncClient(address) as client:
            number = first
            while not self.is_over:
                prompt = _PROMPTS[number % len(_PROMPTS)]
                tokens = await _answer(client, prompt)
                if tokens != self.expected[prompt]:
                    self.differing.append(prompt)
                number += 1
                async with self.answered:
                    self.num_answers += 1
                    self.answered.notify_all()

    async def until_more(self, number: int) -> None:
        """Wait for `number` more answers, which show that the cluster still serves."""
        wanted = self.num_answers + number
        async with asyncio.timeout(_DEADLINE_S), self.answered:
            await self.answered.wait_for(lambda: self.num_answers >= wanted)


async def _answer(client: AsyncClient, prompt: tuple[int, ...]) -> list[int]:
    result = await client.generate(token_ids=prompt, max_tokens=48, temperature=0.0, timeout_s=_DEADLINE_S).result()
    return list(result.choices[0].token_ids)


@asynccontextmanager
async def _under_load(cluster: LocalCluster) -> AsyncIterator[_Load]:
    addresses = ",".join(cluster.members[name].grpc_address for name in ("router0", "router1"))
    async with AsyncClient(addresses) as client:
        load = _Load({prompt: await _answer(client, prompt) for prompt in _PROMPTS})
    async with asyncio.TaskGroup() as tasks:
        for number in range(_NUM_CLIENTS):
            tasks.create_task(load.ask(addresses, number))
        yield load
        load.is_over = True


@pytest.mark.slow
async def test_every_member_is_restarted_under_load_and_no_answer_is_lost_or_different(
    redis_url: str, tmp_path: Path
) -> None:
    flags = ("--dtype", "float32", "--num-blocks", "512", "--max-prefill-tokens", "64")
    cluster = LocalCluster(redis_url, tmp_path, flags=flags)
    try:
        await cluster.start(prefill=2, decode=2, routers=2)
        before = {name: member.incarnation for name, member in cluster.members.items()}
        async with _under_load(cluster) as load:
            for name in _ORDER:
                await load.until_more(2 * _NUM_CLIENTS)
                cluster.members[name].send_signal(signal.SIGTERM)
                assert await cluster.members[name].process.wait() == ExitStatus.OK, cluster.last_words()
                await cluster.mend()
            await load.until_more(2 * _NUM_CLIENTS)
        assert not load.differing
        after = {name: member.incarnation for name, member in cluster.members.items()}
        assert all(before[name] != after[name] for name in _ORDER)
        await cluster.until_free()
    finally:
        await cluster.stop()
