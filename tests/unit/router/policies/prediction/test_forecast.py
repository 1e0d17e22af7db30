"""Forecasts of a worker's next steps agree with the steps that the real scheduler plans, in simulated time."""

from functools import cache
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement.simulation import Served, Setting, Simulation
from benchmarks.placement.workload import Workload, poisson_arrivals
from cluster.outstanding_work import PromptWork
from cluster.service_times import DecodeTimes, HandOffTimes, MixedTimes, PrefillTimes, ServiceTimes, StepLimit
from router.policies.placement import PrefixAware
from router.policies.prediction.forecast import Forecast
from router.policies.prediction.work_ahead import PromptQueue, SequenceBatch, WorkAhead
from tests.examples import num_examples

TIMES = ServiceTimes(
    PrefillTimes(0.004, 0.0005, 2.4e-7, 0.0),
    DecodeTimes(0.008, 0.0007, 1.2e-6, 0.0),
    MixedTimes(1.03, 0.0),
    HandOffTimes(0.006, 0.0),
)
SETTING = Setting(TIMES, kv_bytes_per_token=23040.0, link_bytes_per_s=1e9)
PAIR, COLOCATED = ((0,), (1,)), ((), (0, 1))


@cache  # two tests examine the same run: one its first tokens, one the tokens after them
def served(arm: tuple[tuple[int, ...], tuple[int, ...]], workload: Workload, rate_rps: float) -> list[Served]:
    arrivals = poisson_arrivals(workload, rate_rps, 150, Random(f"{workload} {rate_rps}"))
    return Simulation(PrefixAware(), [SETTING, SETTING], *arm).run(arrivals)


def errors(found: list[Served], field: str) -> list[float]:
    """Return the relative errors of what the service times alone predict, in order."""
    pairs = [(getattr(one.prediction, f"modelled_{field}"), getattr(one, field)) for one in found]
    return sorted(abs(modelled - real) / real for modelled, real in pairs)


@pytest.mark.parametrize(
    ("arm", "workload", "rate_rps"),
    [
        (PAIR, Workload(512, 64), 0.8),
        (PAIR, Workload(512, 64), 3.0),
        (PAIR, Workload(64, 16), 10.0),
        (PAIR, Workload(2048, 16), 0.5),
        (COLOCATED, Workload(512, 64), 0.8),
        (COLOCATED, Workload(512, 64), 1.6),
        pytest.param(COLOCATED, Workload(2048, 128), 0.5, marks=pytest.mark.slow),
    ],
)
def test_the_first_token_comes_when_it_was_forecast(
    arm: tuple[tuple[int, ...], tuple[int, ...]], workload: Workload, rate_rps: float
) -> None:
    found = errors(served(arm, workload, rate_rps), "ttft_s")
    assert median(found) <= 0.02
    assert found[int(0.9 * len(found))] <= 0.12


@pytest.mark.parametrize(("workload", "rate_rps"), [(Workload(512, 64), 0.8), (Workload(512, 64), 3.0)])
def test_tokens_of_a_worker_that_only_decodes_come_as_fast_as_forecast(workload: Workload, rate_rps: float) -> None:
    found = errors(served(PAIR, workload, rate_rps), "itl_s")
    assert median(found) <= 0.1


def ahead(num_tokens: int, number: int = 1, elapsed_s: float = 0.0) -> PromptQueue:
    one = PromptWork.of(num_tokens, 0)
    return PromptQueue(one.times(number), one, elapsed_s)


def computed_s(work: WorkAhead, num_tokens: int = 512) -> float:
    forecast = Forecast(work)
    forecast.compute(PromptWork.of(num_tokens, 0))
    return forecast.now_s


def test_a_prompt_is_computed_chunk_by_chunk_after_those_ahead_of_it() -> None:
    alone_s = TIMES.prompt_s(1200, 0.0, 512)
    assert computed_s(WorkAhead(TIMES), 1200) == pytest.approx(alone_s, rel=0.01)
    assert computed_s(WorkAhead(TIMES, ahead(512, 3)), 1200) == pytest.approx(
        alone_s + 3 * TIMES.prompt_s(512, 0.0, 512), rel=0.03
    )


def test_the_step_that_runs_now_ends_before_anything_else_begins() -> None:
    step_s = TIMES.prompt_s(512, 0.0, 512)
    work = WorkAhead(TIMES, ahead(512, elapsed_s=0.9 * step_s))
    assert computed_s(work) == pytest.approx(1.1 * step_s, rel=0.01)


def test_a_sequence_whose_prompt_is_ahead_runs_beside_the_next_prompt() -> None:
    exported = WorkAhead(TIMES, ahead(512), step_limit=StepLimit())
    local = WorkAhead(TIMES, ahead(512), SequenceBatch(num_joining=1, context=512, left=64.0), step_limit=StepLimit())
    assert computed_s(local) > 1.3 * computed_s(exported)


def test_sequences_that_end_leave_the_prompt_more_time() -> None:
    soon, later = (
        WorkAhead(TIMES, batch=SequenceBatch(2, 0, 1024, left), step_limit=StepLimit()) for left in (3.0, 300.0)
    )
    assert computed_s(soon) < 0.7 * computed_s(later)


def test_prompts_may_use_what_the_target_of_a_step_leaves() -> None:
    tight, wide = (
        WorkAhead(TIMES, batch=SequenceBatch(4, 0, 2048, 300.0), step_limit=StepLimit(target_s))
        for target_s in (0.012, 0.08)
    )
    assert computed_s(wide) < 0.7 * computed_s(tight)


def test_imports_join_one_after_the_other_until_the_time_given() -> None:
    forecast = Forecast(WorkAhead(TIMES, batch=SequenceBatch(num_joining=3, context=1500, left=1000.0)))
    forecast.join_imports_until(1.0)
    counts = []
    for until_s in (0.2, 0.45, 0.7, 0.95):
        forecast.wait(until_s)
        counts.append(forecast.num_running)
    assert counts == [0, 1, 2, 3]


_seconds = st.one_of(st.just(0.0), st.floats(0.0, 1e9))
_tokens = st.one_of(st.integers(0, 5000), st.integers(0, (1 << 64) - 1))
_counts = st.one_of(st.integers(0, 300), st.integers(0, 1 << 31))


@settings(deadline=None, max_examples=num_examples(suite=50, search=150))
@given(
    prefill=st.tuples(_seconds, _seconds, _seconds),
    decode=st.tuples(_seconds, _seconds, _seconds),
    queue=st.tuples(_tokens, st.floats(0.0, 1e18), _tokens, _seconds),
    batch=st.tuples(_counts, _counts, _tokens, st.floats(0.0, 1e18)),
    target_s=_seconds,
    max_running=st.integers(1, (1 << 31) - 1),
    after_s=st.floats(0.0, 30.0),
)
def test_a_forecast_ends_whatever_a_worker_has_reported(
    prefill: tuple[float, float, float],
    decode: tuple[float, float, float],
    queue: tuple[int, float, int, float],
    batch: tuple[int, int, int, float],
    target_s: float,
    max_running: int,
    after_s: float,
) -> None:
    """A router forecasts on its event loop, from numbers that other processes send. All are within the bounds of
    cluster/protocol/message_rules.py, service times of 0 included."""
    times = ServiceTimes(PrefillTimes(*prefill, 0.0), DecodeTimes(*decode, 0.0))
    num_tokens, attended, first, elapsed_s = queue
    prompts = PromptQueue(PromptWork(num_tokens, attended), PromptWork(min(first, num_tokens), 0.0), elapsed_s)
    forecast = Forecast(
        WorkAhead(times, prompts, SequenceBatch(*batch), max_running=max_running, step_limit=StepLimit(target_s))
    )
    forecast.join_imports_until(after_s)
    forecast.wait(after_s)
    forecast.compute(PromptWork.of(400, 0))
    forecast.decode(2, 400.0, 20.0)
    assert forecast.now_s >= after_s
    assert forecast.own_s > 0
