"""Each example of a client runs as its text says, against a real cluster."""

import asyncio
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "clients"
PRINTS = {
    "batch.py": r"3 asked: 3 ok, 0 failed; [^\n]+\nrequest-0 .+\nrequest-1 .+\nrequest-2 .+\n",
    "chat.py": r".+\n.*",
    "structured_output.py": r".+: \d+\n\d{4}-\d\d-\d\d\n(yes|no)\n",
    "tools.py": r'weather\(\{\s*"city"\s*:\s*"(Paris|Rome)"\s*\}\) is (rain|sun)\n.*',
}
RESUME = "resume.py"
ROUTER_FLAGS = ("--tool-call-parser", "hermes")  # the same of all routers, or none resumes another's request


async def test_every_example_prints_its_promised_output(redis_url: str, tmp_path: Path) -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PRINTS, RESUME}
    cluster = LocalCluster(redis_url, tmp_path, flags=("--dtype", "float32", "--num-blocks", "256"))
    try:
        await cluster.start(prefill=1, decode=1, router_flags=ROUTER_FLAGS)
        ready = cluster.members["router0"].ready
        for name, prints in PRINTS.items():
            address = ready["http"].removeprefix("http://") if name == "batch.py" else ready["grpc"]
            output = await output_of(sys.executable, str(EXAMPLES / name), address)
            assert re.fullmatch(prints, output, re.DOTALL), output
        await resume_after_the_death_of_a_router(cluster)
    finally:
        await cluster.stop()


async def resume_after_the_death_of_a_router(cluster: LocalCluster) -> None:
    """The first router delivers two tokens of its first request and holds the others; the example prints them all."""
    staying = cluster.members["router0"].grpc_address
    whole = await output_of(sys.executable, str(EXAMPLES / RESUME), staying)
    assert whole.endswith("\n---\nserved by one router\n"), whole
    flags = ("--port", "0", "--grpc-port", "0", *ROUTER_FLAGS)
    first = await cluster.start_member("first", "tests.faults.holding_router", flags)
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLES / RESUME), f"{first.grpc_address},{staying}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert running.stdout is not None
    began = await running.stdout.read(1)
    first.send_signal(signal.SIGKILL)
    output = (began + await running.stdout.read()).decode()
    assert await running.wait() == 0, output
    assert output == whole.replace("served by one router", "resumed at another router")


async def test_the_example_for_node_generates_and_reads_a_refusal(redis_url: str, tmp_path: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no node or no npm on this machine")
    example = tmp_path / "examples" / "clients" / "node"
    shutil.copytree(EXAMPLES / "node", example, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    try:
        await output_of(npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(example))
    except AssertionError as error:
        pytest.skip(f"npm cannot install the packages of gRPC: {str(error)[:200]}")
    cluster = LocalCluster(redis_url, tmp_path, flags=("--dtype", "float32", "--num-blocks", "256"))
    try:
        await cluster.start(prefill=1, decode=1)
        output = await output_of(node, str(example / "generate.js"), cluster.members["router0"].grpc_address)
    finally:
        await cluster.stop()
    assert re.fullmatch(r".+\n24 tokens\n+INVALID_ARGUMENT: invalid_request\n", output, re.DOTALL), output


async def output_of(*command: str) -> str:
    running = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await running.communicate()
    assert running.returncode == 0, output.decode()
    return output.decode()
