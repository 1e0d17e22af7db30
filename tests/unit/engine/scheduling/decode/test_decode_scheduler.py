"""Tests of the scheduler's decisions about sequences that are decoded: batch, budget, preemption, hand-offs."""

import pytest

from cluster.errors import (
    WorkerTooSmall,
)
from cluster.messages import FinishReason
from engine.scheduling.commands import AdmitImported, AdmitLocal, Quiet, Started, StepTokens
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.fake_paged_runner import num_tokens
from tests.unit.engine.rigs.scheduler_bench import SchedulerBench, import_now


def _free(bench: SchedulerBench) -> int:
    return bench.inspect().blocks["free"]


def test_an_admitted_sequence_joins_the_next_step() -> None:
    bench = SchedulerBench(limits())
    bench.admit(bench.job(range(1, 9), max_tokens=50))
    for _ in range(5):
        bench.step()

    (local,) = bench.admit(bench.job([3, 4, 5]))
    (imported,) = import_now(bench, bench.job([6, 7, 8, 9, 10], max_tokens=6))
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
        import_now(bench, bench.job([1, 2, 3], max_tokens=60))
    (late,) = bench.admit(bench.job(range(1, 20)))

    for _ in range(19):
        bench.step()

    assert bench.choices[late].output


def test_the_youngest_sequence_is_preempted_and_later_continues_its_output() -> None:
    bench = SchedulerBench(limits(num_blocks=6))
    old, young = bench.admit(bench.job([1, 2, 3], max_tokens=17)) + bench.admit(bench.job([4, 5, 6], max_tokens=17))

    while bench.inspect().figures["preemptions"] == 0:
        bench.step()
    assert bench.inspect().figures["waiting"] == bench.inspect().figures["preemptions_last_minute"] == 1
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
    imports = [import_now(bench, bench.job([7, place, 9], max_tokens=9))[0] for place in range(3)]

    while not bench.choices[pair[0]].started:
        assert not any(bench.choices[handle].started for handle in imports)
        assert bench.step() is not None


def test_a_prompt_that_lacks_blocks_does_not_delay_a_younger_import() -> None:
    bench = SchedulerBench(limits(num_blocks=10, max_num_seqs=2), prefix_caching=False)
    bench.admit(bench.job(range(1, 9), max_tokens=30))
    (short,) = bench.admit(bench.job([5], max_tokens=12))
    bench.step()
    (lacking,) = bench.admit(bench.job(range(1, 17)))
    (imported,) = import_now(bench, bench.job([1, 2, 3, 4, 5], max_tokens=9))
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

    import_now(bench, job)

    assert bench.run() == []
    bench.assert_idle()


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
