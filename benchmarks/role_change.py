"""Measure how soon a worker is of use in a new role while the cluster is under load, and whether requests are lost.

A real cluster of four workers of the demo model. Its load is as many requests at a time as there are clients, long
prompts with short outputs or the reverse. Each round turns the load twice, and with it the role of the same two
workers: from prefill to decode, where long outputs begin, and back. Meanwhile the requests that run go on.

Measured is the time from the call that changes both roles to the first token that each of the two workers has computed
in its new role, as a client receives it. Two parts of it are shown apart: until that token's request was sent, because
a client first waits for its answer of the load before, and until the worker began to compute it, its first useful step.
A request that ends with an error, or with fewer tokens than it asked for, is lost.

    python -m benchmarks.role_change [--write]
"""

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import grpc

from benchmarks.machine import about
from tandem.client import AsyncClient
from tandem.enum_words import MEMBER_ROLES
from tandem.errors import TandemError
from tandem.local_cluster import LocalCluster
from tandem.v1 import admin_pb2, admin_pb2_grpc

_RESULT = Path(__file__).parent / "results" / "role_change.json"
_FLAGS = ("--dtype=float32", "--placement=least-loaded", "--num-threads=1", "--kv-cache-memory=256MiB")
_ADMIN_KEY = "operator"
_SHOWN = (("authorization", f"Bearer {_ADMIN_KEY}"),)
_CLIENTS, _TIMEOUT_S = 8, 60.0
_SETTLED_S = 4.0  # of load before and after each change
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens."""

    prompt: int
    output: int


_LOADS = {PREFILL: Load(480, 4), DECODE: Load(24, 32)}  # by the role that it needs


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that was sent at `sent_s`. `workers` are those that computed its prompt and decoded it; empty: lost.
    `began_s` is when each of them began its first step for the request."""

    sent_s: float
    token_times_s: Sequence[float]
    workers: Sequence[str]
    began_s: Sequence[float] = ()

    def first_use(self, role: str, worker: str) -> "Use | None":
        """Return the use that this worker was of in this role; None: none."""
        if len(self.workers) < 2 or len(self.token_times_s) < 2:
            return None
        number = 0 if role == PREFILL else 1
        if self.workers[number] != worker:
            return None
        return Use(self.token_times_s[number], self.began_s[number], self.sent_s)


class Use(NamedTuple):
    """A request that a worker served. Times in seconds; the earliest use is the one with the earliest token."""

    token_s: float  # when its first token in the role came
    began_s: float
    sent_s: float


@dataclass(slots=True)
class Clients:
    """Clients that each wait for an answer before they send the next request."""

    client: AsyncClient
    load: Load
    answers: list[Answer] = field(default_factory=list)
    is_ended: bool = False

    async def run(self) -> None:
        """Send requests until `is_ended` is set."""
        async with asyncio.TaskGroup() as sending:
            for number in range(_CLIENTS):
                sending.create_task(self._send(random.Random(number)))

    async def _send(self, dice: random.Random) -> None:
        while not self.is_ended:
            self.answers.append(await self._ask(dice))

    async def _ask(self, dice: random.Random) -> Answer:
        load, sent_s, times_s = self.load, time.monotonic(), list[float]()
        tokens = [dice.randrange(10, 500) for _ in range(load.prompt)]
        asked = self.client.generate(token_ids=tokens, max_tokens=load.output, ignore_eos=True, timeout_s=_TIMEOUT_S)
        try:
            async for delta in asked:
                times_s += [time.monotonic()] * len(delta.token_ids)
            result = await asked.result()
        except TandemError:
            return Answer(sent_s, times_s, ())
        is_whole = result.usage.completion_tokens == load.output
        computing_first = sorted(result.ledger.worker_times, key=lambda each: each.compute_s, reverse=True)
        workers = [each.member.partition("@")[0] for each in computing_first]
        began_s = [sent_s + each.ended_s - each.compute_s for each in computing_first]
        return Answer(sent_s, times_s, workers if is_whole else (), began_s)


@dataclass(frozen=True, slots=True)
class Change:
    """Two workers got this role. In seconds from the call, of each: `used_s` to its first token, `began_s` to the first
    step for it, `sent_s` until its request was sent."""

    role: str
    used_s: list[float]
    began_s: list[float]
    sent_s: list[float]
    num_requests: int
    num_lost: int


def change_of(role: str, workers: Sequence[str], called_s: float, answers: Sequence[Answer]) -> Change:
    """Return what became of a change: its times, and the requests that were answered since the one before it."""
    later = [answer for answer in answers if answer.sent_s >= called_s]
    all_uses = [[answer.first_use(role, worker) for answer in later] for worker in workers]
    never = Use(math.inf, math.inf, math.inf)
    firsts = [min((use for use in uses if use is not None), default=never) for uses in all_uses]
    return Change(
        role,
        used_s=[first.token_s - called_s for first in firsts],
        began_s=[first.began_s - called_s for first in firsts],
        sent_s=[first.sent_s - called_s for first in firsts],
        num_requests=len(answers),
        num_lost=sum(not answer.workers for answer in answers),
    )


async def _measure(address: str, num_rounds: int) -> list[Change]:
    async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        status = await admin.Status(admin_pb2.StatusRequest(), metadata=_SHOWN, timeout=_TIMEOUT_S)
        turning = sorted(m.member_id for m in status.members if MEMBER_ROLES.word(m.role) == PREFILL)[1:]
        clients, changes = Clients(client, _LOADS[PREFILL]), list[Change]()
        async with asyncio.TaskGroup() as running:
            running.create_task(clients.run())
            for role in (DECODE, PREFILL) * num_rounds:
                await asyncio.sleep(_SETTLED_S)
                clients.load, called_s = _LOADS[role], time.monotonic()
                await asyncio.gather(*(_set_role(admin, name, role) for name in turning))
                await asyncio.sleep(_SETTLED_S)
                answers, clients.answers = clients.answers, []
                changes.append(change_of(role, turning, called_s, answers))
            clients.is_ended = True
        return changes


async def _set_role(admin: admin_pb2_grpc.AdminStub, name: str, role: str) -> None:
    request = admin_pb2.SetRoleRequest(member_id=name, role=MEMBER_ROLES.number(role))
    await admin.SetRole(request, metadata=_SHOWN, timeout=_TIMEOUT_S)


def summary(changes: Sequence[Change]) -> dict[str, float]:
    figures: dict[str, float] = {"changes": sum(len(change.used_s) for change in changes)}
    for role in (DECODE, PREFILL):
        used_s = [each for change in changes if change.role == role for each in change.used_s]
        figures |= {f"{role}_first_use_median_s": median(used_s), f"{role}_first_use_worst_s": max(used_s)}
        for name in ("began", "sent"):
            parts_s = [each for change in changes if change.role == role for each in getattr(change, f"{name}_s")]
            figures[f"{role}_{name}_median_s"] = median(parts_s)
    figures["requests"] = sum(change.num_requests for change in changes)
    figures["lost"] = sum(change.num_lost for change in changes)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {_RESULT.name}")
    arguments = parser.parse_args()
    with LocalCluster(
        prefill=3, decode=1, flags=_FLAGS, environment=os.environ | {"TANDEM_ADMIN_KEY": _ADMIN_KEY}
    ) as cluster:
        changes = asyncio.run(_measure(cluster.grpc, arguments.rounds))
    figures = summary(changes)
    for name, value in figures.items():
        print(f"{name:28} {value:.3f}")
    if arguments.write:
        kept = {"about": about(), "summary": figures, "changes": [asdict(each) for each in changes]}
        _RESULT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
