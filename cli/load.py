"""An open loop: planned requests, drawn or read from a trace, are sent at their times regardless of earlier ones, and
their latencies are measured.

Every latency counts from the time at which a request was *scheduled*, so a slow driver or server shows in the figures
(no coordinated omission). Times are the event loop's; a test can supply a loop with its own time.

Traces: Azure LLM inference (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake (JSONL: timestamp in ms,
input_length, output_length, hash_ids, one per 512-token block that covers its block and all before it).
"""

import asyncio
import csv
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

from cluster.errors import ConfigError
from tandem.client import AsyncClient
from tandem.errors import TandemError

_MOONCAKE_BLOCK = 512
_MOONCAKE_GRID_S = 3.0  # its timestamps are rounded down to this
_AZURE_COLUMNS = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A planned request. Requests share a prefix of `prefix_block` tokens per leading prefix id that they have in
    common.
    """

    at_s: float  # from the start of the run
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    prefix_block: int = _MOONCAKE_BLOCK


def poisson(
    rate_rps: float, num_requests: int, prompt_tokens: int, output_tokens: int, random: Random
) -> list[Arrival]:
    """Draw independent arrivals at a mean rate; the first one comes after a drawn gap."""
    at_s, arrivals = 0.0, []
    for _ in range(num_requests):
        at_s += random.expovariate(rate_rps)
        arrivals.append(Arrival(at_s, prompt_tokens, output_tokens))
    return arrivals


def read_trace(path: Path, limit: int | None, random: Random) -> list[Arrival]:
    """Read a trace; its content decides the format. The first arrival is at time 0. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            arrivals = list(_taken(_mooncake(file) if first.startswith("{") else _azure(file), limit))
    except OSError as error:
        raise ConfigError(f"cannot read --trace {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--trace {path} is neither an Azure CSV nor a Mooncake JSONL: {error}") from error
    if not arrivals:
        raise ConfigError(f"--trace {path} contains no request")
    if first.startswith("{"):
        arrivals = _spread(arrivals, random)
    begin_s = arrivals[0].at_s
    return [_moved(arrival, arrival.at_s - begin_s) for arrival in arrivals]


def scaled(arrivals: Sequence[Arrival], *, time_scale: float, length_scale: float) -> list[Arrival]:
    """Multiply times and lengths, the blocks of shared prefixes included. The minimum length is one token."""
    return [
        Arrival(
            at_s=arrival.at_s * time_scale,
            prompt_tokens=max(1, round(arrival.prompt_tokens * length_scale)),
            output_tokens=max(1, round(arrival.output_tokens * length_scale)),
            prefix_ids=arrival.prefix_ids,
            prefix_block=max(1, round(arrival.prefix_block * length_scale)),
        )
        for arrival in arrivals
    ]


def clipped(arrivals: Sequence[Arrival], max_model_len: int) -> tuple[list[Arrival], int]:
    """Cut prompts and outputs to the model's maximum length. Return the arrivals and the number of changed ones."""
    fitting = []
    for arrival in arrivals:
        prompt_tokens = min(arrival.prompt_tokens, max_model_len - 1)
        output_tokens = min(arrival.output_tokens, max_model_len - prompt_tokens)
        fitting.append(Arrival(arrival.at_s, prompt_tokens, output_tokens, arrival.prefix_ids, arrival.prefix_block))
    return fitting, sum(before != after for before, after in zip(arrivals, fitting, strict=True))


def prompt_ids(arrival: Arrival, number: int, vocab_size: int, seed: int) -> list[int]:
    """Return random tokens. Equal prefix ids give equal prefixes. `number` makes the rest of each request unique."""
    ids: list[int] = []
    for prefix_id in arrival.prefix_ids:
        if len(ids) >= arrival.prompt_tokens:
            break
        ids += _random_ids(f"{seed} prefix {prefix_id}", arrival.prefix_block, vocab_size)
    ids += _random_ids(f"{seed} request {number}", max(0, arrival.prompt_tokens - len(ids)), vocab_size)
    return ids[: arrival.prompt_tokens]


def _random_ids(name: str, count: int, vocab_size: int) -> list[int]:
    return Random(name).choices(range(vocab_size), k=count)


def _azure(lines: Iterable[str]) -> Iterator[Arrival]:
    rows = csv.DictReader(lines)
    if not set(rows.fieldnames or ()) >= _AZURE_COLUMNS:
        raise ValueError(f"its columns are {rows.fieldnames}")
    for row in rows:
        yield Arrival(_azure_time_s(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _azure_time_s(text: str) -> float:
    """Convert `2023-11-16 18:15:46.6805900` to seconds. It counts steps of 100 ns: more digits than datetime reads."""
    moment, _, fraction = text.partition(".")
    since = datetime.fromisoformat(moment) - datetime(2023, 1, 1)
    return since.total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)


def _mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    for line in lines:
        row = json.loads(line)
        yield Arrival(
            at_s=row["timestamp"] / 1000,
            prompt_tokens=int(row["input_length"]),
            output_tokens=int(row["output_length"]),
            prefix_ids=tuple(row["hash_ids"]),
        )


def _spread(arrivals: Sequence[Arrival], random: Random) -> list[Arrival]:
    """Move each arrival to a random time within its cell of the grid: a burst every three seconds would be an artefact
    of the rounding."""
    moved = [_moved(arrival, arrival.at_s + random.uniform(0, _MOONCAKE_GRID_S)) for arrival in arrivals]
    return sorted(moved, key=lambda arrival: arrival.at_s)


def _moved(arrival: Arrival, at_s: float) -> Arrival:
    return Arrival(at_s, arrival.prompt_tokens, arrival.output_tokens, arrival.prefix_ids, arrival.prefix_block)


def _taken(arrivals: Iterator[Arrival], limit: int | None) -> Iterator[Arrival]:
    for number, arrival in enumerate(arrivals):
        if limit is not None and number >= limit:
            return
        yield arrival


@dataclass(frozen=True, slots=True)
class Record:
    """The times of one request, in seconds on the run's own clock. `error` is empty for a success."""

    scheduled_s: float
    token_times_s: tuple[float, ...]  # when each generated token arrived
    ended_s: float
    prompt_tokens: int
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.scheduled_s

    @property
    def inter_token_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency limits of a good response; None: no limit."""

    ttft_s: float | None = None
    itl_s: float | None = None  # the mean over the request

    def is_met(self, record: Record) -> bool:
        if record.error or not record.token_times_s:
            return False
        if self.ttft_s is not None and record.ttft_s > self.ttft_s:
            return False
        gaps = record.inter_token_s
        return self.itl_s is None or not gaps or fmean(gaps) <= self.itl_s


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the nearest ranks, as numpy does by default. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def report(records: Sequence[Record], objective: Objective) -> dict[str, object]:
    """Return the run's figures for JSON. Latencies are those of successful requests; failed ones are only counted."""
    good = [record for record in records if not record.error and record.token_times_s]
    errors: dict[str, int] = {}
    for record in records:
        if record.error:
            errors[record.error] = errors.get(record.error, 0) + 1
    duration_s = max((record.ended_s for record in records), default=0.0) - min(
        (record.scheduled_s for record in records), default=0.0
    )
    met = sum(objective.is_met(record) for record in records)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return {
        "requests": {"sent": len(records), "ok": len(good), "failed": len(records) - len(good), "errors": errors},
        "duration_s": duration_s,
        "throughput": {
            "requests_per_s": len(good) * per_s,
            "prompt_tokens_per_s": sum(record.prompt_tokens for record in good) * per_s,
            "output_tokens_per_s": sum(len(record.token_times_s) for record in good) * per_s,
        },
        "ttft_s": summary([record.ttft_s for record in good]),
        "itl_s": summary([gap for record in good for gap in record.inter_token_s]),
        "e2e_s": summary([record.e2e_s for record in good]),
        "goodput": {
            "slo_ttft_s": objective.ttft_s,
            "slo_itl_s": objective.itl_s,
            "requests_per_s": met * per_s,
            "share": met / len(records) if records else 0.0,
        },
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "mean": fmean(values),
        "p50": percentile(values, 0.50),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }


# Sends request `number`; yields how many tokens arrived together.
Send = Callable[[int, Arrival], AsyncGenerator[int, None]]


class RequestFailed(Exception):
    """A request has failed. The text is the name of its reason."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends the planned requests to a cluster over gRPC.

    `prompts` are the token ids by the request's number. `model` is empty for the cluster's only model.
    `prefix` begins the requests' ids, which end with their numbers; empty: their ids are random."""

    client: AsyncClient
    model: str
    prompts: Sequence[Sequence[int]]
    timeout_s: float  # of one request
    prefix: str = ""

    async def send(self, number: int, arrival: Arrival) -> AsyncGenerator[int, None]:
        """Generate exactly the planned number of tokens: greedy, ignoring the end of sequence. Raises RequestFailed."""
        generation = self.client.generate(
            token_ids=self.prompts[number],
            model=self.model,
            max_tokens=arrival.output_tokens,
            ignore_eos=True,
            temperature=0.0,
            request_id=f"{self.prefix}{number}" if self.prefix else "",
            timeout_s=self.timeout_s,
        )
        try:
            async with generation:
                async for delta in generation:
                    yield len(delta.token_ids)
        except TandemError as error:
            raise RequestFailed(error.reason) from error


async def open_loop(arrivals: Sequence[Arrival], send: Send) -> list[Record]:
    """Send all requests and wait for the last one to end. Return one record per arrival, in order."""
    begin_s = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_one(number, arrival, begin_s, send)) for number, arrival in enumerate(arrivals)]
    return [task.result() for task in running]


async def _one(number: int, arrival: Arrival, begin_s: float, send: Send) -> Record:
    loop = asyncio.get_running_loop()
    await _until(begin_s + arrival.at_s)
    times_s: list[float] = []
    error = ""
    try:
        async with aclosing(send(number, arrival)) as counts:
            async for count in counts:
                times_s += [loop.time() - begin_s] * count
    except RequestFailed as failure:
        error = str(failure)
    return Record(
        scheduled_s=arrival.at_s,
        token_times_s=tuple(times_s),
        ended_s=loop.time() - begin_s,
        prompt_tokens=arrival.prompt_tokens,
        error=error or ("" if times_s else "no_tokens"),
    )


async def _until(time_s: float) -> None:
    loop = asyncio.get_running_loop()
    reached = loop.create_future()
    alarm = loop.call_at(time_s, reached.set_result, None)
    try:
        await reached
    finally:
        alarm.cancel()
