"""Each example of a client runs as its text says, against a real cluster."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.system.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "clients"
PRINTS = {
    "chat.py": r".+\n.*",
    "structured_output.py": r".+: \d+\n\d{4}-\d\d-\d\d\n(yes|no)\n",
    "tools.py": r'weather\(\{\s*"city"\s*:\s*"(Paris|Rome)"\s*\}\) is (rain|sun)\n.*',
}


async def test_every_example_prints_what_it_promises(redis_url: str, tmp_path: Path) -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTS)
    cluster = LocalCluster(redis_url, tmp_path, flags=("--dtype", "float32", "--num-blocks", "256"))
    try:
        await cluster.start(prefill=1, decode=1, router_flags=("--tool-call-parser", "hermes"))
        for name, prints in PRINTS.items():
            running = await asyncio.create_subprocess_exec(
                *(sys.executable, str(EXAMPLES / name), cluster.members["router0"].ready["grpc"]),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await running.communicate()
            assert running.returncode == 0, output.decode()
            assert re.fullmatch(prints, output.decode(), re.DOTALL), output.decode()
    finally:
        await cluster.stop()
