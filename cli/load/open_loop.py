"""An open loop: requests are sent at planned times, regardless of earlier requests; and the latencies it measures.

Every latency counts from the time at which a request was *scheduled*, so a slow driver or server shows in the figures
(no coordinated omission). Times are the event loop's; a test can supply a loop with its own time.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from cli.load.workload import Arrival
from tandem.client import AsyncClient
from tandem.errors import TandemError


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
