"""A Ray cluster of several nodes on this machine, and a load of requests that counts lost ones.

The nodes are those of `ray.cluster_utils.Cluster`: each has its own raylet, and the workers of Tandem on a node descend
from it. Ray's head keeps its tables in the test's Redis, so it can be restarted.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from tandem.client import AsyncClient
from tandem.results import Result

_NODE_LOSS_S = 1.5  # until Ray's head counts a killed node as lost
_PREEMPTED = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
MAX_TOKENS = 48
TIMEOUT_S = 120.0


class RayNodes:
    """The nodes by number; 0 is the head."""

    def __init__(self, redis_url: str, name: str, resources: Sequence[dict[str, float]]) -> None:
        """`resources`: of each node, CPUs as "CPU"."""
        self._environment = {
            "RAY_REDIS_ADDRESS": redis_url.removeprefix("redis://").partition("/")[0],
            "RAY_external_storage_namespace": name,
        }
        self._resources = list(resources)
        os.environ.update(self._environment)
        try:
            self._cluster = Cluster()
            self.nodes: list[Any] = [self.add(number) for number in range(len(resources))]
        finally:
            for variable in self._environment:
                os.environ.pop(variable, None)

    @property
    def address(self) -> str:
        return str(self._cluster.gcs_address)

    def add(self, number: int) -> Any:
        """Start the node of this number, for the first time or again."""
        resources = dict(self._resources[number])
        options: dict[str, Any] = {"num_cpus": int(resources.pop("CPU")), "resources": resources}
        if number == 0:
            checks = {"health_check_initial_delay_ms": 0, "health_check_failure_threshold": 3}
            options["_system_config"] = {**checks, "health_check_period_ms": int(_NODE_LOSS_S * 1000 / 3)}
            options["include_dashboard"] = False
        return self._cluster.add_node(**options)

    def members(self, number: int) -> dict[str, int]:
        """Return the process ids of a node's workers by name."""
        raylet = self.nodes[number].all_processes["raylet"][0].process.pid
        named = ((pid, _member_id(pid)) for pid in _descendants(raylet))
        return {name: pid for pid, name in named if name}

    def node_of(self, member: str) -> int:
        return next(number for number in range(len(self.nodes)) if member in self.members(number))

    def kill(self, number: int) -> None:
        """Kill a node: its workers at once, then the processes of Ray."""
        for pid in self.members(number).values():
            os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(self.nodes[number], allow_graceful=False)

    def drain(self, number: int, within_s: float) -> None:
        """Announce the node's end, as a cloud does for a preempted machine."""
        client = GcsClient(address=self.address)
        deadline_ms = int((time.time() + within_s) * 1000)
        accepted, why_not = client.drain_node(self.nodes[number].node_id, _PREEMPTED, "", deadline_ms)
        assert accepted, why_not

    def stop_head(self) -> None:
        self.nodes[0].kill_gcs_server()

    def start_head(self) -> None:
        os.environ.update(self._environment)
        try:
            self.nodes[0].start_gcs_server()
        finally:
            for variable in self._environment:
                os.environ.pop(variable, None)

    def close(self) -> None:
        self._cluster.shutdown()  # type: ignore[no-untyped-call]


class Load:
    """Clients that send requests without pause until the load is closed. `lost` has the error of each failed
    request.
    """

    def __init__(self, client: AsyncClient, undisturbed: Sequence[tuple[int, ...]]) -> None:
        self._client = client
        self._undisturbed = list(undisturbed)
        self.lost: list[str] = []
        self.num_served = 0
        self._served = asyncio.Event()

    async def more(self, count: int) -> None:
        """Wait until `count` more requests have ended."""
        wanted = self.num_served + count
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_served < wanted:
                self._served.clear()
                await self._served.wait()

    async def ask(self, number: int) -> None:
        """Send request after request until cancelled."""
        while True:
            try:
                result = await generation(self._client, number)
            except Exception as error:  # noqa: BLE001 -- any error is a lost request
                self.lost.append(repr(error))
            else:
                if result.token_ids != self._undisturbed[number]:
                    self.lost.append(f"other tokens: {result.token_ids}")
            self.num_served += 1
            self._served.set()


async def generation(client: AsyncClient, number: int) -> Result:
    """Ask for greedy and for sampled tokens in turn."""
    return await client.generate(
        token_ids=range(30, 50 + number),
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        temperature=float(number % 2),
        seed=number,
        timeout_s=TIMEOUT_S,
    ).result()


@asynccontextmanager
async def load(address: str, num_clients: int) -> AsyncIterator[Load]:
    async with AsyncClient(address) as client:
        undisturbed = [(await generation(client, number)).token_ids for number in range(num_clients)]
        asked = Load(client, undisturbed)
        tasks = [asyncio.create_task(asked.ask(number)) for number in range(num_clients)]
        try:
            yield asked
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _member_id(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        return next((word.partition("=")[2] for word in words if word.startswith("--member-id=")), "")
    return ""


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _descendants(child)
