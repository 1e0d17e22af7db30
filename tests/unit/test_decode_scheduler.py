"""The decode worker's decisions: every sequence runs as if alone, no block is lost, no sequence waits for ever."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cluster.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    QueueFull,
    StepFailed,
    TandemError,
    WorkerTooSmall,
)
from cluster.messages import DecodeJob, FinishReason
from cluster.settings.engine_settings import SCHEDULING_POLICIES
from engine.scheduling.cache_commands import LeasePrefix, PrefixLeased
from engine.scheduling.commands import AdmitImported, AdmitLocal, Failed, Quiet, Release, Started, StepTokens
from tests.unit.export_bench import limits
from tests.unit.fake_paged_runner import num_tokens
from tests.unit.scheduler_bench import HandOff, SchedulerBench, known_lengths


def _prompt(num_shared: int, rest: list[int]) -> list[int]:
    return [*range(1, num_shared + 1), *rest] or [1]


# Many begin alike: what one sequence has computed, another one finds.
_PROMPTS = st.builds(_prompt, st.integers(0, 10), st.lists(st.integers(1, 49), max_size=6))
_STANDINGS = st.tuples(st.integers(-1, 1), st.sampled_from([False, False, True]))  # priority, batch class


class AnySchedule(RuleBasedStateMachine):
    """Arrivals, hand-offs that arrive, fail and linger, cancels, failing steps and deadlines, over pools that are too
    small.
    """

    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        max_prefill_tokens=st.integers(1, 9),
        watermark=st.sampled_from([0.0, 0.1, 0.3]),
        wire_dtype=st.sampled_from(["native", "int8"]),
        num_swap_slots=st.sampled_from([0, 3, 20]),
        is_computing_dear=st.booleans(),
        policy=st.sampled_from(["fcfs", *SCHEDULING_POLICIES]),
        is_predicting=st.booleans(),
        draft_period=st.sampled_from([0, 0, 1, 3, 50]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_prefill_tokens: int,
        watermark: float,
        wire_dtype: str,
        num_swap_slots: int,
        is_computing_dear: bool,
        policy: str,
        is_predicting: bool,
        draft_period: int,
    ) -> None:
        self.bench = SchedulerBench(
            limits(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_prefill_tokens=max_prefill_tokens,
                watermark=watermark,
                max_queue=5,
                num_swap_slots=num_swap_slots,
            ),
            wire_dtype=wire_dtype,
            policy=policy,
            lengths=known_lengths() if is_predicting else None,
            draft_period=draft_period,
        )
        # A copy costs as much as four tokens: a sequence with one open block is computed again.
        self.bench.cost.copy_s_per_block = 1.0
        self.bench.cost.compute_s_per_token = 9.0 if is_computing_dear else 0.5

    @rule(
        prompt=_PROMPTS,
        max_tokens=st.integers(1, 12),
        num_committed=st.lists(st.integers(0, 3), min_size=1, max_size=3),
        min_tokens=st.integers(0, 4),
        stops=st.sets(st.integers(0, 49), max_size=10),
        patient=st.booleans(),
        standing=_STANDINGS,
    )
    def admit(
        self,
        prompt: list[int],
        max_tokens: int,
        num_committed: list[int],
        min_tokens: int,
        stops: set[int],
        patient: bool,
        standing: tuple[int, bool],
    ) -> None:
        job = self.bench.job(
            prompt,
            max_tokens=max_tokens,
            num_choices=len(num_committed),
            committed=num_committed,
            min_tokens=min_tokens,
            stops=stops,
            timeout_s=1e6 if patient else 20.0,
            priority=standing[0],
            is_batch=standing[1],
        )
        self.bench.admit(job)

    @rule(
        prompt=_PROMPTS,
        max_tokens=st.integers(1, 12),
        num_choices=st.integers(1, 3),
        stops=st.sets(st.integers(0, 49), max_size=10),
        standing=_STANDINGS,
    )
    def reserve(
        self, prompt: list[int], max_tokens: int, num_choices: int, stops: set[int], standing: tuple[int, bool]
    ) -> None:
        priority, is_batch = standing
        job = self.bench.job(
            prompt,
            max_tokens=max_tokens,
            num_choices=num_choices,
            stops=stops,
            priority=priority,
            is_batch=is_batch,
        )
        self.bench.reserve(job)

    @precondition(lambda self: self._granted())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.bench.finish(data.draw(st.sampled_from(self._granted())))

    @precondition(lambda self: self.bench.handoffs)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        handoff = data.draw(st.sampled_from(list(self.bench.handoffs.values())))
        fresh_ids = (handoff.block_ids or ())[handoff.num_cached :]  # nothing is ever read into the others
        lingering = data.draw(st.sets(st.sampled_from(fresh_ids))) if fresh_ids else set()
        self.bench.discard(handoff, lingering)

    @rule()
    def late_writes(self) -> None:
        for block_id in self.bench.quarantined:
            self.bench.runner.scribble(block_id, mark=99)

    @precondition(lambda self: self.bench.quarantined)
    @rule()
    def quiet(self) -> None:
        self.bench.apply(Quiet(frozenset({self.bench.quarantined.pop()})))

    @precondition(lambda self: self.bench.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.bench.cancel({data.draw(st.sampled_from(self.bench.live)), 10_000})

    @rule()
    def failing_step(self) -> None:
        self.bench.step(RuntimeError("out of memory"))

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.bench.now_s += 1.0
            self.late_writes()
            self.bench.step()

    def teardown(self) -> None:
        """After all hand-offs and leases are released, every sequence ends."""
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.run()
        bench.end_all()

    def _granted(self) -> list[HandOff]:
        return [handoff for handoff in self.bench.handoffs.values() if handoff.block_ids is not None]


TestAnyScheduleGivesEverySequenceItsSerialTokensAndLeaksNoBlock = AnySchedule.TestCase
TestAnyScheduleGivesEverySequenceItsSerialTokensAndLeaksNoBlock.settings = settings(
    max_examples=250, stateful_step_count=40
)


def _free(bench: SchedulerBench) -> int:
    return bench.inspect().blocks["free"]


def _imported(bench: SchedulerBench, job: DecodeJob) -> list[int]:
    """A hand-off from reservation to admission, without a step in between."""
    bench.finish(bench.reserve(job))
    return [start.handle for start in job.sequences]


def test_an_admitted_sequence_joins_the_next_step() -> None:
    bench = SchedulerBench(limits())
    bench.admit(bench.job(range(1, 9), max_tokens=50))
    for _ in range(5):
        bench.step()

    (local,) = bench.admit(bench.job([3, 4, 5]))
    (imported,) = _imported(bench, bench.job([6, 7, 8, 9, 10], max_tokens=6))
    bench.step()

    assert bench.choices[local].output and len(bench.choices[imported].output) == 2
    bench.run()
    bench.assert_idle()


def test_a_sequence_leaves_the_batch_in_the_step_of_its_end() -> None:
    bench = SchedulerBench(limits())
    short, long = bench.admit(bench.job([1, 2], max_tokens=2)) + bench.admit(bench.job([3, 4], max_tokens=4))
    bench.step()
    bench.step()

    assert bench.choices[short].ended == FinishReason.LENGTH
    assert _free(bench) == bench.limits.num_blocks - 1
    (chunk,) = bench.run()[0].chunks
    assert chunk.samples[0].seed == bench.choices[long].start.seed


def test_choices_share_the_prompts_blocks_and_own_their_tails() -> None:
    bench = SchedulerBench(limits())
    bench.admit(bench.job(range(1, 11), num_choices=4, max_tokens=8))

    first = bench.step()
    second = bench.step()

    assert first is not None and second is not None
    assert num_tokens(first) == 10 and len(first.chunks[0].samples) == 4
    assert len(second.copies) == 3
    assert bench.inspect().blocks["held"] == 2 + 4
    bench.run()
    bench.assert_idle()


def test_a_prompt_that_ends_on_a_block_boundary_needs_no_copies() -> None:
    bench = SchedulerBench(limits())
    bench.admit(bench.job(range(1, 9), num_choices=3, max_tokens=8))

    plans = bench.run()

    assert not any(plan.copies for plan in plans)
    bench.assert_idle()


def test_choices_that_never_fit_together_run_one_by_one() -> None:
    bench = SchedulerBench(limits(num_blocks=3, max_num_seqs=2))
    bench.admit(bench.job(range(1, 7), num_choices=5, max_tokens=5))

    bench.run()

    bench.assert_idle()
    assert bench.failures == []


def test_a_long_prompt_does_not_delay_decodes() -> None:
    bench = SchedulerBench(limits())
    decoding = [handle for _ in range(4) for handle in bench.admit(bench.job([1, 2], max_tokens=40))]
    bench.step()
    (long,) = bench.admit(bench.job(range(1, 101), max_tokens=2))

    while not bench.choices[long].output:
        lengths = [len(bench.choices[handle].output) for handle in decoding]
        plan = bench.step()
        assert plan is not None and num_tokens(plan) <= bench.limits.max_prefill_tokens
        assert [len(bench.choices[handle].output) for handle in decoding] == [length + 1 for length in lengths]


def test_with_a_backlog_steps_carry_exactly_the_budget() -> None:
    bench = SchedulerBench(limits(num_blocks=400, max_num_seqs=12), prefix_caching=False)
    for place in range(60):
        bench.admit(bench.job(range(1, 10 + 7 * (place % 9)), max_tokens=3))

    sizes = []
    while bench.inspect().figures["waiting"]:
        plan = bench.step()
        assert plan is not None
        sizes.append(num_tokens(plan))

    assert len(sizes) > 100
    assert sum(size == bench.limits.max_prefill_tokens for size in sizes) >= 0.95 * len(sizes)


def test_a_prompt_advances_even_if_decodes_use_the_whole_budget() -> None:
    bench = SchedulerBench(limits(max_prefill_tokens=3))
    for _ in range(4):
        _imported(bench, bench.job([1, 2, 3], max_tokens=60))
    (late,) = bench.admit(bench.job(range(1, 20)))

    for _ in range(19):
        bench.step()

    assert bench.choices[late].output


def test_the_youngest_sequence_is_preempted_and_later_continues_its_output() -> None:
    bench = SchedulerBench(limits(num_blocks=6))
    old, young = bench.admit(bench.job([1, 2, 3], max_tokens=17)) + bench.admit(bench.job([4, 5, 6], max_tokens=17))

    while bench.inspect().figures["preemptions"] == 0:
        bench.step()
    assert bench.inspect().figures["waiting"] == 1
    seen = len(bench.choices[young].output)
    while not bench.choices[old].ended:
        bench.step()

    assert 0 < seen == len(bench.choices[young].output)
    bench.run()
    bench.assert_idle()
    assert bench.choices[young].ended == FinishReason.LENGTH


def test_many_sequences_in_a_tiny_pool_recompute_few_tokens() -> None:
    bench = SchedulerBench(limits(num_blocks=8, block_size=2))
    for place in range(12):
        bench.admit(bench.job(range(1, 4 + place % 5), max_tokens=9))

    bench.run(most_steps=400)

    bench.assert_idle()
    known = sum(len(choice.job.prompt_token_ids) + 8 for choice in bench.choices.values())
    assert bench.inspect().figures["tokens_computed"] <= 3 * known


def test_a_preempted_sequence_comes_back_before_younger_ones() -> None:
    bench = SchedulerBench(limits(num_blocks=6, max_num_seqs=2))
    bench.admit(bench.job([1, 2, 3], max_tokens=17))
    (preempted,) = bench.admit(bench.job([4, 5, 6], max_tokens=17))
    (younger,) = bench.admit(bench.job([7], max_tokens=2))
    while bench.inspect().figures["preemptions"] == 0:
        bench.step()
    seen = len(bench.choices[preempted].output)

    while not bench.choices[younger].started:
        bench.step()

    assert len(bench.choices[preempted].output) > seen
    bench.run()
    bench.assert_idle()


def test_hand_offs_reserve_all_their_blocks_at_once_the_oldest_first() -> None:
    bench = SchedulerBench(limits(num_blocks=10))
    holder = bench.reserve(bench.job(range(1, 25)))
    large = bench.reserve(bench.job(range(1, 21)))
    small = bench.reserve(bench.job([1, 2]))

    assert (len(holder.block_ids or ()), large.block_ids, small.block_ids) == (6, None, None)
    bench.discard(holder)
    assert (len(large.block_ids or ()), len(small.block_ids or ())) == (5, 1)


def test_a_hand_off_leaves_the_watermark_of_blocks_free() -> None:
    bench = SchedulerBench(limits(num_blocks=10, watermark=0.2))

    first = bench.reserve(bench.job(range(1, 29)))
    second = bench.reserve(bench.job([1, 2, 3, 4, 5]))

    assert len(first.block_ids or ()) == 7
    assert second.block_ids is None
    bench.reserve(bench.job(range(1, 36)))
    (refused,) = bench.refused_handoffs
    assert isinstance(refused.error, WorkerTooSmall)
    assert "needs 9 blocks" in str(refused.error) and "at most 8" in str(refused.error)


def test_younger_local_prompts_do_not_overtake_a_hand_off() -> None:
    bench = SchedulerBench(limits(num_blocks=10))
    bench.admit(bench.job(range(1, 9), max_tokens=20))
    bench.step()
    handoff = bench.reserve(bench.job(range(1, 35)))
    (younger,) = bench.admit(bench.job(range(1, 9)))

    while handoff.block_ids is None:
        assert not bench.choices[younger].started
        assert bench.step() is not None


def test_imports_do_not_delay_an_older_local_prompt() -> None:
    bench = SchedulerBench(limits(max_num_seqs=2))
    bench.admit(bench.job([1, 2], max_tokens=3))
    bench.admit(bench.job([1, 2], max_tokens=6))
    bench.step()
    pair = bench.admit(bench.job([5, 6], num_choices=2, max_tokens=3))
    imports = [_imported(bench, bench.job([7, place, 9], max_tokens=9))[0] for place in range(3)]

    while not bench.choices[pair[0]].started:
        assert not any(bench.choices[handle].started for handle in imports)
        assert bench.step() is not None


def test_a_prompt_that_lacks_blocks_does_not_delay_a_younger_import() -> None:
    bench = SchedulerBench(limits(num_blocks=10, max_num_seqs=2), prefix_caching=False)
    bench.admit(bench.job(range(1, 9), max_tokens=30))
    (short,) = bench.admit(bench.job([5], max_tokens=12))
    bench.step()
    (lacking,) = bench.admit(bench.job(range(1, 17)))
    (imported,) = _imported(bench, bench.job([1, 2, 3, 4, 5], max_tokens=9))
    while not bench.choices[short].ended:
        bench.step()

    bench.step()

    assert bench.choices[imported].started and not bench.choices[lacking].started
    bench.run()
    bench.assert_idle()


def test_a_prompt_that_exceeds_the_watermark_starts_when_no_sequence_runs() -> None:
    bench = SchedulerBench(limits(num_blocks=10, watermark=0.5))
    running, large = bench.admit(bench.job([1, 2], max_tokens=5)) + bench.admit(bench.job(range(1, 33), max_tokens=5))
    bench.step()
    assert bench.choices[running].started and not bench.choices[large].started

    bench.run()

    bench.assert_idle()


def test_a_running_sequence_that_cannot_grow_waits_for_the_hand_off_that_holds_the_other_blocks() -> None:
    bench = SchedulerBench(limits(num_blocks=4))
    (running,) = bench.admit(bench.job([1, 2, 3], max_tokens=9))
    bench.step()
    handoff = bench.reserve(bench.job(range(1, 12), max_tokens=2))
    bench.run()

    assert len(bench.choices[running].output) == 2
    assert bench.inspect().figures["preemptions"] == 0
    bench.discard(handoff)
    bench.run()
    bench.assert_idle()


def test_quarantined_blocks_are_not_reserved_until_their_reads_have_ended() -> None:
    bench = SchedulerBench(limits(num_blocks=4))
    handoff = bench.reserve(bench.job(range(1, 13)))
    assert handoff.block_ids is not None
    lingering = frozenset(handoff.block_ids[:2])

    bench.discard(handoff, lingering)

    assert bench.inspect().blocks == {"quarantined": 2, "leased": 0, "held": 0, "cached": 0, "free": 2}
    waiting = bench.reserve(bench.job(range(1, 13)))
    assert waiting.block_ids is None
    bench.apply(Quiet(lingering))
    assert waiting.block_ids is not None


def test_choices_that_ended_with_their_first_token_do_not_join_and_free_their_tails() -> None:
    bench = SchedulerBench(limits())
    job = bench.job([1, 2, 3, 4, 5], num_choices=3, max_tokens=6)
    handoff = bench.reserve(job)
    assert handoff.block_ids is not None and len(handoff.block_ids) == 4

    admission = AdmitImported(handoff.handoff_id, job, handoff.block_ids[:1], handoff.block_ids[1:], (None, 9, None))
    assert bench.scheduler.apply(admission, 0.0) == ()

    assert bench.inspect().blocks["held"] == 2
    bench.scheduler.check()


def test_a_hand_off_with_only_ended_choices_frees_all_blocks() -> None:
    bench = SchedulerBench(limits())
    job = bench.job([1, 2, 3, 4, 5], num_choices=2, max_tokens=1)

    _imported(bench, job)

    assert bench.run() == []
    bench.assert_idle()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids: (ids[:1], ids[1:2]),  # a tail is missing
        lambda ids: (ids[:1], (ids[1], ids[1])),  # two choices on one tail
        lambda ids: ((60,), ids[1:]),  # a block of another hand-off
    ],
)
def test_an_import_that_does_not_match_its_job_is_refused_and_freed(
    spoil: Callable[[tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    bench = SchedulerBench(limits())
    job = bench.job([1, 2, 3, 4, 5], num_choices=2)
    handoff = bench.reserve(job)
    assert handoff.block_ids is not None

    sealed, tails = spoil(handoff.block_ids)
    (failed,) = bench.scheduler.apply(AdmitImported(handoff.handoff_id, job, sealed, tails, (1, 2)), 0.0)

    assert isinstance(failed, Failed) and isinstance(failed.error, InternalError)
    bench.assert_idle()


def test_cancelled_sequences_free_their_blocks_at_once() -> None:
    bench = SchedulerBench(limits(max_num_seqs=2))
    running = bench.admit(bench.job(range(1, 9), num_choices=2, max_tokens=30))
    waiting = bench.admit(bench.job([1, 2, 3]))
    bench.step()

    bench.cancel([*running, *waiting])

    bench.assert_idle()
    assert bench.run() == []


def test_cancelling_a_choice_during_the_shared_prefill_leaves_the_others() -> None:
    bench = SchedulerBench(limits())
    first, second, third = bench.admit(bench.job(range(1, 35), num_choices=3))
    bench.step()
    held = bench.inspect().blocks["held"]

    bench.cancel([first])

    assert bench.inspect().blocks["held"] == held - 1
    bench.run()
    bench.assert_idle()
    assert bench.choices[second].ended == bench.choices[third].ended == FinishReason.LENGTH


def test_a_stop_token_ends_a_sequence_but_not_before_min_tokens() -> None:
    bench = SchedulerBench(limits())
    stops = range(40)  # of 50: nearly every token would end it
    job = bench.job([1, 2, 3], max_tokens=60, min_tokens=7, stops=stops)
    (handle,) = bench.admit(job)
    (early,) = bench.admit(bench.job([1, 2, 3], max_tokens=60, stops=stops))

    bench.run()

    output = bench.choices[handle].output
    assert len(output) > 7 and not set(output[:7]) & set(stops)
    assert bench.choices[handle].ended == bench.choices[early].ended == FinishReason.STOP
    assert output[-1] in stops and len(bench.choices[early].output) < len(output)


@pytest.mark.parametrize("num_committed", [1, 4, 9])
def test_a_resumed_sequence_draws_the_tokens_of_an_uninterrupted_run(num_committed: int) -> None:
    bench = SchedulerBench(limits())
    whole = bench.job([1, 2, 3, 4, 5], max_tokens=10)
    seed = whole.sequences[0].seed
    expected = bench.serial(whole.prompt_token_ids, whole.stops, seed, 10)
    bench.admit(whole)
    bench.run()

    resumed = bench.job([1, 2, 3, 4, 5], max_tokens=10, num_choices=2, committed=[num_committed, 0])
    handles = bench.admit(resumed)
    bench.run()

    assert tuple(bench.choices[seed].output) == expected
    assert [len(bench.choices[handle].output) for handle in handles] == [10, 10]
    bench.assert_idle()


def _too_long(bench: SchedulerBench) -> DecodeJob:
    return bench.job(range(1, 50), max_tokens=152)


def _longer_than_the_pool(bench: SchedulerBench) -> DecodeJob:
    return bench.job([1, 2], max_tokens=40)


def _complete(bench: SchedulerBench) -> DecodeJob:
    return bench.job([1, 2], max_tokens=3, committed=[3])


@pytest.mark.parametrize(
    ("make", "num_blocks", "error", "text"),
    [
        (_too_long, 64, WorkerTooSmall, "201 tokens; this worker holds at most 200"),
        (_longer_than_the_pool, 10, WorkerTooSmall, "42 tokens; this worker holds at most 41"),
        (_complete, 64, InvalidRequest, "max_tokens 3 already"),
    ],
)
def test_a_job_that_can_never_be_served_is_refused_with_the_numbers(
    make: Callable[[SchedulerBench], DecodeJob], num_blocks: int, error: type[TandemError], text: str
) -> None:
    bench = SchedulerBench(limits(num_blocks=num_blocks))

    bench.admit(make(bench))

    (failed,) = bench.failures
    assert isinstance(failed.error, error) and text in str(failed.error)
    bench.assert_idle()


def test_a_sequence_that_just_fits_the_pool_is_served() -> None:
    bench = SchedulerBench(limits(num_blocks=10))
    (handle,) = bench.admit(bench.job([1, 2], max_tokens=39))

    bench.run()

    assert bench.choices[handle].ended == FinishReason.LENGTH
    bench.assert_idle()


def test_a_full_queue_and_a_handle_in_use_are_refused() -> None:
    bench = SchedulerBench(limits(max_queue=2))
    jobs = [bench.job([1, 2]) for _ in range(3)]
    for job in jobs:
        bench.admit(job)
    assert isinstance(bench.failures[0].error, QueueFull)

    bench.step()
    (duplicate,) = bench.scheduler.apply(AdmitLocal(jobs[0]), 0.0)

    assert isinstance(duplicate, Failed) and isinstance(duplicate.error, DuplicateRequest)
    bench.run()
    bench.assert_idle()


def test_an_exceeded_deadline_frees_all_blocks_and_names_its_phase() -> None:
    bench = SchedulerBench(limits(max_num_seqs=1))
    bench.admit(bench.job([1, 2, 3], max_tokens=30, timeout_s=5.0))
    bench.admit(bench.job([1, 2, 3], max_tokens=30, timeout_s=9.0))
    bench.step()
    assert bench.scheduler.reap(4.0) == ((), 5.0)

    bench.now_s = 20.0
    assert bench.step() is None

    assert all(isinstance(failed.error, DeadlineExceeded) for failed in bench.failures)
    assert [str(failed.error) for failed in bench.failures] == [
        "5 s passed in decode, with 1 of 30 tokens",
        "9 s passed in the decode queue, with 0 of 30 tokens",
    ]
    bench.assert_idle()
    assert bench.scheduler.reap(20.0) == ((), None)


def test_a_failed_step_ends_only_its_own_sequences() -> None:
    bench = SchedulerBench(limits(max_num_seqs=2))
    hit = bench.admit(bench.job([1, 2], num_choices=2, max_tokens=9))
    (spared,) = bench.admit(bench.job([3, 4], max_tokens=9))
    bench.step()

    bench.step(RuntimeError("the device is gone"))

    (failed,) = bench.failures
    assert failed.handles == tuple(hit) and "RuntimeError: the device is gone" in str(failed.error)
    assert isinstance(failed.error, StepFailed)
    bench.run()
    assert bench.choices[spared].ended == FinishReason.LENGTH
    bench.assert_idle()


def test_started_events_carry_the_queue_time_and_tokens_carry_their_step() -> None:
    bench = SchedulerBench(limits(max_num_seqs=1))
    first, second = bench.job([1, 2], max_tokens=1), bench.job([3, 4], max_tokens=1)
    scheduler = bench.scheduler
    scheduler.apply(AdmitLocal(first), 1.0)
    scheduler.apply(AdmitLocal(second), 2.0)

    told = []
    for now_s in (5.0, 7.0):
        _, plan = scheduler.plan(now_s)
        assert plan is not None
        told.append(scheduler.complete(plan, bench.runner.run(plan), now_s + 1))

    assert [started for started, _ in told] == [
        Started(job.router, (job.sequences[0].handle,), queue_s, 0) for job, queue_s in ((first, 4.0), (second, 5.0))
    ]
    assert [tokens.step for _, tokens in told if isinstance(tokens, StepTokens)] == [1, 2]


def test_inspection_names_a_leaked_block_and_ends_no_sequence() -> None:
    bench = SchedulerBench(limits())
    bench.scheduler._pool.reserve(1)  # no user accounts for it

    violation = bench.inspect().violation

    assert violation == "users account for 0 references to block 0 (held, 1 references): ...reserve"


def test_a_cached_prefix_is_reserved_with_its_content_and_not_moved() -> None:
    bench = SchedulerBench(limits())
    _imported(bench, bench.job(range(1, 19), max_tokens=4))

    handoff = bench.reserve(bench.job([*range(1, 15), 40, 41], max_tokens=4))

    assert handoff.num_cached == 3 and handoff.block_ids is not None
    bench.finish(handoff)
    bench.run()
    bench.assert_idle()
    assert bench.inspect().figures["tokens_cached"] == 12


def test_generated_tokens_are_cached_for_the_next_turn_of_a_conversation() -> None:
    bench = SchedulerBench(limits())
    (first,) = _imported(bench, bench.job(range(1, 10), max_tokens=8))
    bench.run()
    answer = bench.choices[first].output

    handoff = bench.reserve(bench.job([*range(1, 10), *answer, 30, 31], max_tokens=4))

    assert handoff.num_cached == 16 // 4
    bench.finish(handoff)
    bench.run()
    bench.assert_idle()


def test_a_granted_prefix_is_neither_evicted_nor_reused_while_the_rest_is_moved() -> None:
    bench = SchedulerBench(limits(num_blocks=8))
    _imported(bench, bench.job(range(1, 18), max_tokens=2))
    bench.run()
    handoff = bench.reserve(bench.job(range(1, 22), max_tokens=2))
    assert handoff.num_cached == 4

    bench.admit(bench.job(range(30, 37), max_tokens=6))
    bench.run()
    assert bench.inspect().blocks["cached"] <= 2

    bench.finish(handoff)
    bench.run()
    bench.assert_idle()


def test_the_watermark_counts_only_blocks_that_are_not_cached() -> None:
    bench = SchedulerBench(limits(num_blocks=10, watermark=0.2))
    holder = bench.reserve(bench.job(range(1, 21), max_tokens=2))
    bench.finish(holder)

    known = bench.reserve(bench.job([*range(1, 21), 40, 41], max_tokens=2))
    foreign = bench.reserve(bench.job(range(20, 42), max_tokens=2))

    assert known.num_cached == 5 and len(known.block_ids or ()) == 6
    assert foreign.block_ids is None


def test_a_local_prompt_computes_only_tokens_that_are_not_cached() -> None:
    bench = SchedulerBench(limits())
    bench.admit(bench.job(range(1, 18), max_tokens=2))
    bench.run()

    bench.admit(bench.job([*range(1, 14), 40, 41], max_tokens=3, num_choices=3))
    plan = bench.step()

    assert plan is not None and num_tokens(plan) == 3
    bench.run()
    bench.assert_idle()


def test_a_preempted_sequence_reuses_its_blocks_that_are_still_cached() -> None:
    bench = SchedulerBench(limits(num_blocks=6))
    bench.admit(bench.job([1, 2, 3], max_tokens=17))
    (young,) = bench.admit(bench.job([4, 5, 6], max_tokens=17))
    while bench.inspect().figures["preemptions"] == 0:
        bench.step()
    seen = bench.inspect().figures["tokens_cached"]

    bench.run()

    assert bench.inspect().figures["tokens_cached"] > seen
    assert bench.choices[young].ended == FinishReason.LENGTH
    bench.assert_idle()


def test_quantised_kv_is_found_by_hand_offs_of_its_wire_dtype_only() -> None:
    bench = SchedulerBench(limits(), wire_dtype="int8")
    _imported(bench, bench.job(range(1, 18), max_tokens=2))
    bench.run()

    (local,) = bench.admit(bench.job(range(1, 18), max_tokens=2))
    plan = bench.step()
    again = bench.reserve(bench.job(range(1, 18), max_tokens=2))

    assert plan is not None and num_tokens(plan) == bench.limits.max_prefill_tokens
    assert again.num_cached == 4
    bench.finish(again)
    bench.run()
    assert len(bench.choices[local].output) == 2
    bench.assert_idle()


def test_a_refused_or_discarded_import_leaves_no_cached_block() -> None:
    bench = SchedulerBench(limits())
    discarded = bench.reserve(bench.job(range(1, 18), max_tokens=2))
    bench.discard(discarded)
    refused = bench.reserve(bench.job(range(1, 18), max_tokens=2))
    assert refused.block_ids is not None
    bench.scheduler.apply(AdmitImported(refused.handoff_id, refused.job, refused.block_ids[:4], (), (1,)), 0.0)

    handoff = bench.reserve(bench.job(range(1, 18), max_tokens=2))

    assert handoff.num_cached == 0


def test_tenants_share_no_prefix_in_a_decode_worker() -> None:
    bench = SchedulerBench(limits())
    _imported(bench, bench.job(range(1, 18), max_tokens=2, salt="a"))

    assert bench.reserve(bench.job(range(1, 18), salt="b")).num_cached == 0
    assert bench.reserve(bench.job(range(1, 18), salt="a")).num_cached == 4


def test_a_prefix_leased_to_another_worker_is_pinned_until_released() -> None:
    bench = SchedulerBench(limits(num_blocks=6))
    (handle,) = _imported(bench, bench.job(range(1, 10), max_tokens=8))
    bench.run()
    known = (*range(1, 10), *bench.choices[handle].output)
    chain = bench.new_chain("", "native")
    chain.extend(known)

    (few,) = bench.scheduler.apply(LeasePrefix(b"few", tuple(chain.hashes), 5), 0.0)
    (offered,) = bench.scheduler.apply(LeasePrefix(b"ticket", tuple(chain.hashes), 4), 0.0)

    assert isinstance(few, PrefixLeased) and few.block_ids == ()
    assert isinstance(offered, PrefixLeased) and bench.runner.read(offered.block_ids, 16) == known[:16]
    bench.admit(bench.job(range(30, 35), max_tokens=4))
    bench.run()
    assert bench.runner.read(offered.block_ids, 16) == known[:16]
    bench.apply(Release(b"ticket"))
    bench.assert_idle()
