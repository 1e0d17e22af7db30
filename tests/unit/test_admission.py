"""Admission control: when a refused client should retry, and which requests would be served too late."""

from dataclasses import replace

import pytest

from cluster.errors import Overloaded, QueueFull
from cluster.member import Capacity
from cluster.messages import MemberId
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes
from router.policies.admission import AdmissionControl, early_refusal
from router.policies.candidates import RequestFacts, WorkerLoad, pairs
from router.policies.work_ahead import PromptQueue, PromptWork, WorkAhead


def test_retry_after_follows_the_rate_at_which_places_become_free() -> None:
    admission = AdmissionControl(1)
    waits = []
    for gap_s in (4.0, 0.5):
        for number in range(50):
            admission.record_end((number + 1) * gap_s)
        with pytest.raises(Overloaded, match="1 requests") as refusal:
            admission.check_place(1)
        waits.append(refusal.value.retry_after_s)
    assert waits[0] == pytest.approx(4.0, rel=0.1)
    assert waits[1] == pytest.approx(0.5, rel=0.1)


def test_retry_after_is_bounded_before_any_request_has_ended() -> None:
    with pytest.raises(Overloaded) as refusal:
        AdmissionControl(1).check_place(1)
    assert refusal.value.retry_after_s == 1.0


TIMES = ServiceTimes(PrefillTimes(0.0, 0.01, 0.0, 0.0), DecodeTimes(0.01, 0.0, 0.0, 0.0))  # 100 tokens per second
REQUEST = RequestFacts(num_prompt_tokens=100, max_tokens=2, num_choices=1)


def _load(name: str, num_ahead: int = 0, *, full_for_s: float = 0.0, knows_speed: bool = True) -> WorkerLoad:
    ahead = PromptWork(num_ahead, 0.0)
    work = WorkAhead(TIMES, PromptQueue(ahead, ahead)) if knows_speed else None
    return WorkerLoad(MemberId(name, "1"), "a", 0, full_for_s=full_for_s, work=work)


def _refusal(
    prefills: list[WorkerLoad], decodes: list[WorkerLoad], time_left_s: float, request: RequestFacts = REQUEST
) -> Overloaded | None:
    return early_refusal(prefills, decodes, pairs(prefills, decodes, request), request, time_left_s)


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


def test_a_request_that_would_be_served_after_its_deadline_is_refused_with_both_times() -> None:
    refusal = _refusal([BUSY, _load("p5", 800)], [DECODE], 5.0)
    assert isinstance(refusal, Overloaded) and not isinstance(refusal, QueueFull)
    assert "9 s" in refusal.message and "5 s" in refusal.message
    assert refusal.retry_after_s == pytest.approx(4.0)


def test_a_full_queue_of_a_worker_that_is_too_small_does_not_count() -> None:
    small = replace(FULL, capacity=Capacity(num_blocks=1, block_size=4, max_num_seqs=1, max_model_len=1000))
    assert _refusal([small], [DECODE], 60.0) is None
