"""Tests of a worker's reports about its own speed: predictions from them, and their conversion to and from the wire."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import MalformedMessage
from cluster.protocol.received import checked
from cluster.protocol.report_wire import service_times_of, service_times_to_wire
from cluster.service_times import (
    DecodeTimes,
    HandOffTimes,
    MixedTimes,
    PrefillTimes,
    ServiceTimes,
    StepLimit,
    StepWork,
    TimedStep,
    attended_tokens,
)
from tandem.internal.v1 import worker_pb2

TIMES = ServiceTimes(
    PrefillTimes(step_s=0.010, per_token_s=0.001, per_token_context_s=1e-6, relative_error=0.1),
    DecodeTimes(step_s=0.008, per_sequence_s=0.0005, per_context_token_s=1e-6, relative_error=0.05),
)
_COEFFICIENT = st.floats(0.0, 1.0)


def mixed_step_s(times: ServiceTimes, num_new: int, prompt_context: float, batch: int, context: int) -> float:
    """Predict a step that computes one chunk of a prompt beside sequences that decode."""
    attended = attended_tokens(num_new, prompt_context)
    return times.seconds(StepWork(num_new=num_new, attended=attended, batch=batch, context=context))


@st.composite
def _models(draw: st.DrawFn) -> ServiceTimes:
    prefill, decode = (draw(st.tuples(_COEFFICIENT, _COEFFICIENT, _COEFFICIENT)) for _ in range(2))
    mixed = draw(st.none() | st.builds(MixedTimes, st.floats(0.1, 10.0), st.just(0.0)))
    return ServiceTimes(PrefillTimes(*prefill, 0.0), DecodeTimes(*decode, 0.0), mixed)


def test_every_new_token_attends_to_all_tokens_before_it_and_to_itself() -> None:
    assert attended_tokens(3, 10) == 11 + 12 + 13
    assert attended_tokens(0, 10) == 0


def test_predictions_follow_the_stated_formulas() -> None:
    assert TIMES.prefill_s(3, 10) == pytest.approx(0.010 + 0.003 + 36e-6)
    assert TIMES.step_s(4, 1000) == pytest.approx(0.008 + 0.002 + 0.001)
    assert mixed_step_s(TIMES, 3, 10, 4, 1000) == pytest.approx(0.010 + 0.003 + 36e-6 + 0.002 + 0.001)
    slower = replace(TIMES, mixed=MixedTimes(factor=2.0, relative_error=0.0))
    assert mixed_step_s(slower, 3, 10, 4, 1000) == pytest.approx(2 * mixed_step_s(TIMES, 3, 10, 4, 1000))
    assert TIMES.seconds(StepWork()) == 0.0


def test_a_mixed_step_takes_at_least_as_long_as_each_part_alone() -> None:
    quicker = replace(TIMES, mixed=MixedTimes(factor=0.01, relative_error=0.0))
    assert mixed_step_s(quicker, 300, 10, 4, 1000) == TIMES.prefill_s(300, 10)


def test_the_chunks_of_a_prompt_add_up_to_the_prompt() -> None:
    chunks = [(512, 100), (512, 612), (6, 1124)]
    assert TIMES.prompt_s(1030, 100, 512) == pytest.approx(sum(TIMES.prefill_s(*chunk) for chunk in chunks))
    assert TIMES.prompt_s(512, 0, 512) == pytest.approx(TIMES.prefill_s(512))


_COUNT = st.integers(0, 5_000)


@given(_models(), _COUNT, _COUNT, _COUNT, _COUNT, st.sampled_from(["num_new", "attended", "batch", "context"]), _COUNT)
def test_more_work_is_never_predicted_to_take_less_time(
    times: ServiceTimes, num_new: int, attended: int, batch: int, context: int, more: str, by: int
) -> None:
    work = StepWork(num_new, attended, batch, context)
    larger = replace(work, **{more: getattr(work, more) + by})
    assert 0.0 <= times.seconds(work) <= times.seconds(larger) * (1 + 1e-12)


@given(_models(), _COUNT, st.floats(0, 1e5), st.integers(1, 4096))
def test_the_tokens_within_a_time_are_the_most_that_fit(
    times: ServiceTimes, context: int, seconds: float, most: int
) -> None:
    prefill = times.prefill
    found = prefill.tokens_within(seconds, context, most)
    assert 0 <= found <= most
    assert not found or prefill.added_s(found, context) <= seconds
    assert found == most or prefill.added_s(found + 1, context) > seconds
    assert prefill.tokens_within(-1.0, context, most) == (most if prefill.added_s(most, context) <= -1.0 else 0)


@given(_models(), _COUNT, st.integers(0, 100), _COUNT, st.floats(1, 100), st.integers(1, 4096))
def test_prompts_within_the_time_left_by_a_batch_keep_the_step_within_its_limit(
    times: ServiceTimes, context: int, batch: int, total: int, factor: float, most: int
) -> None:
    limit_s = factor * max(times.step_s(batch, total), 1e-3)
    found = times.prefill.tokens_within(times.prompts_within_s(limit_s, batch, total), context, most)
    if found:
        assert mixed_step_s(times, found, context, batch, total) <= limit_s * (1 + 1e-9)
    if found < most:
        assert mixed_step_s(times, found + 1, context, batch, total) >= limit_s * (1 - 1e-9)


def test_a_step_may_take_a_share_of_its_target_and_more_the_longer_a_prompt_has_waited() -> None:
    assert StepLimit().seconds(0.01, 0.0, 0.3) == pytest.approx(1.5 * 0.01)
    assert StepLimit(0.04).seconds(0.01, 0.0, 0.3) == pytest.approx(0.75 * 0.04)
    assert StepLimit(0.04).seconds(0.01, 1.5, 0.3) == pytest.approx(6 * 0.01)
    assert StepLimit().seconds(0.01, 1.0, 0.001) == pytest.approx(5 * 0.01)  # a short prompt's patience is 0.25 s


@pytest.mark.parametrize("mixed", [None, MixedTimes(1.2, 0.3)])
@pytest.mark.parametrize("hand_off", [None, HandOffTimes(0.003, 0.2)])
@pytest.mark.parametrize("typical", [None, TimedStep(StepWork(9, 45.0, 3, 600), 0.012)])
def test_service_times_keep_their_values_on_the_wire(
    mixed: MixedTimes | None, hand_off: HandOffTimes | None, typical: TimedStep | None
) -> None:
    times = replace(TIMES, mixed=mixed, hand_off=hand_off, typical_prefill=typical, typical_decode=typical)
    sent = worker_pb2.Heartbeat(service_times=service_times_to_wire(times))
    assert service_times_of(checked(worker_pb2.Heartbeat.FromString(sent.SerializeToString()))) == times


def test_the_errors_are_those_of_the_models_that_have_measured_something() -> None:
    assert TIMES.relative_errors() == {"prefill": 0.1, "decode": 0.05}
    every = replace(TIMES, mixed=MixedTimes(1.2, 0.3), hand_off=HandOffTimes(0.003, 0.2))
    assert every.relative_errors() == {"prefill": 0.1, "decode": 0.05, "mixed": 0.3, "hand_off": 0.2}


def test_a_heartbeat_without_service_times_gives_none() -> None:
    assert service_times_of(worker_pb2.Heartbeat(step=1)) is None


@pytest.mark.parametrize("wrong", [-1e-9, math.nan, math.inf, 1e300])
@pytest.mark.parametrize("coefficient", ["step_s", "per_token_s", "per_token_context_s", "relative_error"])
def test_impossible_service_times_are_refused(coefficient: str, wrong: float) -> None:
    heartbeat = worker_pb2.Heartbeat(service_times=service_times_to_wire(TIMES))
    setattr(heartbeat.service_times.prefill, coefficient, wrong)
    with pytest.raises(MalformedMessage, match=coefficient):
        checked(heartbeat)


def test_service_times_of_prefill_alone_are_refused() -> None:
    heartbeat = worker_pb2.Heartbeat(service_times=service_times_to_wire(TIMES))
    heartbeat.service_times.ClearField("decode")
    with pytest.raises(MalformedMessage, match="decode must be set"):
        checked(heartbeat)
