"""The engine's benchmark: rates and ratios follow from its samples, and its limits from arithmetic."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine import observed, steps
from benchmarks.engine.limits import Limits, Rates, roofline
from benchmarks.engine.parties import alone
from benchmarks.engine.shapes import MODELS, Load, ModelShape
from benchmarks.engine.table import Row, Sample, rates_table, steps_table

_LOAD = Load(sequences=4, tokens_in=100, tokens_out=11)


def test_rates_are_medians_of_samples_and_shares_of_limit_peer_and_goal() -> None:
    samples = {
        "tandem": [Sample(0.5, 2.5), Sample(0.4, 1.4), Sample(0.4, 9.0)],  # steps of 0.2, 0.1 and 0.86 s
        "vllm": [Sample(0.8, 2.8)],
    }
    parts = {"pack": 0.01, "forward": 0.1, "draw": 0.02, "runner": 0.02, "plan": 0.01}
    row = Row("tiny", _LOAD, Limits(prefill_s=0.2, step_s=0.05, products_s=0.04), samples, parts)
    assert cells(rates_table([row], "prefill")) == ["tiny", "4 x 100/11", "1000", "2000", "0.50", "500", "2.00", "1.82"]
    assert cells(rates_table([row], "decode")) == ["tiny", "4 x 100/11", "20", "80", "0.25", "20", "1.00", "0.50"]
    shares = ["200.00", "100.00", "10.00", "20.00", "30.00", "40.00", "50.00", "40.00"]
    assert cells(steps_table([row])) == ["tiny", "4 x 100/11", *shares]
    assert json.loads(json.dumps(row.as_json()))["samples"]["vllm"] == [{"first_s": 0.8, "all_s": 2.8}]


def test_without_a_peer_the_goal_is_the_limits_share() -> None:
    row = Row("tiny", _LOAD, Limits(0.2, 0.05, 0.04), {"tandem": [Sample(0.4, 2.4)]})
    assert row.prefill_goal == pytest.approx(0.9 * 2000)
    assert row.decode_goal == pytest.approx(0.8 * 80)


def test_a_step_is_bound_by_reading_when_few_run_and_by_arithmetic_when_many_do() -> None:
    model, rates = MODELS[0], Rates(flops_per_s=400e9, bytes_per_s=30e9)
    weight_bytes = 2 * (model.layers * model.layer_params + model.vocab * model.hidden)
    _, one_s = roofline(model, Load(1, 256, 64), rates)
    assert one_s == pytest.approx((weight_bytes + 288 * model.kv_bytes_per_token) / 30e9)
    prefill_s, many_s = roofline(model, Load(256, 16, 2), rates)
    assert many_s > weight_bytes / 30e9
    assert prefill_s > 2 * model.layers * model.layer_params * 256 * 16 / 400e9


async def test_the_parts_of_the_step_thread_add_up_to_its_time(tmp_path: Path) -> None:
    shape = ModelShape("tiny", "llama", 64, 128, 2, 4, 2, 256)
    engine = steps.build(str(shape.save(tmp_path / "tiny")), kv_cache_memory="1MiB", max_model_len=128)
    began_s = time.process_time()

    measured = await steps.measure(engine, Load(3, 16, 8), num_steps=5)

    assert len(measured) == 5
    assert all(seconds > 0 for step in measured for seconds in step.values())
    assert sum(sum(step.values()) for step in measured) < time.process_time() - began_s
    assert all(0 < steps.share(step) < 1 for step in measured)
    assert steps.medians(measured)["forward"] == sorted(step["forward"] for step in measured)[2]
    (step_s, *_), (more, *_) = await observed.measure(engine, Load(3, 16, 8), num_runs=6)
    assert 0 < step_s < time.process_time() - began_s and more > -1
    engine.pool.close()


def test_waiting_parties_of_the_benchmark_are_stopped() -> None:
    with spinning() as waiting, spinning() as running:
        parties = [Standing(waiting.pid), Standing(running.pid)]
        with alone(parties[1], parties):
            assert eventually_state(waiting.pid, "T")
            assert state(running.pid) != "T"
        assert eventually_state(waiting.pid, "R")


class Standing:
    """A benchmark party of one process."""

    name = version = flags = ""
    most_sequences = 1

    def __init__(self, pid: int) -> None:
        self.stoppable = [pid]

    async def run(self, load: Load) -> Sample:
        raise NotImplementedError

    async def first_token(self, load: Load) -> None:
        raise NotImplementedError


@contextmanager
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen((sys.executable, "-c", "while True: pass"))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def eventually_state(pid: int, wanted: str) -> bool:
    """Wait for the process state, because signals take effect when the process is next scheduled."""
    deadline_s = time.monotonic() + 10.0
    while state(pid) != wanted and time.monotonic() < deadline_s:
        os.sched_yield()
    return state(pid) == wanted


def cells(table: list[str]) -> list[str]:
    """Return the cells of the table's last line."""
    return [cell.strip() for cell in table[-1].strip("|").split("|")]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_arithmetic_counts_the_parameters_of_the_model(model: ModelShape, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model.save(tmp_path / model.name))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    matrices = sum(p.numel() for name, p in built.named_parameters() if p.ndim == 2 and "embed" not in name)
    assert matrices == model.layers * model.layer_params
    assert built.lm_head.weight.shape == (model.vocab, model.hidden)
