"""The load generator's own process: reads one job from stdin, sends its requests, prints what it measured.

    python -m benchmarks.placement.generator <job.json

It runs at a higher priority than the workers, which keep both cores busy: time that it waits for a core would count as
the cluster's latency. It uses a few per cent of a core, which it reports together with how late it was.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

from benchmarks.placement import vllm_lines
from cli.load import Arrival, Record, Send, Sender, open_loop, percentile, prompt_ids
from tandem.client import AsyncClient

_NICENESS = -5
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """`protocol`: tandem (gRPC), or vllm (vllm_lines.py). `pace`: planned, or one_by_one, each after the end of the one
    before."""

    protocol: str
    address: str  # host:port
    vocab_size: int
    seed: int  # of the prompts
    pace: str
    arrivals: tuple[Arrival, ...]
    prefix: str = ""  # of the requests' ids


@dataclass(frozen=True, slots=True)
class Generated:
    """The measurements of one load process, in seconds."""

    records: tuple[Record, ...]
    late_s: float  # p99 of the time by which requests were sent later than planned
    cpu_s: float
    took_s: float
    niceness: int


class _Punctuality:
    """Measures how much later than planned each request was sent, relative to the most punctual one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent_after_plan_s: list[float] = []

    async def send(self, number: int, arrival: Arrival) -> AsyncGenerator[int, None]:
        self._sent_after_plan_s.append(asyncio.get_running_loop().time() - arrival.at_s)
        async for count in self._send(number, arrival):
            yield count

    @property
    def late_s(self) -> float:
        return percentile(self._sent_after_plan_s, 0.99) - min(self._sent_after_plan_s)


async def generate(job: Job) -> Generated:
    prompts = [prompt_ids(each, number, job.vocab_size, job.seed) for number, each in enumerate(job.arrivals)]
    async with _sender(job, prompts) as send:
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        if job.pace == "planned":
            punctuality = _Punctuality(send)
            records, late_s = await open_loop(job.arrivals, punctuality.send), punctuality.late_s
        else:
            records, late_s = await _one_by_one(job.arrivals, send), 0.0
    cpu_s, took_s = time.process_time() - began_cpu_s, time.monotonic() - began_s
    return Generated(tuple(records), late_s, cpu_s, took_s, os.getpriority(os.PRIO_PROCESS, 0))


async def _one_by_one(arrivals: tuple[Arrival, ...], send: Send) -> list[Record]:
    records = []
    for number, arrival in enumerate(arrivals):
        records += await open_loop([replace(arrival, at_s=0.0)], partial(_renumbered, send, number))
    return records


def _renumbered(send: Send, number: int, _: int, arrival: Arrival) -> AsyncGenerator[int, None]:
    return send(number, arrival)


@asynccontextmanager
async def _sender(job: Job, prompts: list[list[int]]) -> AsyncIterator[Send]:
    if job.protocol == "vllm":
        yield vllm_lines.Sender(job.address, prompts, _TIMEOUT_S).send
        return
    async with AsyncClient(job.address) as client:
        (model,) = await client.models()
        yield Sender(client, model.id, prompts, _TIMEOUT_S, job.prefix).send


def job_to_json(job: Job) -> str:
    return json.dumps(asdict(job))


def job_from_json(text: str) -> Job:
    fields = json.loads(text)
    arrivals = tuple(Arrival(**{**each, "prefix_ids": tuple(each["prefix_ids"])}) for each in fields["arrivals"])
    return Job(**{**fields, "arrivals": arrivals})


def generated_to_json(generated: Generated) -> str:
    return json.dumps(asdict(generated))


def generated_from_json(text: str) -> Generated:
    fields = json.loads(text)
    records = tuple(Record(**{**each, "token_times_s": tuple(each["token_times_s"])}) for each in fields["records"])
    return Generated(**{**fields, "records": records})


def _raise_priority() -> None:
    """Take a higher priority where the system allows it; the result has the niceness that was reached."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    except PermissionError:
        sys.stderr.write("the load generator may not raise its priority; its lateness is measured all the same\n")


if __name__ == "__main__":
    _raise_priority()
    print(generated_to_json(asyncio.run(generate(job_from_json(sys.stdin.read())))))
