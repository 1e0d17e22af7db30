"""Measure what a tenant that sends ten times its share does to the time to first token of another one.

A real cluster with one worker and two recorded keys of equal weight. Each round runs two arms in alternating order:
both tenants at their share of the load, and the other one at ten times its share. Before each arm and after the last
one it measures the rate at which the worker serves both, because other processes of the machine change it: an arm's
arrivals follow that rate, and a round in which it changed by more than half does not count. Arrivals are random
(Poisson), those of the measured tenant the same in both arms. Prompts are random tokens, so no prefix is shared; one
token is asked for. The model has the shape of SmolLM2-135M, so that the worker is busy long before the router is.

The flood comes from a process that gives way to all others, and the worker has a core to itself (it needs two):
otherwise the work of sending the flood would count as its effect on the worker.

    python -m benchmarks.tenants [--write]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from benchmarks.engine.parties import MODEL_CORE, OTHER_CORE, descendants, pin
from benchmarks.engine.shapes import MODELS
from benchmarks.machine import about
from cluster.serving.serving import open_channel
from tandem.client import AsyncClient
from tandem.errors import TandemError
from tandem.local_cluster import LocalCluster
from tandem.v1 import admin_pb2, admin_pb2_grpc

_RESULT = Path(__file__).parent / "results" / "tenants.json"
_LENGTHS = 128, 384  # tokens of a prompt
_CHUNK = 128  # --max-prefill-tokens
_FLAGS = (
    *("--load-format=dummy", "--dtype=bfloat16", "--num-threads=1", "--kv-cache-memory=1GiB", "--max-model-len=2048"),
    f"--max-prefill-tokens={_CHUNK}",
)
_LOAD, _FLOOD = 0.7, 10
_CAPACITY_S, _MOST_AT_ONCE, _STEADY = 3.0, 8, 1.5
ADMIN_KEY = "operator"
_SPAWN = multiprocessing.get_context("spawn")
_AT_SHARE, _FLOODED = "both at their share", "the other at ten times its share"


@dataclass(frozen=True, slots=True)
class Round:
    """Times in seconds."""

    requests_per_s: list[float]  # that the worker served when both tenants always had requests waiting
    ttft_s: dict[str, list[float]]  # of the measured tenant, by arm; -1 for a request that was not served

    def served_s(self, arm: str) -> list[float]:
        return [ttft_s for ttft_s in self.ttft_s[arm] if ttft_s >= 0]

    @property
    def is_steady(self) -> bool:
        return max(self.requests_per_s) <= _STEADY * min(self.requests_per_s)

    @property
    def chunk_s(self) -> float:
        return _CHUNK / (median(self.requests_per_s) * sum(_LENGTHS) / 2)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at random times, at `rate` per second in the mean."""

    seed: float
    rate: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Flood:
    """Sends requests with a key from a process of the lowest priority."""

    address: str
    key: str

    @asynccontextmanager
    async def started(self, load: Load) -> AsyncIterator[None]:
        """Return once the process sends. At the end it is ended, with the requests that it waits for."""
        here, there = _SPAWN.Pipe()
        process = _SPAWN.Process(target=self._run, args=(load, there), daemon=True)
        process.start()
        try:
            await asyncio.to_thread(here.recv)
            yield
        finally:
            process.kill()
            await asyncio.to_thread(process.join)

    def _run(self, load: Load, parent: Connection) -> None:
        os.nice(19)
        asyncio.run(self._send(load, parent))

    async def _send(self, load: Load, parent: Connection) -> None:
        async with AsyncClient(self.address, self.key) as client:
            parent.send(None)
            await _send(client, load)


class Bench:
    """Two tenants of a running cluster."""

    def __init__(self, measured: AsyncClient, other: AsyncClient, flood: Flood, dice: random.Random) -> None:
        self._measured, self._other, self._flood, self._dice = measured, other, flood, dice

    async def round(self, arms: Sequence[str], duration_s: float) -> Round:
        rates, seed, ttft_s = [await self._capacity()], self._dice.random(), dict[str, list[float]]()
        for arm in arms:
            factor = _FLOOD if arm == _FLOODED else _LOAD
            ttft_s[arm] = await self._arm(seed, rates[-1] / 2 * _LOAD, rates[-1] / 2 * factor, duration_s)
            rates.append(await self._capacity())
        return Round(rates, ttft_s)

    async def _capacity(self) -> float:
        """Return the requests per second that are served while both tenants always have some waiting."""
        ends: list[float] = []

        async def ask_on(client: AsyncClient) -> None:
            while True:
                await _ask(client, self._dice)
                ends.append(time.monotonic())

        clients = (self._measured, self._other) * (_MOST_AT_ONCE // 2)
        tasks = [asyncio.create_task(ask_on(client)) for client in clients]
        await asyncio.sleep(_CAPACITY_S)
        await _cancel(tasks)
        return (len(ends) - 1) / (ends[-1] - ends[0])

    async def _arm(self, seed: float, rate: float, other_rate: float, duration_s: float) -> list[float]:
        """Return the times to first token of the measured tenant's requests."""
        async with self._flood.started(Load(self._dice.random(), other_rate, duration_s)):
            ttft_s = await _send(self._measured, Load(seed, rate, duration_s))
        await _ask(self._measured, self._dice)  # cancelled requests have left
        return ttft_s


async def _send(client: AsyncClient, load: Load) -> list[float]:
    """Send a load; return the times to first token, -1 for a request that was not served."""
    dice, end_s = random.Random(load.seed), time.monotonic() + load.duration_s
    async with asyncio.TaskGroup() as asking:
        tasks = []
        while (now_s := time.monotonic()) < end_s:
            tasks.append(asking.create_task(_ask(client, dice)))
            await asyncio.sleep(min(dice.expovariate(load.rate), end_s - now_s))
    return [task.result() for task in tasks]


async def _ask(client: AsyncClient, dice: random.Random) -> float:
    """Return the time to first token; -1 if the request is not served. It counts from the arrival at the router:
    before, requests wait for this process."""
    tokens = [dice.randrange(10, 500) for _ in range(dice.choice(_LENGTHS))]
    asked = client.generate(token_ids=tokens, max_tokens=1, temperature=0.0, timeout_s=120.0)
    try:
        return (await asked.result()).ledger.ttft_s
    except TandemError:
        return -1.0


async def _cancel(tasks: Sequence["asyncio.Task[None] | asyncio.Task[list[float]]"]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


async def tenant_key(address: str, tenant: str) -> str:
    """Record a key of this tenant at a cluster of `tandem up` with ADMIN_KEY. Return the key."""
    async with open_channel(address) as channel:
        record = admin_pb2.KeyRecord(tenant=tenant, access=[admin_pb2.KEY_ACCESS_INFERENCE], weight=1)
        request = admin_pb2.AddKeyRequest(record=record)
        shown = (("authorization", f"Bearer {ADMIN_KEY}"),)
        added = await admin_pb2_grpc.AdminStub(channel).AddKey(request, metadata=shown, timeout=20)
        return str(added.key)


async def _measure(address: str, num_rounds: int, duration_s: float) -> list[Round]:
    keys = [await tenant_key(address, tenant) for tenant in ("measured", "other")]
    async with AsyncClient(address, keys[0]) as measured, AsyncClient(address, keys[1]) as other:
        bench, arms = Bench(measured, other, Flood(address, keys[1]), random.Random(18)), (_AT_SHARE, _FLOODED)
        return [await bench.round(arms[:: 1 - 2 * (number % 2)], duration_s) for number in range(num_rounds)]


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def summary(all_rounds: Sequence[Round]) -> dict[str, float]:
    """Return the figures of the goal: within 1.3 times, after one chunk is subtracted. Only steady rounds count."""
    rounds = [each for each in all_rounds if each.is_steady]
    if not rounds:
        return {"rounds": len(all_rounds), "steady_rounds": 0}
    at_share, flooded = ([ttft for each in rounds for ttft in each.served_s(arm)] for arm in (_AT_SHARE, _FLOODED))
    chunk_s = median(each.chunk_s for each in rounds)
    pairs = [(_p99(each.served_s(_FLOODED)) - each.chunk_s) / _p99(each.served_s(_AT_SHARE)) for each in rounds]
    return {
        "rounds": len(all_rounds),
        "steady_rounds": len(rounds),
        "requests": len(at_share),
        "requests_flooded": len(flooded),
        "not_served": sum(ttft < 0 for each in rounds for ttfts in each.ttft_s.values() for ttft in ttfts),
        "chunk_s": chunk_s,
        "p50_s": median(at_share),
        "p50_flooded_s": median(flooded),
        "p99_s": _p99(at_share),
        "p99_flooded_s": _p99(flooded),
        "p99_ratio": (_p99(flooded) - chunk_s) / _p99(at_share),
        "p99_ratio_median_of_rounds": median(pairs),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a flooding tenant does to another tenant's first tokens.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--duration-s", type=float, default=25.0, help="of each arm of a round")
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {_RESULT.name}")
    parsed = parser.parse_args(arguments)
    environment = os.environ | {"TANDEM_ADMIN_KEY": ADMIN_KEY, "TANDEM_KEYS": "redis"}
    os.sched_setaffinity(0, {OTHER_CORE})  # inherited by the cluster
    with (
        TemporaryDirectory(prefix="tandem-tenants-") as folder,
        LocalCluster(str(MODELS[0].save(Path(folder))), colocated=1, flags=_FLAGS, environment=environment) as cluster,
    ):
        (worker,) = (pid for pid, command in descendants(os.getpid()) if "worker" in command.split())
        pin(worker, MODEL_CORE)
        rounds = asyncio.run(_measure(cluster.grpc, parsed.rounds, parsed.duration_s))
    figures = summary(rounds)
    for name, value in figures.items():
        print(f"{name:28} {value:.3f}")
    if parsed.write:
        kept = {"about": about(), "summary": figures, "rounds": [asdict(each) for each in rounds]}
        _RESULT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
