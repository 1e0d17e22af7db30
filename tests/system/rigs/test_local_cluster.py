"""The cluster under test itself: nothing of it outlives its test."""

import os
import subprocess
import sys
from pathlib import Path

from tests.input import readable

DEADLINE_S = 20.0
ROOT = Path(__file__).parents[3]

_PROGRAM = """
import asyncio, sys
from functools import partial
from pathlib import Path
from tests.system.rigs.processes.local_cluster import LocalCluster, executed

async def main():
    cluster = LocalCluster("redis://127.0.0.1:1", Path("."))
    member = await cluster.spawn("p0", "nothing", launch=partial(executed, wrapper=("sh", "-c", "exec sleep 600")))
    print(member.process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_test_leaves_no_member_running() -> None:
    """The test is killed as pytest's own timeout or an impatient user kills it."""
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        member = os.pidfd_open(int(process.stdout.readline()))
        try:
            process.kill()
            assert readable([member], DEADLINE_S), "it still runs"
        finally:
            os.close(member)
