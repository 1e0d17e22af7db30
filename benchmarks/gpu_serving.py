"""A whole cluster on one GPU, with the shape of an 8B Llama: prefill and decode apart, and one worker that does both.

    python -m benchmarks.gpu_serving [--tiny] [--output FOLDER]

Each in turn: conversations in an open loop; how evenly tokens come while long prompts storm in; and, apart, `kill -9`
of each worker under conversations. `--tiny` does the same in small with the demo model on a CPU. The folder gets
serving.json and serving.md, written anew after each of these, and the log of every process.
"""

import argparse
import asyncio
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.conversation_lengths import draw_lengths
from benchmarks.gpu_shapes import llama_8b
from benchmarks.machine import about
from cli import up
from cli.latency import Objective, Record, report, summary
from cli.local_cluster import LocalCluster
from cli.open_loop import RequestFailed, open_loop
from cli.workload import Arrival, clipped, prompt_ids
from tandem.client import AsyncClient
from tandem.errors import TandemError

MODES = {"disaggregated": ("--prefill", "1", "--decode", "1"), "colocated": ("--colocated", "1")}
_MEMORY_SHARE = {"disaggregated": "0.42", "colocated": "0.84"}  # of the device, for each worker
_WORKERS = ("prefill", "decode")
_SEED = 11


@dataclass(frozen=True, slots=True)
class Size:
    """`streams` decode while `storm` prompts come at once."""

    num_requests: int
    rate_rps: float
    length_scale: float
    objective: Objective
    streams: int
    stream_tokens: int
    storm: int
    storm_tokens: int
    num_requests_per_kill: int
    flags: tuple[str, ...]


GPU = Size(
    num_requests=500,
    rate_rps=16.0,
    length_scale=1.0,
    objective=Objective(ttft_s=1.0, itl_s=0.05),
    streams=8,
    stream_tokens=256,
    storm=24,
    storm_tokens=8_192,
    num_requests_per_kill=120,
    flags=("--device", "cuda", "--dtype", "bfloat16", "--load-format", "dummy", "--max-model-len", "16384"),
)
TINY = Size(
    num_requests=10,
    rate_rps=5.0,
    length_scale=0.05,
    objective=Objective(ttft_s=1.0, itl_s=0.05),
    streams=2,
    stream_tokens=48,
    storm=2,
    storm_tokens=400,
    num_requests_per_kill=6,
    flags=("--device", "cpu", "--num-blocks", "512"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_serving")
    parser.add_argument("--tiny", action="store_true", help="small, with the demo model on a CPU")
    parser.add_argument("--modes", default=",".join(MODES), help="of these, comma-separated")
    parser.add_argument("--output", type=Path, help="folder for serving.json, .md and logs; default: none")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else GPU
    with tempfile.TemporaryDirectory() as folder:
        kept = _Kept(arguments.output or Path(folder))
        asyncio.run(_measure(size, arguments.modes.split(","), kept, is_tiny=arguments.tiny))
    print(table(kept.figures))


class _Kept:
    """What is known so far. Owns the files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.figures: dict[str, Any] = {"about": about(), "modes": {}, "kills": []}

    def add(self, kind: str, name: str, found: object) -> None:
        if kind == "kills":
            self.figures["kills"].append(found)
        else:
            self.figures["modes"].setdefault(kind, {})[name] = found
        print(f"{kind}: {name}", file=sys.stderr, flush=True)
        (self._folder / "serving.json").write_text(json.dumps(self.figures, indent=1) + "\n")
        (self._folder / "serving.md").write_text(table(self.figures) + "\n")

    def log(self, mode: str, name: str, line: str) -> None:
        with (self._folder / f"{mode}-{name}.log").open("a") as file:
            file.write(f"{line}\n")


async def _measure(size: Size, modes: Sequence[str], kept: _Kept, *, is_tiny: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not is_tiny:
            llama_8b().save_pretrained(folder)
        model = () if is_tiny else ("--model", folder)
        for mode in modes:
            async with _serving(mode, (*model, *size.flags), kept, is_tiny=is_tiny) as (cluster, client):
                load = await _Load.prepared(client, size)
                kept.add(mode, "conversations", report(await load.conversations(size.num_requests), size.objective))
                kept.add(mode, "alone", await load.evenness(with_storm=False))
                kept.add(mode, "in_storm", await load.evenness(with_storm=True))
                for role in _WORKERS if mode == "disaggregated" else ():
                    kept.add("kills", role, await _kill(cluster, load, role))


@asynccontextmanager
async def _serving(
    mode: str, flags: tuple[str, ...], kept: _Kept, *, is_tiny: bool
) -> AsyncIterator[tuple[LocalCluster, AsyncClient]]:
    """`tandem up`, from its own flags."""
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    share = () if is_tiny else ("--gpu-memory-utilization", _MEMORY_SHARE[mode])
    arguments = parser.parse_args([*MODES[mode], "--port", "0", "--grpc-port", "0", *flags, *share])
    plan, _ = up.plan_from(arguments)
    cluster = LocalCluster(plan, say=up.tell, echo=partial(kept.log, mode))
    try:
        await cluster.start()
        async with AsyncClient(cluster.grpc) as client:
            yield cluster, client
        await cluster.drain()
    finally:
        await cluster.close()


@dataclass(frozen=True, slots=True)
class _Load:
    """What is sent to one cluster."""

    client: AsyncClient
    size: Size
    vocab_size: int
    max_model_len: int

    @classmethod
    async def prepared(cls, client: AsyncClient, size: Size) -> "_Load":
        """After one request, so that nothing is measured that happens once."""
        (model,) = await client.models()
        load = cls(client, size, model.vocab_size, model.max_model_len)
        await open_loop([Arrival(0.0, 64, 8)], load._send)
        return load

    async def conversations(self, num_requests: int) -> list[Record]:
        dice, at_s, arrivals = Random(_SEED), 0.0, []
        for _ in range(num_requests):
            at_s += dice.expovariate(self.size.rate_rps)
            prompt, output = (max(2, round(tokens * self.size.length_scale)) for tokens in draw_lengths(dice))
            arrivals.append(Arrival(at_s, prompt, output))
        return await open_loop(clipped(arrivals, self.max_model_len)[0], self._send)

    async def evenness(self, *, with_storm: bool) -> dict[str, float]:
        """Gaps between the tokens of streams, in seconds, from the storm's coming on; without one, from the same
        token on."""
        size = self.size
        gaps_s: list[float] = []
        under_way = asyncio.Semaphore(0)

        async def stream(number: int) -> None:
            arrival, last_s, count = Arrival(0.0, 64, size.stream_tokens), 0.0, 0
            async with aclosing(self._send(1_000_000 + number, arrival)) as tokens:
                async for new in tokens:
                    now_s = asyncio.get_running_loop().time()
                    if count >= size.stream_tokens // 8:
                        gaps_s.extend([(now_s - last_s) / new] * new)
                    elif count + new >= size.stream_tokens // 8:
                        under_way.release()
                    last_s, count = now_s, count + new

        async def prompt(number: int) -> None:
            async with aclosing(self._send(2_000_000 + number, Arrival(0.0, size.storm_tokens, 1))) as tokens:
                async for _ in tokens:
                    pass

        async with asyncio.TaskGroup() as tasks:
            for number in range(size.streams):
                tasks.create_task(stream(number))
            for _ in range(size.streams):
                await under_way.acquire()
            for number in range(size.storm if with_storm else 0):
                tasks.create_task(prompt(number))
        return summary(gaps_s)

    async def _send(self, number: int, arrival: Arrival) -> AsyncGenerator[int, None]:
        generation = self.client.generate(
            token_ids=prompt_ids(arrival, number, self.vocab_size, _SEED),
            max_tokens=arrival.output_tokens,
            ignore_eos=True,
            temperature=0.0,
            timeout_s=180.0,
        )
        try:
            async with generation:
                async for delta in generation:
                    yield len(delta.token_ids)
        except TandemError as error:
            raise RequestFailed(error.reason) from error


async def _kill(cluster: LocalCluster, load: _Load, role: str) -> dict[str, Any]:
    """`kill -9` of a role's worker in the middle of conversations. It is started again by whoever started it."""
    num_requests = load.size.num_requests_per_kill
    answering = asyncio.create_task(load.conversations(num_requests))
    await asyncio.sleep(num_requests / load.size.rate_rps / 2)
    (victim,) = [pid for name, pid in cluster.pids().items() if name.startswith(role)]
    os.kill(victim, signal.SIGKILL)
    records = await answering
    gaps_s = [gap for record in records if not record.error for gap in record.inter_token_s]
    return {
        "role": role,
        "requests": num_requests,
        "lost": sum(bool(record.error) for record in records),
        "errors": sorted({record.error for record in records if record.error}),
        "longest_gap_s": max(gaps_s, default=0.0),
    }


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| | requests/s | TTFT p50 / p99 ms | ITL p50 / p99 ms | goodput | ITL p99 of streams alone / in a storm, ms |",
        "|---|---|---|---|---|---|",
    ]
    for mode, found in figures["modes"].items():
        talk = found["conversations"]
        ttft, itl = (
            " / ".join(f"{1e3 * talk[name].get(share, 0.0):.1f}" for share in ("p50", "p99"))
            for name in ("ttft_s", "itl_s")
        )
        storm = " / ".join(f"{1e3 * found.get(name, {}).get('p99', math.nan):.1f}" for name in ("alone", "in_storm"))
        ok, sent = talk["requests"]["ok"], talk["requests"]["sent"]
        rate = f"{talk['throughput']['requests_per_s']:.1f} ({ok} of {sent})"
        lines.append(f"| {mode} | {rate} | {ttft} | {itl} | {talk['goodput']['share']:.1%} | {storm} |")
    lines.append("")
    for kill in figures["kills"]:
        gap = f"longest gap {kill['longest_gap_s']:.1f} s"
        errors = f" ({', '.join(kill['errors'])})" if kill["errors"] else ""
        lost = f"{kill['lost']} of {kill['requests']} requests lost{errors}"
        lines.append(f"kill -9 of the {kill['role']} worker: {lost}, {gap}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
