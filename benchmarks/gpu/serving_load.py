"""The load of a cluster on one GPU: conversations by `tandem bench`, and streams while a burst of long prompts arrives.

Conversations are a generated trace: lengths from conversation_lengths.py, Poisson arrivals. Every cluster in a
comparison gets the same file.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.gpu.conversation_lengths import draw_lengths
from cli.load import Arrival, Objective, Record, RequestFailed, clipped, open_loop, prompt_ids, summary
from tandem.client import AsyncClient
from tandem.errors import TandemError

OBJECTIVE = Objective(ttft_s=1.0, itl_s=0.05)
_SEED = 11
_BEGIN = datetime(2023, 11, 16)
_TIMEOUT_S = 180.0
# Prefill alone is asked for this share of what it was seen to do: on one GPU it shares the device with decode.
_PREFILL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Size:
    """`streams` decode while `storm` prompts arrive at once. All conversations arrive within `longest_s`, and not
    before `shortest_s`."""

    num_requests: int
    shortest_s: float
    longest_s: float
    length_scale: float
    calibrating: int  # prompts that are sent at once to see what prefill can do
    streams: int
    stream_tokens: int
    storm: int
    storm_tokens: int
    num_requests_per_kill: int


GPU = Size(
    num_requests=500,
    shortest_s=20.0,
    longest_s=60.0,
    length_scale=1.0,
    calibrating=16,
    streams=8,
    stream_tokens=256,
    storm=24,
    storm_tokens=8_192,
    num_requests_per_kill=120,
)
TINY = Size(
    num_requests=10,
    shortest_s=2.0,
    longest_s=2.0,
    length_scale=0.05,
    calibrating=2,
    streams=2,
    stream_tokens=48,
    storm=2,
    storm_tokens=400,
    num_requests_per_kill=6,
)


def conversations(num_requests: int, rate_rps: float, length_scale: float) -> list[Arrival]:
    dice, at_s, arrivals = Random(_SEED), 0.0, []
    for _ in range(num_requests):
        at_s += dice.expovariate(rate_rps)
        prompt, output = (max(2, round(tokens * length_scale)) for tokens in draw_lengths(dice))
        arrivals.append(Arrival(at_s, prompt, output))
    return arrivals


def write_trace(arrivals: Sequence[Arrival], path: Path) -> None:
    """Write the trace in the format of Azure's traces, which `tandem bench` reads."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for arrival in arrivals:
        time = (_BEGIN + timedelta(seconds=arrival.at_s)).isoformat(" ", "microseconds")
        lines.append(f"{time},{arrival.prompt_tokens},{arrival.output_tokens}")
    path.write_text("\n".join(lines) + "\n")


def described(arrivals: Sequence[Arrival]) -> dict[str, Any]:
    return {
        "requests": len(arrivals),
        "rate_rps": len(arrivals) / arrivals[-1].at_s,
        "lengths": "drawn from the quantiles of Azure's conversations of 2023, each length apart",
        "mean_prompt_tokens": fmean(arrival.prompt_tokens for arrival in arrivals),
        "mean_output_tokens": fmean(arrival.output_tokens for arrival in arrivals),
        "longest_prompt_tokens": max(arrival.prompt_tokens for arrival in arrivals),
    }


async def bench(address: str, trace: Path) -> dict[str, Any]:
    goals = ("--slo-ttft-s", str(OBJECTIVE.ttft_s), "--slo-itl-s", str(OBJECTIVE.itl_s))
    return await _tandem("bench", address, "--trace", str(trace), *goals, "--timeout-s", str(_TIMEOUT_S))


async def status_of(address: str, admin_key: str) -> dict[str, Any]:
    return await _tandem("status", address, environment={"TANDEM_ADMIN_KEY": admin_key})


async def _tandem(verb: str, address: str, *flags: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run the command as a process. Raises RuntimeError with its output if it fails."""
    command = (sys.executable, "-m", "cli", verb, "--address", address, "--json", *flags)
    pipe = asyncio.subprocess.PIPE
    more = os.environ | (environment or {})
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=more)
    try:
        answer, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"tandem {verb} ended with {process.returncode}: {complaint.decode()[-800:]}")
    figures: dict[str, Any] = json.loads(answer)
    return figures


@dataclass(frozen=True, slots=True)
class Load:
    """Sends requests from this process to one cluster."""

    client: AsyncClient
    size: Size
    vocab_size: int
    max_model_len: int

    @classmethod
    async def prepared(cls, client: AsyncClient, size: Size) -> "Load":
        """Send one request first, so that one-time work is not measured."""
        (model,) = await client.models()
        load = cls(client, size, model.vocab_size, model.max_model_len)
        await open_loop([Arrival(0.0, 64, 8)], load._send)
        return load

    async def fitting_rate(self) -> float:
        """Return a rate of arrivals per second: half of the throughput of several mean prompts at once, within the
        bounds of the run's length."""
        size = self.size
        mean = fmean(arrival.prompt_tokens for arrival in conversations(size.num_requests, 1.0, size.length_scale))
        prompts = [Arrival(0.0, round(mean), 1)] * size.calibrating
        records = await self.answered(prompts)
        if failed := {record.error for record in records if record.error}:
            raise RuntimeError(f"prompts of {mean:.0f} tokens failed: {', '.join(sorted(failed))}")
        rate_rps = _PREFILL_SHARE * size.calibrating / max(record.ended_s for record in records)
        return min(max(rate_rps, size.num_requests / size.longest_s), size.num_requests / size.shortest_s)

    async def answered(self, arrivals: Sequence[Arrival]) -> list[Record]:
        return await open_loop(clipped(arrivals, self.max_model_len)[0], self._send)

    async def evenness(self, *, with_storm: bool) -> dict[str, float]:
        """Return the gaps between tokens of streams, in seconds, from the arrival of the burst on; without a burst,
        from the same token on."""
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
            async with aclosing(self._send(2_000_000 + number, Arrival(0.0, self._storm_tokens, 1))) as tokens:
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

    @property
    def _storm_tokens(self) -> int:
        return min(self.size.storm_tokens, self.max_model_len - 1)

    async def _send(self, number: int, arrival: Arrival) -> AsyncGenerator[int, None]:
        generation = self.client.generate(
            token_ids=prompt_ids(arrival, number, self.vocab_size, _SEED),
            max_tokens=arrival.output_tokens,
            ignore_eos=True,
            temperature=0.0,
            timeout_s=_TIMEOUT_S,
        )
        try:
            async with generation:
                async for delta in generation:
                    yield len(delta.token_ids)
        except TandemError as error:
            raise RequestFailed(error.reason) from error
