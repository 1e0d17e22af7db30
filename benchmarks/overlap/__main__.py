"""`make bench-overlap`: measure how much of a transfer prefill hides, and what digests cost.

One process prefills a prompt of eight chunks while another imports it. The time that remains after prefill's last step
(the exposed time) is compared with the time of one chunk and two control round trips from the same run; then again on a
link on which the whole transfer takes half of prefill.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.overlap.parties import BLOCK_SIZE, CHUNK_TOKENS, Pair, pair
from cluster.messages import Sampling
from cluster.request_size import blocks_for
from engine.build import Engine
from engine.scheduling.step import Chunk, Sample, StepPlan
from kvtransfer.digests import digest_blocks

_RESULTS = Path(__file__).parents[1] / "results"
_NUM_CHUNKS = 8
_PROMPT_TOKENS = _NUM_CHUNKS * CHUNK_TOKENS - 6  # with a tail
_DECODE_PROMPT, _DECODE_TOKENS = 256, 64
_GOAL_CHUNKS, _GOAL_HIDDEN, _GOAL_DIGESTS = 1.5, 0.8, 0.02


@dataclass(frozen=True, slots=True)
class Exposed:
    """Medians over one transport at its full speed."""

    transport: str
    prefill_s: float
    exposed_s: float
    chunk_s: float  # to move one chunk that lies ready, verified, less two control round trips
    round_trip_s: float
    kv_bytes: int

    @property
    def bound_s(self) -> float:
        return _GOAL_CHUNKS * self.chunk_s + 2 * self.round_trip_s


@dataclass(frozen=True, slots=True)
class Paced:
    """Medians over a link on which the whole transfer would take half of prefill."""

    bytes_per_s: float
    prefill_s: float
    transfer_s: float  # all bytes at that speed
    exposed_s: float

    @property
    def hidden(self) -> float:
        return 1 - self.exposed_s / self.transfer_s


@dataclass(frozen=True, slots=True)
class Digests:
    """Cost of `--kv-verify all` on one thread."""

    prefill_s: float
    exporter_s: float  # digests of the whole prompt
    decode_s: float
    importer_s: float  # digests of the prompt that decode begins with

    @property
    def of_prefill(self) -> float:
        return self.exporter_s / self.prefill_s

    @property
    def of_decode(self) -> float:
        return self.importer_s / self.decode_s


async def _median(measure: Callable[[], Awaitable[float]], num_samples: int) -> float:
    await measure()  # warm
    return statistics.median([await measure() for _ in range(num_samples)])


async def exposed(parties: Pair, transport: str, num_samples: int) -> Exposed:
    async def chunk_s() -> float:
        handed_over = await parties.hand_over(transport, CHUNK_TOKENS, is_prefilled=True)
        return handed_over.imported.total_s

    round_trip_s = await _median(parties.round_trip_s, 21)
    ready_s = await _median(chunk_s, 5)  # Attach and its answer, the chunk, Settle and its answer
    runs = [await parties.hand_over(transport, _PROMPT_TOKENS) for _ in range(num_samples)]
    return Exposed(
        transport,
        prefill_s=statistics.median(run.prefill_s for run in runs),
        exposed_s=statistics.median(run.imported.exposed_transfer_s for run in runs),
        chunk_s=ready_s - 2 * round_trip_s,
        round_trip_s=round_trip_s,
        kv_bytes=runs[0].imported.kv_bytes,
    )


async def paced(parties: Pair, full_speed: Exposed, num_samples: int) -> Paced:
    parties.tcp.bytes_per_s = full_speed.kv_bytes / (full_speed.prefill_s / 2)
    runs = [await parties.hand_over("tcp", _PROMPT_TOKENS) for _ in range(num_samples)]
    bytes_per_s, parties.tcp.bytes_per_s = parties.tcp.bytes_per_s, None
    return Paced(
        bytes_per_s,
        prefill_s=statistics.median(run.prefill_s for run in runs),
        transfer_s=full_speed.kv_bytes / bytes_per_s,
        exposed_s=statistics.median(run.imported.exposed_transfer_s for run in runs),
    )


def digests(engine: Engine, prefill_s: float) -> Digests:
    def digest_s(num_blocks: int) -> float:
        samples = []
        for _ in range(7):
            began_s = time.thread_time()
            digest_blocks(engine.pool, range(num_blocks))
            samples.append(time.thread_time() - began_s)
        return statistics.median(samples)

    return Digests(
        prefill_s=prefill_s,
        exporter_s=digest_s(blocks_for(_PROMPT_TOKENS, BLOCK_SIZE)),
        decode_s=_decode_s(engine),
        importer_s=digest_s(blocks_for(_DECODE_PROMPT, BLOCK_SIZE)),
    )


def _decode_s(engine: Engine) -> float:
    """Return the seconds to decode one sequence alone."""
    block_ids = tuple(range(blocks_for(_DECODE_PROMPT + _DECODE_TOKENS, BLOCK_SIZE)))
    prompt = tuple(range(100, 100 + _DECODE_PROMPT))
    engine.runner.run(StepPlan((Chunk(0, prompt, 0, block_ids[: _DECODE_PROMPT // BLOCK_SIZE]),)))
    began_s = time.perf_counter()
    for position in range(_DECODE_PROMPT, _DECODE_PROMPT + _DECODE_TOKENS):
        sample = Sample(seed=1, position=position + 1, sampling=Sampling(temperature=0.0))
        held = block_ids[: blocks_for(position + 1, BLOCK_SIZE)]
        engine.runner.run(StepPlan((Chunk(0, (7,), position, held, (sample,)),)))
    return time.perf_counter() - began_s


def as_markdown(results: list[Exposed], link: Paced, cost: Digests, about: dict[str, str]) -> str:
    lines = [
        "# Transfer behind prefill",
        "",
        f"`make bench-overlap`, {about['date']}, commit {about['commit']}, {about['processor']}, {about['versions']}.",
        f"SmolLM2-135M shape, random weights, bfloat16, one thread per process. A prompt of {_PROMPT_TOKENS} tokens in"
        f" {_NUM_CHUNKS} chunks, {results[0].kv_bytes / 1e6:.0f} MB of KV, `--kv-verify all`. Medians.",
        "",
        "| transport | prefill | exposed | one chunk | control round trip | 1.5 chunks + 2 round trips | |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        verdict = "holds" if result.exposed_s <= result.bound_s else "**missed**"
        lines.append(
            f"| {result.transport} | {result.prefill_s:.2f} s | {result.exposed_s * 1e3:.1f} ms"
            f" | {result.chunk_s * 1e3:.1f} ms | {result.round_trip_s * 1e3:.2f} ms | {result.bound_s * 1e3:.1f} ms"
            f" | {verdict} |"
        )
    verdict = "holds" if link.hidden >= _GOAL_HIDDEN else "**missed**"
    lines += [
        "",
        f"On a link of {link.bytes_per_s / 1e6:.1f} MB/s, where the whole transfer takes {link.transfer_s:.2f} s and"
        f" prefill {link.prefill_s:.2f} s: {link.exposed_s:.3f} s exposed, **{link.hidden:.1%} hidden**"
        f" (goal {_GOAL_HIDDEN:.0%}: {verdict}).",
        "",
        "| digests, `--kv-verify all` | CPU time | of | share | goal 2 % |",
        "|---|---|---|---|---|",
    ]
    for who, spent_s, of, whole_s, share in (
        ("exporter, whole prompt", cost.exporter_s, "prefill", cost.prefill_s, cost.of_prefill),
        ("importer, 256 in / 64 out", cost.importer_s, "decode", cost.decode_s, cost.of_decode),
    ):
        verdict = "holds" if share <= _GOAL_DIGESTS else "**missed**"
        lines.append(f"| {who} | {spent_s * 1e3:.1f} ms | {of}, {whole_s:.2f} s | {share:.2%} | {verdict} |")
    lines += [
        "",
        "*Exposed*: from the end of prefill's last step, by the exporter's clock, until the importer has settled. *One"
        " chunk*: a hand-off of 512 tokens that lie ready, less its two control round trips. *Control round trip*: one"
        " message and its answer on a HandOff stream of its own.",
        "",
    ]
    return "\n".join(lines)


def _about() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    model_names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip() or "unknown",
        "processor": f"{os.cpu_count()} x {model_names[0].partition(':')[2].strip()}" if model_names else "unknown",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }


async def measure(num_samples: int) -> tuple[list[Exposed], Paced, Digests]:
    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    async with pair(report) as parties:
        results = []
        for transport in ("shm", "tcp"):
            report(f"{transport}: {num_samples} prompts of {_NUM_CHUNKS} chunks")
            results.append(await exposed(parties, transport, num_samples))
        report("a paced link")
        link = await paced(parties, results[-1], max(1, num_samples - 1))
        report("digests")
        return results, link, await asyncio.to_thread(digests, parties.engine, results[0].prefill_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--samples", type=int, default=5, help="prompts per transport")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder for overlap.md and overlap.json")
    arguments = parser.parse_args()
    results, link, cost = asyncio.run(measure(arguments.samples))
    about = _about()
    text = as_markdown(results, link, cost, about)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "overlap.md").write_text(text)
    raw = {
        "about": about,
        "exposed": [asdict(result) | {"bound_s": result.bound_s} for result in results],
        "paced": asdict(link) | {"hidden": link.hidden},
        "digests": asdict(cost) | {"of_prefill": cost.of_prefill, "of_decode": cost.of_decode},
    }
    (arguments.output / "overlap.json").write_text(json.dumps(raw, indent=2) + "\n")
    print(text)


if __name__ == "__main__":
    main()
