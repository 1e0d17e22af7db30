"""Measure the time to the first token when a prompt's prefix is computed, in the pool, in host memory, or on disk.

    python -m benchmarks.prefix_tiers [--write] [--tokens 1024] [--disk FOLDER]

One prefill worker with the 135M shape, bfloat16, random weights, one thread. Its pool holds two prompts. Prompts are
sent in turns, so that each has left the pool when it comes again, and once more at once, while it is there. For the
disk, host memory holds one prompt. Times are a client's, from the call to the first token; the page cache holds the
files. With --write every sample goes to benchmarks/results/prefix_tiers.json and the table beside it.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.shapes import MODELS
from benchmarks.machine import about
from cluster.auth.key_file import load_keys
from cluster.auth.member_channel import open_member_channel
from cluster.messages import PrefillJob, Sampling, TokenStops
from cluster.protocol import wire
from cluster.registry.redis_server import RedisServer
from tandem.internal.v1 import worker_pb2_grpc

_RESULTS = Path(__file__).parent / "results"
_BLOCK_SIZE, _NUM_PROMPTS, _ROUNDS = 16, 6, 5


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    host_blocks: int
    has_disk: bool


@dataclass(frozen=True, slots=True)
class Asked:
    seconds: float
    num_cached: int


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--write", action="store_true")
    arguments.add_argument("--tokens", type=int, default=1024)
    arguments.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    given = arguments.parse_args()
    samples = asyncio.run(_measure(given.tokens, given.disk))
    table = _table(samples, given.tokens)
    print(table)
    if given.write:
        result = {"about": about(), "tokens": given.tokens, "seconds": samples}
        (_RESULTS / "prefix_tiers.json").write_text(json.dumps(result, indent=1) + "\n")
        (_RESULTS / "prefix_tiers.md").write_text(table + "\n")


async def _measure(num_tokens: int, disk: Path) -> dict[str, list[float]]:
    prompt_blocks = num_tokens // _BLOCK_SIZE
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        model = MODELS[0].save(Path(folder) / "model")
        redis = await RedisServer.start()
        try:
            for setting in (
                Setting("host memory", prompt_blocks * (_NUM_PROMPTS + 1), has_disk=False),
                Setting("disk", prompt_blocks, has_disk=True),
            ):
                async with _worker(setting, model, redis.url, Path(folder), 2 * prompt_blocks + 2) as stub:
                    await _rounds(stub, setting, num_tokens, samples)
        finally:
            await redis.stop()
    return samples


async def _rounds(
    stub: worker_pb2_grpc.PrefillWorkerStub, setting: Setting, num_tokens: int, samples: dict[str, list[float]]
) -> None:
    dice = random.Random(setting.name)
    prompts = [tuple(dice.randrange(10, 40_000) for _ in range(num_tokens)) for _ in range(_NUM_PROMPTS)]
    await _ask(stub, prompts[0][64:128])  # what computing costs is known from here on
    for turn in range(_ROUNDS):
        for prompt in prompts:
            away, here = await _ask(stub, prompt), await _ask(stub, prompt)
            name = "computed" if turn == 0 else setting.name
            samples.setdefault(name, []).append(away.seconds)
            samples.setdefault("pool", []).append(here.seconds)
            expected = 0 if turn == 0 else (num_tokens - 1) // _BLOCK_SIZE * _BLOCK_SIZE
            assert away.num_cached == expected, f"{setting.name}, turn {turn}: {away.num_cached} tokens were found"


async def _ask(stub: worker_pb2_grpc.PrefillWorkerStub, token_ids: Sequence[int]) -> Asked:
    job = PrefillJob(
        request_id="bench",
        attempt=0,
        token_ids=tuple(token_ids),
        sampling=Sampling(),
        stops=TokenStops(max_tokens=1),
        seeds=(0,),
        num_committed=0,
        importer=None,
        timeout_s=60.0,
    )
    started_s = time.perf_counter()
    async for event in stub.Prefill(wire.prefill_job_to_wire(job), timeout=60):
        if event.HasField("first_tokens"):
            return Asked(time.perf_counter() - started_s, event.first_tokens.num_cached)
    raise RuntimeError("no first token")


@asynccontextmanager
async def _worker(
    setting: Setting, model: Path, redis: str, folder: Path, num_blocks: int
) -> AsyncIterator[worker_pb2_grpc.PrefillWorkerStub]:
    host_bytes = setting.host_blocks * MODELS[0].kv_bytes_per_token * _BLOCK_SIZE
    flags = [
        "--model",
        str(model),
        "--load-format",
        "dummy",
        "--redis",
        redis,
        "--cluster-name",
        setting.name.split()[0],
    ]
    flags += ["--block-size", str(_BLOCK_SIZE), "--num-blocks", str(num_blocks), "--cluster-key-file", f"{folder}/key"]
    flags += ["--prefix-host-memory", str(host_bytes)]
    if setting.has_disk:
        flags += ["--prefix-disk", f"{folder}/prefixes"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "prefill_worker", *flags),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        words = (await _ready_line(process.stdout)).split()
        address = next(word.partition("=")[2] for word in words if word.startswith("grpc="))
        async with open_member_channel(address, keys=load_keys(Path(folder) / "key"), caller="benchmark@0") as channel:
            yield worker_pb2_grpc.PrefillWorkerStub(channel)
    finally:
        process.terminate()
        await process.wait()


async def _ready_line(output: asyncio.StreamReader) -> str:
    async for line in output:
        if line.startswith(b"ready"):
            return line.decode()
    raise RuntimeError("the worker ended before it was ready")


def _table(samples: dict[str, list[float]], num_tokens: int) -> str:
    computed = statistics.median(samples["computed"])
    lines = [
        f"Time to the first token of {num_tokens} tokens; median (least to most).",
        "",
        "| the prompt's beginning is | ms | computed takes | samples |",
        "|---|---|---|---|",
    ]
    for name in ("computed", "disk", "host memory", "pool"):
        times = samples[name]
        middle = statistics.median(times)
        spread = f"{1e3 * middle:.1f} ({1e3 * min(times):.1f} to {1e3 * max(times):.1f})"
        lines.append(f"| {name} | {spread} | {computed / middle:.1f} x | {len(times)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
