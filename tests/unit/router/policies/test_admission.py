"""Admission control: when a refused client should retry, and which requests would be served too late."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest

from cluster.errors import Overloaded, QueueFull, SloUnattainable
from cluster.member import Capacity
from cluster.messages import MemberId, TenantShare
from cluster.outstanding_work import PromptWork
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes
from router.policies.admission import AdmissionControl, early_refusal
from router.policies.candidates import NO_TARGETS, Pair, RequestFacts, SloTargets, WorkerLoad, pairs
from router.policies.prediction.latency import Prediction, predict_all
from router.policies.prediction.recent_prompts import RecentPrompts
from router.policies.prediction.unmodelled import Unmodelled
from router.policies.prediction.work_ahead import PromptBacklog, PromptQueue, SequenceBatch, WorkAhead
from router.policies.slo_aware import SloAware


def test_retry_after_follows_the_rate_at_which_places_become_free() -> None:
    admission = AdmissionControl(1)
    waits = []
    for gap_s in (4.0, 0.5):
        for number in range(50):
            admission.record_end((number + 1) * gap_s, held_s=10.0)
        with pytest.raises(Overloaded, match="1 requests") as refusal:
            admission.check_place(1)
        waits.append(refusal.value.retry_after_s)
    assert waits[0] == pytest.approx(4.0, rel=0.1)
    assert waits[1] == pytest.approx(0.5, rel=0.1)


def test_retry_after_does_not_become_longer_while_nothing_is_served() -> None:
    admission = AdmissionControl(1)
    for number in range(50):
        admission.record_end(0.5 * number, held_s=0.5)
    admission.record_end(3600.0, held_s=0.5)
    with pytest.raises(Overloaded) as refusal:
        admission.check_place(1)
    assert refusal.value.retry_after_s == pytest.approx(0.5)


def test_retry_after_is_bounded_before_any_request_has_ended() -> None:
    with pytest.raises(Overloaded) as refusal:
        AdmissionControl(1).check_place(1)
    assert refusal.value.retry_after_s == 1.0


TIMES = ServiceTimes(PrefillTimes(0.0, 0.01, 0.0, 0.0), DecodeTimes(0.01, 0.0, 0.0, 0.0))  # 100 tokens per second
REQUEST = RequestFacts(num_prompt_tokens=100, max_tokens=2, num_choices=1)


def _load(name: str, num_ahead: int = 0, *, full_for_s: float = 0.0, knows_speed: bool = True) -> WorkerLoad:
    ahead = PromptWork(num_ahead, 0.0)
    work = WorkAhead(TIMES, PromptQueue(ahead, ahead)) if knows_speed else None
    return WorkerLoad(MemberId(name, "1"), "a", 0, full_for_s={"": full_for_s} if full_for_s else {}, work=work)


def _refusal(
    prefills: list[WorkerLoad], decodes: list[WorkerLoad], time_left_s: float, request: RequestFacts = REQUEST
) -> Overloaded | None:
    return early_refusal(prefills, decodes, lambda: pairs(prefills, decodes, request), request, time_left_s)


IDLE, BUSY = _load("p0"), _load("p1", 1000)  # 1 s and 11 s until the first token
FULL, FULL_LONGER = _load("p2", full_for_s=2.0), _load("p3", full_for_s=5.0)
DECODE, FULL_DECODE = _load("d0"), _load("d1", full_for_s=2.0)


@pytest.mark.parametrize(
    ("prefills", "decodes", "time_left_s"),
    [
        ([], [], 1.0),  # it waits for a worker
        ([IDLE], [DECODE], 1.1),
        ([BUSY], [DECODE], 11.1),
        ([BUSY, IDLE], [DECODE], 1.1),  # one of them will do
        ([BUSY, _load("p4", knows_speed=False)], [DECODE], 1.0),  # the time is not known
        ([FULL, IDLE], [FULL_DECODE, DECODE], 1.1),
    ],
)
def test_a_request_that_can_be_served_in_time_is_not_refused(
    prefills: list[WorkerLoad], decodes: list[WorkerLoad], time_left_s: float
) -> None:
    assert _refusal(prefills, decodes, time_left_s) is None


@pytest.mark.parametrize(
    ("prefills", "decodes", "pool"), [([FULL, FULL_LONGER], [DECODE], "prefill"), ([IDLE], [FULL_DECODE], "decode")]
)
def test_full_queues_of_one_pool_refuse_until_the_first_has_room(
    prefills: list[WorkerLoad], decodes: list[WorkerLoad], pool: str
) -> None:
    refusal = _refusal(prefills, decodes, 60.0)
    assert isinstance(refusal, QueueFull)
    assert pool in refusal.message
    assert refusal.retry_after_s == 2.0


def test_full_queues_of_one_pool_refuse_nothing_that_a_worker_of_the_other_one_serves_alone() -> None:
    auto, prefills, decodes = SloAware(NO_TARGETS, random.Random(1).random), [FULL, FULL_LONGER], [DECODE, FULL_DECODE]
    ways = partial(auto.ways, prefills, decodes, REQUEST)
    assert early_refusal(prefills, decodes, ways, REQUEST, 60.0, auto.predict) is None
    placement = auto.choose(prefills, decodes, REQUEST)
    assert placement is not None and (placement.prefill, placement.decode) == (None, DECODE.member)
    ways = partial(auto.ways, prefills, [FULL_DECODE], REQUEST)
    assert isinstance(early_refusal(prefills, [FULL_DECODE], ways, REQUEST, 60.0, auto.predict), QueueFull)


def test_a_request_that_would_be_served_after_its_deadline_is_refused_with_both_times() -> None:
    refusal = _refusal([BUSY, _load("p5", 800)], [DECODE], 5.0)
    assert isinstance(refusal, Overloaded) and not isinstance(refusal, QueueFull)
    assert "9 s" in refusal.message and "5 s" in refusal.message
    assert refusal.retry_after_s == pytest.approx(4.0)


def test_prompts_of_the_batch_class_refuse_no_other_request() -> None:
    backlog = PromptBacklog()
    for _ in range(10):
        backlog.add_prompt(PromptWork.of(1000, 0), 0.0, is_batch=True)
    busy = replace(BUSY, work=WorkAhead(TIMES, backlog.queue(0.0), max_chunk=100))
    assert _refusal([busy], [DECODE], 2.1) is None, "it waits for the running step and its own prompt"
    late = _refusal([busy], [DECODE], 2.1, replace(REQUEST, is_batch=True))
    assert late is not None and "101 s" in late.message


def test_a_queue_that_is_full_for_one_tenant_refuses_no_request_of_another_one() -> None:
    assert _refusal([FULL], [DECODE], 60.0, replace(REQUEST, tenant=TenantShare("below its share"))) is None


def test_a_full_queue_of_a_worker_that_is_too_small_does_not_count() -> None:
    small = replace(FULL, capacity=Capacity(num_blocks=1, block_size=4, max_num_seqs=1, max_model_len=1000))
    assert _refusal([small], [DECODE], 60.0) is None


def _asking(ttft_s: float | None = None, itl_s: float | None = None, max_tokens: int = 2) -> RequestFacts:
    targets = SloTargets.of_request(ttft_s, itl_s)
    return replace(REQUEST, targets=targets, max_tokens=max_tokens, expected_output=float(max_tokens))


def test_a_target_that_some_worker_keeps_refuses_no_request() -> None:
    assert _refusal([BUSY, IDLE], [DECODE], 60.0, _asking(ttft_s=1.1, itl_s=0.011)) is None


def test_a_first_token_later_than_asked_for_is_refused_until_the_prompts_ahead_are_computed() -> None:
    refusal = _refusal([BUSY], [DECODE], 60.0, _asking(ttft_s=5.0))
    assert isinstance(refusal, SloUnattainable)
    assert "first token" in refusal.message and "11 s" in refusal.message and "5 s" in refusal.message
    assert refusal.retry_after_s is not None and 6.0 <= refusal.retry_after_s <= 6.0 * 1.25


def test_tokens_slower_than_asked_for_are_refused_until_enough_sequences_have_ended() -> None:
    times = replace(TIMES, decode=DecodeTimes(0.01, 0.01, 0.0, 0.0))
    busy = WorkAhead(times, batch=SequenceBatch(num_running=10, context=1000, left=50.0))
    decode = WorkerLoad(MemberId("d2", "1"), "a", 0, work=busy)
    request = _asking(itl_s=0.06, max_tokens=50)  # a batch of five, itself included
    refusal = _refusal([IDLE], [decode], 60.0, request)
    assert isinstance(refusal, SloUnattainable)
    assert "between tokens" in refusal.message
    # The ten end evenly within 2 x 50 steps, which take 0.11 s at first and 0.06 s when five are left: five have ended
    # after 4.2 s to 5.5 s. The prefill takes one of those seconds, and the retry time is rounded up by 25 % at most.
    assert refusal.retry_after_s is not None and 3.2 <= refusal.retry_after_s <= 4.5 * 1.25
    assert _refusal([BUSY], [decode], 60.0, request) is None, "by the end of that prefill enough of them have ended"


def test_tokens_slowed_by_recent_prompts_are_refused_until_those_are_longer_ago() -> None:
    """No prompt is ahead, but as many as came of late would double the time between tokens."""
    decode = WorkerLoad(MemberId("d2", "1"), "a", 0, work=WorkAhead(TIMES, recent=RecentPrompts(1000.0, 16.0, 20.0)))
    refusal = early_refusal([], [decode], lambda: [(None, decode)], _asking(itl_s=0.013), 60.0)
    assert isinstance(refusal, SloUnattainable)
    # 16 s within 25 s leave 36 % of the worker's time, and 77 % are needed: after 20.4 s only 5.8 s of the 16 count.
    assert refusal.retry_after_s is not None and 20.4 <= refusal.retry_after_s <= 20.4 * 1.25


def test_the_retry_time_counts_the_prompts_of_all_workers_of_a_role_as_the_refusal_does() -> None:
    """A client that came again at once would be refused again, although one of the workers had no prompt of late."""
    busy = WorkAhead(TIMES, recent=RecentPrompts(1000.0, 16.0, 20.0))
    decodes = [WorkerLoad(MemberId(name, "1"), "a", 0, work=work) for name, work in (("d2", busy), ("d3", DECODE.work))]
    auto, request = SloAware(NO_TARGETS, random.Random(1).random), _asking(itl_s=0.013)
    refusal = early_refusal([], decodes, partial(auto.ways, [], decodes, request), request, 60.0, auto.predict)
    assert isinstance(refusal, SloUnattainable)
    assert refusal.retry_after_s is not None and refusal.retry_after_s > 5.0


class _CountedWays(list[Pair]):
    """Counts how often the ways are predicted."""

    num_predicted = 0

    def __iter__(self) -> Iterator[Pair]:
        self.num_predicted += 1
        return super().__iter__()


@pytest.mark.parametrize("ttft_s", [0.5, 5.0], ids=["never", "later"])
def test_a_refusal_costs_at_most_seven_predictions_of_each_way(ttft_s: float) -> None:
    ways = _CountedWays(pairs([BUSY], [DECODE], REQUEST))
    assert early_refusal([BUSY], [DECODE], lambda: ways, _asking(ttft_s=ttft_s), 60.0) is not None
    assert 1 < ways.num_predicted <= 7


@pytest.mark.parametrize(("time_left_s", "num_most"), [(60.0, 0), (2.0, 36)])
def test_only_a_request_whose_time_is_short_is_predicted_and_of_many_ways_few(
    time_left_s: float, num_most: int
) -> None:
    prefills, decodes = [_load(f"p{n}", 50 * n) for n in range(20)], [_load(f"d{n}") for n in range(20)]
    predicted = list[Pair]()

    def predict(ways: Sequence[Pair], request: RequestFacts, *, after_s: float = 0.0) -> list[Prediction] | None:
        predicted.extend(ways)
        return predict_all(ways, request, after_s=after_s)

    ways = partial(pairs, prefills, decodes, REQUEST)
    assert early_refusal(prefills, decodes, ways, REQUEST, time_left_s, predict) is None
    assert len(predicted) == num_most


def test_delays_that_service_times_leave_out_count_before_a_forecast_is_spared() -> None:
    late = replace(IDLE, unmodelled=Unmodelled(export_s=10.0))  # 11 s until the first token
    assert _refusal([late], [DECODE], 10.5) is not None
    assert _refusal([late], [DECODE], 11.5) is None


def test_what_even_idle_workers_cannot_keep_is_refused_without_a_retry_time() -> None:
    refusal = _refusal([IDLE], [DECODE], 60.0, _asking(ttft_s=0.5))
    assert isinstance(refusal, SloUnattainable)
    assert refusal.retry_after_s is None


def test_while_a_speed_is_unknown_no_target_refuses() -> None:
    assert _refusal([BUSY, _load("p4", knows_speed=False)], [DECODE], 60.0, _asking(ttft_s=0.001)) is None


ITL_TARGET_S = 0.05  # of a batch of twenty
SWING_TIMES = ServiceTimes(PrefillTimes(0.2, 0.0, 0.0, 0.0), DecodeTimes(0.01, 0.002, 0.0, 0.0))
NUM_OUTPUT = 100


@dataclass
class _Served:
    joins_s: float  # when its prefill ends
    num_tokens: int = 0
    end_s: float = math.inf

    @property
    def itl_s(self) -> float:
        return (self.end_s - self.joins_s) / (NUM_OUTPUT - 1)


def _admitted(seed: int, admits: Callable[[WorkerLoad, WorkerLoad], bool]) -> list[_Served]:
    """Simulate a minute of bursts, twice as much as decode can do, and return the requests that were admitted."""
    draws, now_s, served = random.Random(seed), 0.0, list[_Served]()
    arrivals_s = sorted(5.0 * burst + draws.random() for burst in range(12) for _ in range(40))
    while arrivals_s or any(one.end_s == math.inf for one in served):
        running = [one for one in served if one.joins_s <= now_s and one.end_s == math.inf]
        while arrivals_s and arrivals_s[0] <= now_s:
            arrivals_s.pop(0)
            joining = [one for one in served if one.joins_s > now_s]
            present = [*running, *joining]
            left = sum(NUM_OUTPUT - one.num_tokens for one in present) / max(1, len(present))
            batch = SequenceBatch(len(running), len(joining), 0, left)
            prompts, first = PromptWork(len(joining)), PromptWork(min(1, len(joining)))
            begun_s = now_s - min((one.joins_s - 0.2 for one in joining), default=now_s)
            work = WorkAhead(SWING_TIMES, PromptQueue(prompts, first, begun_s), max_chunk=1)
            decode = WorkAhead(SWING_TIMES, batch=batch)
            if admits(*(WorkerLoad(MemberId(n, "1"), "a", 0, work=w) for n, w in (("p", work), ("d", decode)))):
                served.append(_Served(max([now_s, *(one.joins_s for one in joining)]) + 0.2))
        now_s += SWING_TIMES.step_s(len(running), 0) or 0.01
        for one in running:
            one.num_tokens += 1
            if one.num_tokens == NUM_OUTPUT:
                one.end_s = now_s
    return served


def test_admission_by_prediction_does_not_swing_with_the_decode_batch_of_the_moment() -> None:
    """The naive rule admits a burst while decode is idle, since none of it has reached decode, and refuses the next one
    for a batch that will have ended before that one's prefill has."""
    request = RequestFacts(1, NUM_OUTPUT, 1, expected_output=NUM_OUTPUT, targets=SloTargets(math.inf, ITL_TARGET_S))

    def naive(_: WorkerLoad, decode: WorkerLoad) -> bool:
        assert decode.work is not None
        return SWING_TIMES.step_s(decode.work.batch.num_running + 1, 0) <= ITL_TARGET_S

    def predicted(prefill: WorkerLoad, decode: WorkerLoad) -> bool:
        return early_refusal([prefill], [decode], lambda: [(prefill, decode)], request, 600.0) is None

    for seed in range(3):
        by_now, ahead = _admitted(seed, naive), _admitted(seed, predicted)
        late_now, late_ahead = ([one for one in found if one.itl_s > ITL_TARGET_S] for found in (by_now, ahead))
        assert len(late_now) > 0.3 * len(by_now)
        assert len(late_ahead) <= 0.05 * len(ahead)
        assert len(ahead) - len(late_ahead) >= 1.2 * (len(by_now) - len(late_now))
