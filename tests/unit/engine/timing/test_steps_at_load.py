"""The steps that a worker times before its first request."""

from collections.abc import Iterator

import pytest

from cluster.service_times import attended_tokens
from engine.build import Engine
from engine.scheduling.step import StepPlan, StepResult
from engine.timing.service_time_fit import ServiceTimeFit
from engine.timing.steps_at_load import time_steps
from tests.unit.engine.rigs.tiny_engine import tiny_engine

_STEP_S, _TOKEN_S = 10.0, 2.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("model")) as engine:
        yield engine


class _TimedRunner:
    """Runs the engine's steps, and moves a clock by 10 s and by 2 s for each token."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.now_s = 0.0
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.now_s += _STEP_S + _TOKEN_S * sum(len(chunk.token_ids) for chunk in plan.chunks)
        return self._engine.runner.run(plan)


def test_the_steps_at_load_predict_other_steps_and_leave_the_pool_zeroed(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.timing.steps_at_load._MAX_SECONDS", 1e9)
    tiny.pool.tensor.zero_()
    runner = _TimedRunner(tiny)
    fit = ServiceTimeFit()
    fit.start(time_steps(tiny, runner, 4, lambda: runner.now_s))
    assert fit.times is not None
    assert fit.times.prefill_s(30) == pytest.approx(_STEP_S + 30 * _TOKEN_S, rel=0.01)
    assert fit.times.step_s(3, 300) == pytest.approx(_STEP_S + 3 * _TOKEN_S, rel=0.01)
    assert not tiny.pool.raw.any()
    assert max(len(plan.chunks) for plan in runner.plans) == 4
    assert all(chunk.end <= tiny.model_info.max_model_len for plan in runner.plans for chunk in plan.chunks)


def test_a_slow_model_is_measured_by_one_step_of_each_kind(tiny: Engine) -> None:
    runner = _TimedRunner(tiny)
    one, prompt = time_steps(tiny, runner, 4, lambda: runner.now_s)
    assert len(runner.plans) == 2
    assert (prompt.work.num_new, prompt.work.attended, prompt.seconds) == (16, attended_tokens(16, 0), 42.0)
    assert (one.work.batch, one.work.context, one.seconds) == (1, 16, 12.0)


def test_a_model_that_has_time_for_five_steps_is_predicted_with_short_and_long_contexts(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.timing.steps_at_load._MAX_SECONDS", 4 * _STEP_S + 34 * _TOKEN_S - 1)
    runner, fit = _TimedRunner(tiny), ServiceTimeFit()
    timed = time_steps(tiny, runner, 4, lambda: runner.now_s)
    fit.start(timed)
    assert fit.times is not None
    assert len(timed) == len(runner.plans) == 4
    assert fit.times.prefill_s(16, 64) == pytest.approx(_STEP_S + 16 * _TOKEN_S, rel=0.2)
    assert fit.times.step_s(1, 100) == pytest.approx(_STEP_S + _TOKEN_S, rel=0.2)
