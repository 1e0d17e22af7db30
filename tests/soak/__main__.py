"""`make soak`: run a whole cluster at full rate for minutes with faults in KV reads, and verify that clients notice
nothing.

First every request is answered without faults. Then the same requests are sent repeatedly at full concurrency, with
faults in a share of all reads: each answer must equal the fault-free one, no worker may keep a block, no process may
grow, and no router may suspect a worker, since none is stopped. `--busy-loops N` takes processor time away. With
--write the result is stored under benchmarks/results/.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx

from cluster.registry.redis_server import RedisServer
from tests.soak.result import Soak
from tests.system.rigs.members.asking import ask, question
from tests.system.rigs.processes.local_cluster import LocalCluster, executed

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_NUM_QUESTIONS = 120
_CONCURRENCY = 16
_LATE_S = 4.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FLAGS = (
    *("--dtype", "float32", "--max-prefill-tokens", "64", "--num-blocks", "512", "--kv-transports", "shm,tcp"),
    *("--lease-s", "2", "--max-lease-s", "3", "--read-timeout-s", "3", "--quarantine-s", "1"),
    *("--prefix-caching", "off"),  # or the same questions would soon need no reads
)
_BUSY_LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""

_Question = tuple[tuple[int, ...], int]  # prompt, max_tokens


async def main(minutes: float, fault_rate: float, seed: int, num_busy_loops: int = 0) -> Soak:
    redis = await RedisServer.start()
    questions = _questions(seed)
    try:
        with tempfile.TemporaryDirectory() as directory:
            expected = await _fault_free(redis.url, Path(directory), questions)
            with busy_loops(num_busy_loops):
                soak = await _soak(redis.url, Path(directory), questions, expected, minutes * 60, fault_rate, seed)
            soak.num_busy_loops = num_busy_loops
            return soak
    finally:
        await redis.stop()


@contextmanager
def busy_loops(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes that only use the processor. They end with the block, or with this process if it is killed."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY_LOOP, str(os.getpid())]) for _ in range(number)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _questions(seed: int) -> list[_Question]:
    numbers = random.Random(seed)
    lengths = [numbers.choice((1, 16, 17, 40, 100, 250, 400)) + numbers.randrange(8) for _ in range(_NUM_QUESTIONS)]
    return [(tuple(numbers.randrange(10, 900) for _ in range(n)), numbers.choice((2, 8, 24))) for n in lengths]


async def _fault_free(url: str, directory: Path, questions: list[_Question]) -> list[tuple[int, ...]]:
    cluster = LocalCluster(url, directory, flags=_FLAGS, launch=executed)
    try:
        await cluster.start(prefill=1, decode=1)
        return [(await ask(cluster, question(prompt, max_tokens=n))).token_ids for prompt, n in questions]
    finally:
        await cluster.stop()


async def _soak(
    url: str,
    directory: Path,
    questions: list[_Question],
    expected: list[tuple[int, ...]],
    duration_s: float,
    fault_rate: float,
    seed: int,
) -> Soak:
    os.environ.update(FAULT_RATE=str(fault_rate), FAULT_SEED=str(seed), FAULT_LATE_S=str(_LATE_S))
    cluster = LocalCluster(url, directory, flags=_FLAGS, launch=executed)
    soak = Soak(fault_rate=fault_rate, seed=seed, machine=f"{platform.machine()}, {os.cpu_count()} cores")
    try:
        for name in ("prefill0", "prefill1"):
            await cluster.start_member(name, "prefill_worker", _FLAGS)
        for name in ("decode0", "decode1"):
            await cluster.start_member(name, "tests.faults.faulty_decode", _FLAGS)
        await cluster.start_member("router0", "router", ("--port", "0", "--grpc-port", "0", "--max-attempts", "6"))
        began_s = time.monotonic()
        ends_s = began_s + duration_s
        watching = asyncio.create_task(_watch(cluster, soak, duration_s))
        await asyncio.gather(
            *(_ask_on(cluster, questions, expected, ends_s, seed + i, soak) for i in range(_CONCURRENCY))
        )
        soak.seconds = time.monotonic() - began_s
        soak.members_lost = [m.name for m in cluster.members.values() if m.process.returncode is not None]
        if watching.done():
            watching.result()  # raises what ended the watch
        watching.cancel()
        await _account(cluster, soak)
        soak.false_suspicions, soak.hedges = await _suspicions(cluster)
    finally:
        await cluster.stop()
    soak.faults = _faults(cluster)
    return soak


async def _ask_on(
    cluster: LocalCluster,
    questions: list[_Question],
    expected: list[tuple[int, ...]],
    ends_s: float,
    seed: int,
    soak: Soak,
) -> None:
    numbers = random.Random(seed)
    while time.monotonic() < ends_s:
        number = numbers.randrange(len(questions))
        prompt, max_tokens = questions[number]
        try:
            answer = await ask(cluster, question(prompt, max_tokens=max_tokens))
        except Exception as error:  # noqa: BLE001 -- whatever it is, a client did not get its answer
            soak.num_failed += 1
            soak.errors = [*soak.errors, repr(error)][:5]
            continue
        soak.num_answers += 1
        if answer.token_ids != expected[number]:
            soak.num_wrong += 1
            soak.errors = [*soak.errors, f"question {number}: {answer.token_ids} for {expected[number]}"][:5]
        for reason in answer.ledger.reasons:
            soak.reasons[reason] = soak.reasons.get(reason, 0) + 1


async def _watch(cluster: LocalCluster, soak: Soak, duration_s: float) -> None:
    """Record memory and descriptors of every member, 40 times."""
    while True:
        for name in (name for name, member in cluster.members.items() if member.process.returncode is None):
            member = cluster.members[name]
            resident = int(Path(f"/proc/{member.process.pid}/statm").read_text().split()[1]) * _PAGE_BYTES
            soak.rss_mb.setdefault(name, []).append(round(resident / 1e6, 1))
            soak.descriptors.setdefault(name, []).append(len(os.listdir(f"/proc/{member.process.pid}/fd")))
        await asyncio.sleep(duration_s / 40)


async def _account(cluster: LocalCluster, soak: Soak) -> None:
    try:
        await cluster.until_free()
    except AssertionError as error:
        soak.errors.append(str(error))
    soak.blocks_left = {name: await cluster.blocks_in_use(name) for name in cluster.workers()}


async def _suspicions(cluster: LocalCluster) -> tuple[float, float]:
    """Return the router's counts of false suspicions and hedges."""
    async with httpx.AsyncClient(trust_env=False) as http:
        figures = (await http.get(f"http://{cluster.members['router0'].ready['http']}/metrics")).text
    return _total(figures, "tandem_false_suspicions_total"), _total(figures, "tandem_hedges_total")


def _total(figures: str, name: str) -> float:
    """Add up a metric over all labels. `figures`: in Prometheus' text format."""
    return sum(float(line.split()[-1]) for line in figures.splitlines() if line.startswith((name + "{", name + " ")))


def _faults(cluster: LocalCluster) -> dict[str, int]:
    """Return the faults from the last such line of each decode worker."""
    total: Counter[str] = Counter()
    for name in ("decode0", "decode1"):
        last = [line for line in cluster.members[name].output if line.startswith("faults")][-1:]
        for word in " ".join(last).split()[1:]:
            fault, _, count = word.partition("=")
            total[fault] += int(count)
    return dict(total)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make soak")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--fault-rate", type=float, default=0.05, help="share of reads with a fault (default: 0.05)")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2)))
    parser.add_argument(
        "--busy-loops", type=int, default=0, metavar="N", help="number of processes that keep a core busy"
    )
    parser.add_argument("--write", action="store_true", help="store the result under benchmarks/results/")
    arguments = parser.parse_args()
    result = asyncio.run(main(arguments.minutes, arguments.fault_rate, arguments.seed, arguments.busy_loops))
    text = result.as_markdown()
    sys.stdout.write(text)
    if arguments.write:
        _RESULTS.mkdir(parents=True, exist_ok=True)
        (_RESULTS / "soak.md").write_text(text)
        (_RESULTS / "soak.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    sys.exit(0 if result.is_good else 1)
