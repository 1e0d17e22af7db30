"""Workers as actors of a Ray of one node: what cannot start is named, what serves drains, and nothing is left behind.

`test_ray_nodes.py` has three nodes under load.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from cli.local.child import ChildSpec
from cluster.auth.key_file import load_keys
from cluster.errors import ConfigError
from cluster.messages import Role
from tandem.client import AsyncClient
from tests.polling import until
from tests.system.rigs.members import member_relay
from tests.system.rigs.members.member_relay import fork_relay
from tests.system.rigs.processes.local_cluster import DEMO_MODEL, LocalCluster

pytest.importorskip("ray", reason="ray is not installed: it is the extra [ray]")

from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from deploy.ray.member_host import HostView
from deploy.ray.placement import NodeNeeds, connect, disconnect
from deploy.ray.workers import RayWorkers

Value = TypeVar("Value")


@pytest.fixture(scope="module")
def node() -> Iterator[Cluster]:
    """A Ray of one node, without the processes that these tests do not need: they cost a second of a core."""
    handler = signal.getsignal(signal.SIGTERM)  # Ray sets its own
    started = Cluster()
    started.add_node(num_cpus=1, include_dashboard=False, include_log_monitor=False, no_monitor=True)
    yield started
    started.shutdown()  # type: ignore[no-untyped-call]
    signal.signal(signal.SIGTERM, handler)


def _spec(name: str, key: Path, port: int = 0) -> ChildSpec:
    flags = ("--model=demo", f"--port={port}", f"--cluster-key-file={key}", "--redis=redis://127.0.0.1:1/0")
    return ChildSpec(name, (sys.executable, "-m", "decode_worker", *flags))


async def test_workers_that_cannot_start_on_ray_report_the_reason_and_leave_nothing(
    node: Cluster, cluster_name: str, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 64)
    key.chmod(0o600)
    placement = await asyncio.to_thread(connect, node.gcs_address, cluster_name)
    said: list[str] = []
    needs = {Role.PREFILL: NodeNeeds({"CPU": 1.0, "no such": 1.0}), Role.DECODE: NodeNeeds({"CPU": 0.1})}
    workers = RayWorkers(
        placement, needs=needs, arguments=(), num_threads=0, grace_s=5.0, keep_at_stop=False, say=said.append
    )
    try:
        workers.add(_spec("prefill-0", key))
        workers.add(_spec("decode-1", tmp_path / "missing"))
        workers.start([_spec("decode-0", key, port=70_000)])

        with pytest.raises(ConfigError, match="decode-0 ended with status 2; its settings were refused"):
            await workers.ready("decode-0")
        while not any("missing is not on node" in each for each in workers.problems()):
            await workers.changed()
        while "prefill-0 waits for a node of Ray with CPU:1,no such:1 free" not in said:
            await workers.changed()
        assert workers.staying() == {"prefill-0": False, "decode-0": False, "decode-1": False}

        await workers.stop(["prefill-0", "decode-0", "decode-1"], 5.0)
        assert workers.staying() == {} and workers.leaving() == []
        assert await asyncio.to_thread(placement.names) == []
    finally:
        await workers.close()
        await asyncio.to_thread(disconnect)


class _SilentHead:
    """A placement whose head announces draining nodes and answers nothing else."""

    def __init__(self) -> None:
        self.draining: dict[str, float] = {}

    def draining_nodes(self) -> dict[str, float]:
        return self.draining

    def __getattr__(self, name: str) -> Callable[..., None]:
        def refuse(*_: object) -> None:
            raise RayError(f"{name}: no answer")

        return refuse


async def test_a_worker_leaves_a_draining_node_for_a_successor_of_another_name() -> None:
    """The role of decode-1 has changed, so the follower replaces it by prefill-1."""
    head, said = _SilentHead(), list[str]()
    workers = RayWorkers(
        head,  # type: ignore[arg-type]
        needs={},
        arguments=(),
        num_threads=0,
        grace_s=5.0,
        keep_at_stop=True,
        say=said.append,
    )

    def runs(name: str, node: str) -> None:
        workers._begin(name, None)
        workers._kept[name].view = HostView(node, True, 1, {}, "", "")

    try:
        for name, node in (("prefill-0", "kept"), ("decode-0", "kept"), ("decode-1", "drained")):
            runs(name, node)
        head.draining["drained"] = 0.0  # without an end
        await until(lambda: _now(workers.leaving()), what="it counts as leaving")
        assert not workers._kept["decode-1"].is_retiring
        runs("prefill-1", "kept")
        await until(lambda: _now(workers._kept["decode-1"].is_retiring), what="it is drained")
    finally:
        await workers.close()


async def _now(value: Value) -> Value:
    return value


async def test_a_worker_on_ray_serves_a_request_and_drains(node: Cluster, redis_url: str, tmp_path: Path) -> None:
    cluster = LocalCluster(redis_url, tmp_path, flags=("--dtype", "float32", "--num-blocks", "128"))
    load_keys(cluster.key_file)  # creates it, as the first member of a cluster does
    placement = await asyncio.to_thread(connect, node.gcs_address, cluster.name)
    workers = RayWorkers(
        placement,
        needs={Role.DECODE: NodeNeeds()},
        arguments=(),
        num_threads=1,
        grace_s=5.0,
        keep_at_stop=False,
        say=lambda line: None,
    )
    flags = (*cluster.joining_flags(), f"--model={DEMO_MODEL}")
    try:
        async with fork_relay(tmp_path) as relay:
            program = (sys.executable, member_relay.__file__, relay, "decode_worker")
            workers.start([ChildSpec("decode-0", (*program, *flags))])
            await workers.ready("decode-0")
            await cluster.start(prefill=0, decode=0, router_flags=("--placement", "auto"))
            async with AsyncClient(cluster.members["router0"].grpc_address) as client:
                result = await client.generate("import os\n", max_tokens=4, ignore_eos=True).result()
            assert len(result.token_ids) == 4
            await workers.stop(["decode-0"], 30.0)
            assert not workers.staying() and not await asyncio.to_thread(placement.names)
    finally:
        await workers.close()
        await asyncio.to_thread(disconnect)
        await cluster.stop()
