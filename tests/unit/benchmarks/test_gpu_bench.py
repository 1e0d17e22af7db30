"""The GPU's benchmark runs in small without a GPU; its limits are the arithmetic of the model."""

from collections.abc import Callable

import pytest

from benchmarks.gpu.engine import _arguments, run, table
from benchmarks.gpu.shapes import TINY_LOADS, Work, llama_8b
from benchmarks.gpu.step_loop import Decodes, step_times_s
from engine.build import Engine
from engine.scheduling.step import StepPlan, StepResult
from engine.steps.runner import StartedStep
from tests.unit.engine.cuda.test_pretend_gpu import build, gpu, on_cpu
from tests.unit.engine.rigs.pretend_gpu import PretendGpu

__all__ = ["build", "gpu", "on_cpu"]


def test_the_gpu_benchmark_runs_with_a_small_model() -> None:
    result = run(_arguments(["--tiny", "--device", "cpu", "--block-size", "8"]), TINY_LOADS)

    loops = ["decode", "decode, worker's loop", "decode, worker's loop, nothing ahead"]
    assert [(row["what"], row["size"]) for row in result["rows"]] == [
        ("prefill", 16),
        ("prefill", 40),
        *((what, size) for size in (1, 5) for what in loops),
    ]
    assert all(row["tokens_per_s"] > 0 and row["limit_share"] > 0 for row in result["rows"])
    assert {len(row["samples_s"]) for row in result["rows"][2:]} == {TINY_LOADS.steps}
    assert "| decode | 5 |" in table(result)


def test_the_limits_match_the_arithmetic_of_an_8b_llama() -> None:
    work = Work.of(llama_8b())

    assert work.layer_params + work.head_params == pytest.approx(7.5e9, rel=0.01)  # without the embedding's 0.5e9
    assert work.kv_bytes_per_token == 128 << 10
    assert work.decode_bytes(256, 2_048) == pytest.approx(15.0e9 + 256 * 2_048 * 131_072, rel=0.01)


@pytest.mark.parametrize("ahead", [True, False])
def test_steps_of_a_workers_loop_are_fed_only_when_planned_ahead(
    ahead: bool, gpu: PretendGpu, build: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(cuda_graphs="off")
    start, finish, plans = engine.runner.start, engine.runner.finish, list[StepPlan]()

    def started(plan: StepPlan) -> StartedStep:
        plans.append(plan)
        with gpu:  # a mode is its own thread's, and the loop has one
            return start(plan)

    def finished(step: StartedStep) -> StepResult:
        with gpu:
            return finish(step)

    monkeypatch.setattr(engine.runner, "start", started)
    monkeypatch.setattr(engine.runner, "finish", finished)
    times_s = step_times_s(engine.runner, Decodes(2, 9, 3, 12, engine.pool.layout.block_size), ahead=ahead)

    assert len(times_s) == 3 and min(times_s) > 0
    assert any(chunk.fed_by is not None for plan in plans for chunk in plan.chunks) is ahead
    assert all(len(plan.chunks) == 2 for plan in plans)
