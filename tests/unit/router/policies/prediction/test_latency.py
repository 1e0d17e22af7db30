"""Predicted times: they follow the work, and the decode batch is the one at the end of the prefill."""

import math
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import LinkSpeed, MemberId
from cluster.outstanding_work import PromptWork
from cluster.protocol.message_rules import RULES
from cluster.service_times import DecodeTimes, HandOffTimes, PrefillTimes, ServiceTimes, StepLimit
from router.policies.candidates import RequestFacts, WorkerLoad
from router.policies.prediction.forecast import PRECISION
from router.policies.prediction.latency import Prediction, predict
from router.policies.prediction.recent_prompts import RecentPrompts
from router.policies.prediction.work_ahead import PromptQueue, SequenceBatch, WorkAhead
from tandem.v1 import admin_pb2

TIMES = ServiceTimes(PrefillTimes(0.0, 0.001, 0.0, 0.0), DecodeTimes(0.01, 0.001, 0.0, 0.0))
REQUEST = RequestFacts(num_prompt_tokens=400, max_tokens=41, num_choices=1, expected_output=41.0)
WORKS = st.builds(
    WorkAhead,
    times=st.just(TIMES),
    prompts=st.builds(
        lambda ahead, elapsed_s: PromptQueue(PromptWork(ahead, 0.0), PromptWork(ahead, 0.0), elapsed_s),
        st.integers(0, 5000),
        st.floats(0, 10),
    ),
    batch=st.builds(SequenceBatch, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9000), st.floats(0, 500)),
    max_chunk=st.integers(1, 1024),
    max_running=st.integers(1, 16),
)


IDLE, NO_SEQUENCE = PromptQueue(), SequenceBatch()


def worker(name: str = "w", *, prompts: PromptQueue = IDLE, batch: SequenceBatch = NO_SEQUENCE) -> WorkerLoad:
    return WorkerLoad(MemberId(name, "1"), "a", 0, work=WorkAhead(TIMES, prompts, batch), kv_bytes_per_token=1000.0)


def ahead(num_tokens: int, elapsed_s: float = 0.0) -> PromptQueue:
    return PromptQueue(PromptWork.of(num_tokens, 0), PromptWork.of(num_tokens, 0), elapsed_s)


def predicted(prefill: WorkerLoad | None, decode: WorkerLoad, request: RequestFacts = REQUEST) -> Prediction:
    prediction = predict(prefill, decode, request)
    assert prediction is not None
    return prediction


def test_idle_workers_need_the_time_of_the_prompt_and_of_a_quiet_step() -> None:
    prediction = predicted(worker("p"), worker("d"))
    assert prediction.ttft_s == pytest.approx(0.4)
    assert prediction.itl_s == pytest.approx(0.011)
    assert prediction.running_itl_s == 0.0


def test_prompts_ahead_delay_the_first_token_by_what_is_left_of_them() -> None:
    assert predicted(worker(prompts=ahead(500)), worker("d")).ttft_s == pytest.approx(0.9)
    assert predicted(worker(prompts=ahead(500, elapsed_s=0.2)), worker("d")).ttft_s == pytest.approx(0.7)


def test_a_prompt_that_takes_longer_than_predicted_hides_no_later_prompt() -> None:
    prompts = PromptQueue(PromptWork(900, 0.0), first=PromptWork(100, 0.0), elapsed_s=60.0)
    assert predicted(worker(prompts=prompts), worker("d")).ttft_s == pytest.approx(0.8 + 0.4)


def test_waiting_before_sending_hides_prompts_ahead_and_ends_sequences_until_the_worker_is_idle() -> None:
    prefill = worker("p", prompts=ahead(500))
    decode = worker("d", batch=SequenceBatch(num_running=9, context=900, left=50.0))

    def later(after_s: float) -> Prediction:
        prediction = predict(prefill, decode, REQUEST, after_s=after_s)
        assert prediction is not None
        return prediction

    assert [later(after_s).ttft_s for after_s in (0.0, 0.2, 60.0)] == pytest.approx([0.9, 0.7, 0.4])
    assert later(0.0).itl_s > later(0.8).itl_s > later(60.0).itl_s
    idle = predicted(worker("p"), worker("d"))
    assert later(60.0).beside == idle.beside == ()
    assert astuple(later(60.0))[:-1] == pytest.approx(astuple(idle)[:-1])


def test_a_cached_prefix_is_not_computed() -> None:
    request = replace(REQUEST, cached_tokens={MemberId("p", "1"): 300})
    prediction = predicted(worker("p"), worker("d"), request)
    assert prediction.ttft_s == pytest.approx(0.1)
    assert prediction.num_cached == 300


def test_a_worker_that_does_both_moves_nothing_and_computes_beside_its_running_sequences() -> None:
    both = worker(batch=SequenceBatch(num_running=5, context=500, left=100.0))
    prediction = predicted(None, both)
    assert prediction.kv_bytes == 0.0
    assert prediction.ttft_s > 0.4
    assert prediction.running_itl_s > 0.015  # each of the five waits for the prompt
    assert prediction.delay_s > 5 * 0.3


def test_disaggregation_does_not_delay_running_sequences_by_the_prompt() -> None:
    busy = worker("d", batch=SequenceBatch(num_running=5, context=500, left=100.0))
    apart, together = predicted(worker("p"), busy), predicted(None, busy)
    assert apart.delay_s < together.delay_s
    assert apart.running_itl_s < together.running_itl_s


def computing(load: WorkerLoad, number: float, computing_s: float) -> WorkerLoad:
    """Return this worker after 95 s in which so many prompts came, and 5 s without any before them."""
    assert load.work is not None
    recent = RecentPrompts(number, computing_s, 95.0)
    return replace(load, work=replace(load.work, recent=recent, step_limit=StepLimit()))


def test_prompts_that_will_come_take_as_much_of_a_workers_time_as_recent_ones() -> None:
    """An idle moment of a worker that computes prompts for half of the time is over soon."""
    idle, busy = worker("w"), computing(worker("w"), 1000.0, 50.0)
    quiet_s = predicted(None, idle).itl_s
    assert predicted(None, busy).itl_s == pytest.approx(2 * quiet_s)
    assert predicted(None, busy).modelled_itl_s == pytest.approx(2 * quiet_s)  # what is learned comes on top
    assert predicted(busy, worker("d")).itl_s == pytest.approx(quiet_s)  # where nothing is decoded


def test_a_short_output_ends_before_most_prompts_come() -> None:
    """Ten prompts of 5 s in 100 s: each of them can delay 40 tokens by no more than 20 steps of half their time."""
    busy = computing(worker("w"), 10.0, 50.0)
    quiet_s = predicted(None, worker("w")).itl_s
    assert quiet_s < predicted(None, busy).itl_s < 1.02 * quiet_s


def test_sequences_that_run_where_prompts_come_are_expected_to_be_slower() -> None:
    both = worker(batch=SequenceBatch(num_running=5, context=500, left=100.0))
    (without,) = predicted(both, worker("d")).beside
    (beside,) = predicted(computing(both, 1000.0, 50.0), worker("d")).beside
    assert beside.before_s == pytest.approx(2 * without.before_s)


def test_sequences_that_end_before_the_prefill_does_are_not_in_the_batch_then() -> None:
    soon, later = (worker("d", batch=SequenceBatch(num_running=9, context=900, left=left)) for left in (5.0, 5000.0))
    assert predicted(worker("p"), soon).itl_s == pytest.approx(0.011)
    assert predicted(worker("p"), later).itl_s == pytest.approx(0.02, rel=0.01)


def test_sequences_whose_prompts_are_being_computed_will_be_in_the_batch() -> None:
    joining = worker("d", batch=SequenceBatch(num_joining=9, context=900, left=50.0))
    assert predicted(worker("p"), joining).itl_s == pytest.approx(0.02)


def test_a_full_batch_means_a_wait_between_the_first_and_the_second_token() -> None:
    batch = SequenceBatch(num_running=8, context=800, left=1000.0)
    roomy = worker("d", batch=batch)
    full = replace(roomy, work=WorkAhead(TIMES, batch=batch, max_running=8))
    assert predicted(worker("p"), full).itl_s > 2 * predicted(worker("p"), roomy).itl_s


def test_prefill_hides_the_hand_off_except_for_its_fixed_part_and_the_last_chunk() -> None:
    times = replace(TIMES, hand_off=HandOffTimes(fixed_s=0.02, relative_error=0.0))
    link = LinkSpeed(MemberId("p", "1"), "tcp", bytes_per_s=4e6, latency_s=0.0)  # 0.1 s for 400 tokens
    prefill = WorkerLoad(MemberId("p", "1"), "a", 0, work=WorkAhead(times, max_chunk=100))
    decode = WorkerLoad(
        MemberId("d", "1"), "a", 0, links=(link,), kv_bytes_per_token=1000.0, work=WorkAhead(times, max_chunk=100)
    )
    prediction = predicted(prefill, decode)
    assert prediction.kv_bytes == 400_000
    assert prediction.itl_s == pytest.approx(0.011 + (0.02 + 0.025) / 40)


def test_over_the_slowest_link_that_a_worker_may_report_the_times_are_numbers() -> None:
    """One that is not a number is neither better nor worse than others, so that no candidate would be left."""
    rule = RULES[admin_pb2.LinkSpeed]["bytes_per_s"]
    slowest = next(rate for rate in (1e-310, 1e-100, 1.0) if rule.admits(rate))
    link = LinkSpeed(MemberId("p", "1"), "tcp", bytes_per_s=slowest, latency_s=1e9)
    prediction = predicted(worker("p"), replace(worker("d"), links=(link,)))
    assert math.isfinite(prediction.itl_s) and prediction.itl_s > 1e7
    assert math.isfinite(prediction.delay_s)


def test_kv_that_the_decode_worker_has_is_not_moved() -> None:
    request = replace(REQUEST, cached_tokens={MemberId("d", "1"): 300})
    assert predicted(worker("p"), worker("d"), request).kv_bytes == 100_000


def test_a_request_for_one_token_is_not_handed_over() -> None:
    prediction = predicted(worker("p"), worker("d"), replace(REQUEST, max_tokens=1, expected_output=1.0))
    assert (prediction.itl_s, prediction.kv_bytes) == (0.0, 0.0)


def test_without_the_speed_of_a_worker_nothing_is_predicted() -> None:
    unknown = WorkerLoad(MemberId("u", "1"), "a", 0)
    assert predict(unknown, worker("d"), REQUEST) is None
    assert predict(worker("p"), unknown, REQUEST) is None


@given(work=WORKS, decode=WORKS, num_prompt=st.integers(1, 9000), output=st.integers(1, 999), more=st.integers(1, 500))
def test_every_prediction_is_finite_and_more_work_ahead_is_not_predicted_to_be_faster(
    work: WorkAhead, decode: WorkAhead, num_prompt: int, output: int, more: int
) -> None:
    request = RequestFacts(num_prompt, output, 1, expected_output=float(output))
    busier = replace(work, prompts=replace(work.prompts, work=work.prompts.work + PromptWork(more, 0.0)))
    loads = [WorkerLoad(MemberId(name, "1"), "a", 0, work=each) for name, each in (("p", work), ("q", busier))]
    to = WorkerLoad(MemberId("d", "1"), "a", 0, work=decode)
    now, later = (predicted(load, to, request) for load in loads)
    assert 0 <= now.ttft_s <= later.ttft_s * (1 + PRECISION) + 1e-9
    for value in (now.itl_s, now.running_itl_s, now.delay_s, predicted(None, to, request).itl_s):
        assert 0 <= value < 1e9
