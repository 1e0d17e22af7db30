"""`python -m benchmarks.request_modules`: count the modules of Tandem that one plain request executes.

A router, a prefill worker and a decode worker run the demo model. After a warm-up request every process records which
functions it calls, first for a while without any request, then for each of several requests over gRPC whose KV moves by
shared memory; nothing fails and no prefix is found. A module counts if every request called a function of it that the
idle cluster did not call: what happens to coincide with one request does not count. Generated stubs do not count.
`--list` prints the modules.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.process import die_with_parent
from cluster.registry.redis_server import RedisServer
from tandem.client import AsyncClient

_ROOT = Path(__file__).parents[2]
_MODEL = _ROOT / "examples" / "demo_model"
_IDLE_S = 5.0  # long enough for heartbeats, registrations and health checks to have come several times
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 30.0
_PROMPTS = (range(300, 500), range(500, 300, -1), range(400, 200, -1))  # without a common prefix
_NOT_COUNTED = ("tandem/v1/", "tandem/internal/v1/", "benchmarks/", ".venv/")


@dataclass(frozen=True, slots=True)
class Count:
    """Paths relative to the repository, over all processes."""

    modules: tuple[str, ...]

    @property
    def num_lines(self) -> int:
        return sum(len((_ROOT / module).read_text().splitlines()) for module in self.modules)


class RecordedCluster:
    """One router and one worker of each role, each in a process that records its calls. Use it as a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[asyncio.subprocess.Process] = []
        self._redis: RedisServer | None = None
        self._num_records = 0
        self.address = ""

    async def __aenter__(self) -> "RecordedCluster":
        self._redis = await RedisServer.start()
        for role, flags in (("prefill_worker", ()), ("decode_worker", ()), ("router", ("--port=0", "--grpc-port=0"))):
            self.address = await self._start(role, self._redis.url, flags)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
            await asyncio.wait_for(process.communicate(), _END_TIMEOUT_S)
        if self._redis is not None:
            await self._redis.stop()

    async def ask(self, token_ids: Sequence[int]) -> None:
        async with AsyncClient(self.address) as client:
            await client.generate(token_ids=tuple(token_ids), max_tokens=16, temperature=0.0).result()

    async def calls(self) -> set[tuple[str, str]]:
        """Return (module, function) of every call in any process since the previous call of this method."""
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)
        paths = [self._directory / f"{process.pid}.{self._num_records}.json" for process in self._processes]
        self._num_records += 1
        await asyncio.gather(*(_until_line(process, "recorded", _END_TIMEOUT_S) for process in self._processes))
        called = (call for path in paths for call in json.loads(path.read_text()))
        return {(str(Path(file).relative_to(_ROOT)), function) for file, function in called}

    async def _start(self, role: str, redis_url: str, flags: Sequence[str]) -> str:
        """Return the address of its gRPC port."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.request_modules.recorded_process", str(self._directory), role),
            *("--redis", redis_url),
            *("--cluster-key-file", str(self._directory / "key"), "--model", str(_MODEL), *flags),
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        self._processes.append(process)
        line = await _until_line(process, "ready", _START_TIMEOUT_S)
        return dict(word.split("=", 1) for word in line.split()[1:])["grpc"]


async def count() -> Count:
    with tempfile.TemporaryDirectory() as directory:
        async with RecordedCluster(Path(directory)) as cluster:
            await cluster.ask(range(2, 200))
            await cluster.calls()
            await asyncio.sleep(_IDLE_S)
            idle = await cluster.calls()
            requested = [await _calls_of(cluster, prompt) for prompt in _PROMPTS]
    modules = {module for module, _ in set.intersection(*requested) - idle if not module.startswith(_NOT_COUNTED)}
    return Count(tuple(sorted(modules)))


async def _calls_of(cluster: RecordedCluster, token_ids: Sequence[int]) -> set[tuple[str, str]]:
    await cluster.ask(token_ids)
    return await cluster.calls()


async def _until_line(process: asyncio.subprocess.Process, first_word: str, timeout_s: float) -> str:
    """Return the next line that begins with this. Raises TimeoutError, or RuntimeError if the process ends."""
    assert process.stdout is not None
    async with asyncio.timeout(timeout_s):
        while line := (await process.stdout.readline()).decode():
            if line.startswith(first_word):
                return line
        raise RuntimeError(f"a process ended with status {await process.wait()} before it printed {first_word}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.request_modules", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the modules too")
    arguments = parser.parse_args()
    counted = asyncio.run(count())
    if arguments.list:
        print(*counted.modules, sep="\n")
    print(f"{len(counted.modules)} modules, {counted.num_lines} lines")


if __name__ == "__main__":
    main()
