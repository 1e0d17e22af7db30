"""Never out of memory: over the smallest pools, every job is served, or refused at admission with the numbers. No job
waits for ever, raises, or keeps a block.
"""

import random
import re
from dataclasses import replace

import pytest

from cluster.errors import WorkerTooSmall
from cluster.messages import MemberId, PrefillJob
from cluster.protocol.hashing import keyed_chains
from cluster.request_size import LengthLimits
from cluster.settings.worker_settings import SCHEDULING_POLICIES
from engine.scheduling.commands import AdmitExport, Event, ExportAccepted, ExportFinished, ExportRefused, Release
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import make_policy
from engine.scheduling.scheduler import SequenceScheduler
from tests.prefill_jobs import prefill_job
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.fake_paged_runner import FakePagedRunner
from tests.unit.engine.rigs.scheduler_bench import HandOff, SchedulerBench

NUM_JOBS = 12


def smallest(dice: random.Random) -> SchedulerLimits:
    return limits(
        num_blocks=dice.randint(1, 3),
        block_size=dice.randint(1, 3),
        max_num_seqs=dice.randint(1, 3),
        max_prefill_tokens=dice.randint(1, 3),
        watermark=dice.choice([0.0, 0.5]),
        num_swap_slots=dice.choice([0, 1, 4]),
    )


def tokens(dice: random.Random) -> list[int]:
    return [dice.randint(1, 49) for _ in range(dice.randint(1, 9))]


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
@pytest.mark.parametrize("seed", range(25))
def test_every_decode_job_in_a_small_pool_ends_or_is_refused_with_the_numbers(policy: str, seed: int) -> None:
    dice = random.Random(seed)
    bench = SchedulerBench(smallest(dice), policy=policy)
    handoffs: list[HandOff] = []
    for _ in range(NUM_JOBS):
        job = bench.job(
            tokens(dice),
            max_tokens=dice.randint(1, 9),
            num_choices=dice.randint(1, 4),
            priority=dice.randint(0, 2),
            is_batch=dice.random() < 0.2,
        )
        bench.now_s += dice.random()
        if dice.random() < 0.6 or bench.limits.job_refusal(job) is not None:
            bench.admit(job)
        else:
            handoffs.append(bench.reserve(job))
        for _ in range(dice.randint(0, 3)):
            bench.step()
            finish_granted(bench, handoffs)

    bench.run()
    while finish_granted(bench, handoffs):
        bench.run()

    assert [handoff.handoff_id for handoff in handoffs if not is_refused(bench, handoff)] == []
    bench.assert_idle()
    for failed in bench.failures:
        assert isinstance(failed.error, WorkerTooSmall)
        assert len(re.findall(r"\d+", failed.error.message)) >= 2, failed.error.message


def finish_granted(bench: SchedulerBench, handoffs: list[HandOff]) -> int:
    """Finish the hand-offs whose blocks are reserved. Return their number."""
    granted = [handoff for handoff in handoffs if handoff.block_ids is not None]
    for handoff in granted:
        handoffs.remove(handoff)
        bench.finish(handoff)
    return len(granted)


def is_refused(bench: SchedulerBench, handoff: HandOff) -> bool:
    """Return whether the hand-off was refused with the number of blocks it needs; a router then computes the prompt on
    this worker."""
    needed = f"needs {bench.limits.num_needed(len(handoff.token_ids), len(handoff.job.sequences))} blocks"
    return any(
        refused.handoff_id == handoff.handoff_id and needed in refused.error.message
        for refused in bench.refused_handoffs
    )


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_every_prefill_job_in_a_small_pool_ends_or_is_refused_with_the_numbers(policy: str, seed: int) -> None:
    dice = random.Random(seed)
    size = smallest(dice)
    scheduler = SequenceScheduler(
        SchedulerLimits(
            num_blocks=size.num_blocks,
            max_model_len=1 << 20,
            block_size=size.block_size,
            max_prefill_tokens=size.max_prefill_tokens,
            max_num_seqs=size.max_num_seqs,
            max_queue=NUM_JOBS,
        ),
        new_chain=keyed_chains(b"key", size.block_size),
        policy=make_policy(policy),
    )
    runner = FakePagedRunner(size.num_blocks, size.block_size)
    leased: list[bytes] = []
    num_finished = num_accepted = 0
    for number in range(NUM_JOBS):
        seeds, max_tokens = tuple(range(dice.randint(1, 4))), dice.randint(1, 99)
        job = prefill_job(tokens(dice), seeds=seeds, max_tokens=max_tokens, importer=MemberId("decode", "1"))
        (event,) = scheduler.apply(AdmitExport(number.to_bytes(4, "big"), job), 0.0)
        needed = len(job.token_ids)
        if isinstance(event, ExportRefused):
            assert -(-needed // size.block_size) > size.num_blocks
            assert isinstance(event.error, WorkerTooSmall)
            assert {str(needed), str(size.num_blocks * size.block_size)} <= set(re.findall(r"\d+", event.error.message))
        else:
            assert isinstance(event, ExportAccepted)
            num_accepted += 1

    while True:
        events, plan = scheduler.plan(0.0)
        num_finished += note(events, leased)
        if plan is not None:
            num_finished += note(scheduler.complete(plan, runner.run(plan), 0.0), leased)
        elif leased:
            scheduler.apply(Release(leased.pop(dice.randrange(len(leased)))), 0.0)  # an importer has come
        else:
            break
        scheduler.check()

    assert num_finished == num_accepted


def note(events: tuple[Event, ...], leased: list[bytes]) -> int:
    finished = [event.ticket_id for event in events if isinstance(event, ExportFinished)]
    leased += finished
    return len(finished)


def limited_prefill() -> SequenceScheduler:
    return SequenceScheduler(
        SchedulerLimits(
            num_blocks=9,
            max_model_len=1 << 20,
            block_size=4,
            max_prefill_tokens=8,
            max_num_seqs=2,
            max_queue=4,
            lengths=LengthLimits(max_input_length=5, max_output_length=7),
        ),
        new_chain=keyed_chains(b"key", 4),
    )


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (prefill_job([1] * 6, max_tokens=7), "6 tokens; --max-input-length allows at most 5"),
        (prefill_job([1] * 5, max_tokens=8), "max_tokens is 8; --max-output-length allows at most 7"),
        (prefill_job([1] * 9, max_tokens=7, num_committed=4), ""),  # a second try: the rest is its own output
    ],
)
def test_a_prefill_worker_enforces_the_operators_lengths(job: PrefillJob, said: str) -> None:
    (event,) = limited_prefill().apply(AdmitExport(b"1", job), 0.0)
    assert isinstance(event, ExportRefused if said else ExportAccepted)
    assert not isinstance(event, ExportRefused) or said in event.error.message


def test_a_decode_worker_enforces_the_operators_lengths() -> None:
    bench = SchedulerBench(replace(limits(), lengths=LengthLimits(max_input_length=5, max_output_length=7)))
    bench.admit(bench.job([1] * 6, max_tokens=7))
    bench.admit(bench.job([1] * 5, max_tokens=8))
    bench.admit(bench.job([1] * 5, max_tokens=7, committed=[4]))
    bench.run()

    assert [type(failed.error) for failed in bench.failures] == [WorkerTooSmall, WorkerTooSmall]
    bench.assert_idle()
