"""The placement benchmark with real processes: its load generator, and the whole command on one small point."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.placement.arms import Served, alone, vllm_arm
from benchmarks.placement.figures.log import read_log
from benchmarks.placement.figures.verdict import COLOCATED, SEPARATE
from benchmarks.placement.generator import Job
from benchmarks.placement.measure import run_generator
from cli.load import Arrival
from cli.verbs.clusters.up import DEMO_MODEL

ROOT = Path(__file__).parents[3]
VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")


async def answer_in_lines(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as vllm_server.py does: two tokens at first, then single ones; a prompt of 3 tokens fails."""
    request = json.loads(await reader.readline())
    counts = [2] + [1] * (request["max_tokens"] - 2)
    lines = ["EngineDeadError"] if len(request["token_ids"]) == 3 else [str(count) for count in counts]
    for line in lines:
        writer.write(f"{line}\n".encode())
        await writer.drain()
    writer.close()


async def test_the_load_generator_counts_every_token_and_names_the_error_of_a_failed_request() -> None:
    server = await asyncio.start_server(answer_in_lines, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    arrivals = (Arrival(0.1, 8, 5), Arrival(0.0, 3, 5), Arrival(0.2, 16, 2))
    async with server:
        jobs = [Job("vllm", f"{host}:{port}", 100, 1, pace, arrivals) for pace in ("planned", "one_by_one")]
        planned, one_by_one = [await run_generator(job) for job in jobs]
    for generated in (planned, one_by_one):
        assert [len(record.token_times_s) for record in generated.records] == [5, 0, 2]
        assert [record.error for record in generated.records] == ["", "EngineDeadError", ""]
        assert all(time_s >= record.scheduled_s for record in generated.records for time_s in record.token_times_s)
        assert generated.took_s > 0 and generated.cpu_s > 0
    assert [record.scheduled_s for record in planned.records] == [0.1, 0.0, 0.2]
    assert [record.scheduled_s for record in one_by_one.records] == [0.0] * 3


async def test_a_server_that_is_gone_fails_the_requests_and_not_the_load_generator() -> None:
    server = await asyncio.start_server(answer_in_lines, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()
    generated = await run_generator(Job("vllm", f"{host}:{port}", 100, 1, "planned", (Arrival(0.0, 8, 5),)))
    assert [record.error for record in generated.records] == ["unavailable"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_measures_a_point_on_both_static_arms_and_a_restarted_one_has_nothing_left(tmp_path: Path) -> None:
    first = bench(tmp_path)
    assert "0 of 1 points are done" in first and "==> 1+1, colocated x 2 are ready" in first
    calibrations, (point,) = read_log((tmp_path / "placement.jsonl").read_text().splitlines())
    assert len(calibrations) == 1 and set(calibrations[0].capacity_rps) == {SEPARATE, COLOCATED}
    for arm in (point.arms[SEPARATE], point.arms[COLOCATED]):
        assert len(arm.samples) == point.num_requests and not arm.errors
    page = (tmp_path / "placement.md").read_text()
    assert "1 of 1 points are measured." in page and "**vLLM was skipped**: VLLM_PYTHON is not set." in page

    second = bench(tmp_path)
    assert "1 of 1 points are done" in second and "are ready" not in second
    assert (tmp_path / "placement.md").read_text() == page


def bench(folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PYTHON"}
    command = (sys.executable, "-m", "benchmarks.placement", "--quick", "--output", str(folder))
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not VLLM_PYTHON, reason="needs vLLM: set VLLM_PYTHON to its environment's Python")
async def test_vllm_answers_the_load_generator() -> None:
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    async with vllm_arm(Served(DEMO_MODEL, vocab_size, 64, ()), VLLM_PYTHON) as arm:
        arrivals = tuple(Arrival(0.0, 16, 8) for _ in range(3))
        with alone(arm, [arm]):
            generated = await run_generator(Job(arm.protocol, arm.address, vocab_size, 1, "planned", arrivals))
    assert [len(record.token_times_s) for record in generated.records] == [8, 8, 8]
