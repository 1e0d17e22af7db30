"""A test that is killed while it runs a cluster; test_killed_run.py starts it, and no other run collects it."""

import asyncio
import os
import sys
from pathlib import Path

from cluster.registry.redis_server import RedisServer
from tests.system.rigs.processes.fork_server import ForkServer
from tests.system.rigs.processes.local_cluster import LocalCluster, executed

_CHILD = "import subprocess, sys; print(subprocess.Popen(('sleep', '600')).pid, flush=True); sys.stdin.read()"


async def test_that_waits_forever(tmp_path: Path) -> None:
    redis = await RedisServer.start()
    cluster = LocalCluster(redis.url, tmp_path, launch=executed)
    members = [(await cluster.spawn(name, f"{name}_worker")).process.pid for name in ("prefill", "decode")]
    pause = "import signal; signal.pause()"
    members.append(
        (await ForkServer(("signal",)).spawn("tests.system.rigs.processes.forked_program", (pause,), os.environ)).pid
    )
    # It asks the kernel for nothing at its parent's end, and neither does its own child.
    plain = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHILD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert plain.stdout is not None
    grandchild = int(await plain.stdout.readline())
    started = [os.getpid(), redis.pid, *members, plain.pid, grandchild]
    Path(os.environ["STARTED_PIPE"]).write_text(" ".join(map(str, started)))
    await asyncio.Event().wait()
