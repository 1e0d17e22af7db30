"""Workers as actors of a Ray on this machine: what cannot start is named, and what ends leaves nothing behind.

`test_ray_nodes.py` has a cluster that serves.
"""

import asyncio
import sys
from pathlib import Path

import pytest

from cli.local.child import ChildSpec
from cluster.errors import ConfigError
from cluster.messages import Role

pytest.importorskip("ray", reason="ray is not installed: it is the extra [ray]")

from deploy.ray.placement import NodeNeeds, connect, disconnect
from deploy.ray.workers import RayWorkers

pytestmark = pytest.mark.slow


def _spec(name: str, key: Path, port: int = 0) -> ChildSpec:
    flags = ("--model=demo", f"--port={port}", f"--cluster-key-file={key}", "--redis=redis://127.0.0.1:1/0")
    return ChildSpec(name, (sys.executable, "-m", "decode_worker", *flags))


async def test_workers_that_cannot_start_on_ray_report_the_reason_and_leave_nothing(
    cluster_name: str, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 64)
    key.chmod(0o600)
    placement = await asyncio.to_thread(connect, "local", cluster_name)
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
