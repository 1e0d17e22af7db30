"""Measure a whole cluster on one GPU with the shape of an 8B Llama: separate pools, and one colocated worker.

    python -m benchmarks.gpu.serving [--seconds 280] [--tiny] [--output FOLDER]

Each mode runs conversations by `tandem bench`, and streams while a burst of long prompts arrives. The separate pools
also get `kill -9` of each worker during conversations. `--tiny` does the same in small with the demo model on a CPU.
The folder gets serving.json and serving.md, rewritten after each part, and the log of every process.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.memory import NoRoom, Room, room
from benchmarks.gpu.serving_load import (
    GPU,
    OBJECTIVE,
    TINY,
    Load,
    Size,
    bench,
    conversations,
    described,
    status_of,
    write_trace,
)
from benchmarks.gpu.serving_table import table
from benchmarks.gpu_check.last_words import ask_for_stacks
from benchmarks.machine import about
from cli.load import Arrival, report
from cli.local.local_cluster import LocalCluster
from cli.verbs.clusters import up
from cluster.errors import TandemError
from tandem.client import AsyncClient

# The worker that does both computes smaller chunks: each stands between two tokens of everybody else.
_MODES = {
    "colocated": ("--colocated", "1", "--max-prefill-tokens", "512"),
    "disaggregated": ("--prefill", "1", "--decode", "1", "--max-prefill-tokens", "4096"),
}
_GPU_FLAGS = ("--device", "cuda", "--dtype", "bfloat16", "--load-format", "dummy", "--max-num-seqs", "256")
_TINY_FLAGS = ("--device", "cpu", "--num-blocks", "512")
_MAX_MODEL_LEN = 16_384
_MOST_KV_BYTES = 64 << 30
_ENOUGH_FOR_BOTH_S = 200.0  # the colocated mode goes first where there is so much, and may take so large a part of it
_COLOCATED_PART = 0.4


@dataclass(frozen=True, slots=True)
class _Times:
    """Points in time on the monotonic clock."""

    ends_at_s: float

    @property
    def left_s(self) -> float:
        return self.ends_at_s - time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.serving")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit for everything (default: 600)")
    parser.add_argument("--tiny", action="store_true", help="small, with the demo model on a CPU")
    parser.add_argument("--modes", default=",".join(_MODES), help="modes to run, comma-separated (default: all)")
    parser.add_argument("--output", type=Path, help="folder for serving.json, .md and logs; default: none")
    arguments = parser.parse_args()
    times = _Times(time.monotonic() + arguments.seconds)
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    with tempfile.TemporaryDirectory() as folder:
        kept = _Kept(arguments.output or Path(folder))
        measuring = _Measuring(TINY if arguments.tiny else GPU, kept, Path(folder), times, is_tiny=arguments.tiny)
        kept.write()
        try:
            asyncio.run(measuring.run(arguments.modes.split(",")))
        except (TimeoutError, RuntimeError, TandemError, NoRoom) as error:
            kept.figures["problem"] = f"{type(error).__name__}: {error}"
            kept.write()
    print(table(kept.figures))
    return 1 if kept.figures["problem"] else 0


class _Kept:
    """The results so far. Owns the files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.figures: dict[str, Any] = {"about": about(), "setting": {}, "load": {}, "modes": {}, "kills": []}
        self.figures["problem"] = ""
        self._began_s = time.monotonic()

    def add(self, kind: str, name: str, found: object) -> None:
        if kind == "kills":
            self.figures["kills"].append(found)
        else:
            self.figures["modes"].setdefault(kind, {})[name] = found
        print(f"{time.monotonic() - self._began_s:.0f} s: {kind}, {name}", file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        (self._folder / "serving.json").write_text(json.dumps(self.figures, indent=1) + "\n")
        (self._folder / "serving.md").write_text(table(self.figures) + "\n")

    def log(self, mode: str, name: str, line: str) -> None:
        with (self._folder / f"{mode}-{name}.log").open("a") as file:
            file.write(f"{time.monotonic() - self._began_s:.1f} {line}\n")


class _Starting:
    """The start of a cluster. It ends at the first process that ends, because three attempts at loading sixteen
    gigabytes would take minutes."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_over = False

    def say(self, text: str) -> None:
        up.tell(text)
        if "starting it again" in text and not self._is_over and not self._ended.done():
            self._ended.set_exception(RuntimeError(text))

    async def of(self, cluster: LocalCluster) -> None:
        """Start a cluster. Raises RuntimeError with the process's last lines, and what `LocalCluster.start` raises."""
        start = asyncio.ensure_future(cluster.start())
        try:
            await asyncio.wait([start, self._ended], return_when=asyncio.FIRST_COMPLETED)
            (self._ended if self._ended.done() else start).result()
        finally:
            self._is_over = True
            start.cancel()


class _Measuring:
    """Owns the trace that all clusters get, and the remaining time. The first cluster sets the rate of arrivals."""

    def __init__(self, size: Size, kept: _Kept, folder: Path, times: _Times, *, is_tiny: bool) -> None:
        self._size, self._kept, self._folder, self._times, self._is_tiny = size, kept, folder, times, is_tiny
        self._trace = folder / "conversations.csv"
        self._arrivals: list[Arrival] = []
        self._room: Room | None = None

    async def run(self, modes: Sequence[str]) -> None:
        """Measure every mode. The colocated mode comes first because it is short, so that `kill -9` comes last; with
        little time left the colocated mode comes last."""
        chosen = [mode for mode in _MODES if mode in modes]
        if self._times.left_s < _ENOUGH_FOR_BOTH_S:
            chosen.reverse()
        for mode in chosen:
            is_first_of_two = mode == "colocated" and mode != chosen[-1]
            part = _COLOCATED_PART if is_first_of_two else 1.0
            try:
                async with asyncio.timeout(part * self._times.left_s):
                    await self._mode(mode)
            except (TimeoutError, RuntimeError, TandemError) as error:
                if not is_first_of_two:
                    raise
                self._kept.add(mode, "ended_early", f"{type(error).__name__}: {error}")

    async def _mode(self, mode: str) -> None:
        kept = self._kept
        async with self._serving(mode) as (cluster, client, admin_key):
            kept.add(mode, "up", True)
            load = await Load.prepared(client, self._size)
            if not self._arrivals:
                self._draw(await load.fitting_rate())
            kept.add(mode, "conversations", await bench(cluster.grpc, self._trace))
            kept.add(mode, "status", await status_of(cluster.grpc, admin_key))
            kept.add(mode, "alone", await load.evenness(with_storm=False))
            kept.add(mode, "in_storm", await load.evenness(with_storm=True))
            for role in ("prefill", "decode") if mode == "disaggregated" else ():
                kept.add("kills", role, await self._kill(cluster, load, role))

    def _draw(self, rate_rps: float) -> None:
        self._arrivals = conversations(self._size.num_requests, rate_rps, self._size.length_scale)
        write_trace(self._arrivals, self._trace)
        self._kept.figures["load"] = described(self._arrivals)

    @asynccontextmanager
    async def _serving(self, mode: str) -> AsyncIterator[tuple[LocalCluster, AsyncClient, str]]:
        """Run `tandem up` with its own flags. Yields the cluster, its client and its admin key. Workers that do not
        become ready print their stacks before they are ended."""
        parser = argparse.ArgumentParser()
        up.add_arguments(parser)
        flags = _TINY_FLAGS if self._is_tiny else self._gpu_flags(mode)
        patience = ("--start-timeout-s", str(max(20.0, 0.5 * self._times.left_s)))
        plan, _ = up.plan_from(parser.parse_args([*_MODES[mode], "--port", "0", "--grpc-port", "0", *patience, *flags]))
        starting = _Starting()
        cluster = LocalCluster(plan, say=starting.say, echo=partial(self._kept.log, mode))
        try:
            try:
                await starting.of(cluster)
            except (TandemError, asyncio.CancelledError):
                await asyncio.to_thread(ask_for_stacks, os.getpid())
                raise
            async with AsyncClient(cluster.grpc) as client:
                yield cluster, client, plan.admin_key
            await cluster.drain()
        finally:
            await cluster.close()

    def _gpu_flags(self, mode: str) -> tuple[str, ...]:
        """Return the size of KV in bytes: a share of the device would count memory that the other worker has."""
        if self._room is None:
            free, _ = torch.cuda.mem_get_info()
            self._room = room(free, num_processes=2, least_kv_tokens=_MAX_MODEL_LEN, most_kv_bytes=_MOST_KV_BYTES)
            self._room.config.save_pretrained(self._folder / "model")
            self._kept.figures["setting"] = {
                "Shape": f"a Llama of {self._room.shape}, random weights",
                "Smaller than 8B": self._room.why_smaller,
                "KV of each of two workers": f"{self._room.kv_tokens:,} tokens, of one worker twice as much",
            }
        kv_bytes = self._room.kv_bytes * (2 if mode == "colocated" else 1)
        lengths = ("--max-model-len", str(_MAX_MODEL_LEN), "--kv-cache-memory", str(kv_bytes))
        return ("--model", str(self._folder / "model"), *lengths, *_GPU_FLAGS)

    async def _kill(self, cluster: LocalCluster, load: Load, role: str) -> dict[str, Any]:
        """Kill a role's worker with SIGKILL during conversations; its supervisor restarts it."""
        arrivals = self._arrivals[: self._size.num_requests_per_kill]
        answering = asyncio.create_task(load.answered(arrivals))
        await asyncio.sleep(arrivals[len(arrivals) // 2].at_s)
        (victim,) = [pid for name, pid in cluster.pids().items() if name.startswith(role)]
        os.kill(victim, signal.SIGKILL)
        records = await answering
        return {"role": role, "lost": sum(bool(record.error) for record in records), **report(records, OBJECTIVE)}


if __name__ == "__main__":
    sys.exit(main())
