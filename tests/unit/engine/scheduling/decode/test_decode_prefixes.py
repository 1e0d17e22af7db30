"""Tests of cached prefixes in a decode worker: a found block is neither moved nor computed, and tenants share none."""

from cluster.messages import FinishReason
from engine.scheduling.cache_commands import LeasePrefix, PrefixLeased
from engine.scheduling.commands import AdmitImported, Release
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.fake_paged_runner import num_tokens
from tests.unit.engine.rigs.scheduler_bench import SchedulerBench, import_now


def test_a_cached_prefix_is_reserved_with_its_content_and_not_moved() -> None:
    bench = SchedulerBench(limits())
    import_now(bench, bench.job(range(1, 19), max_tokens=4))

    handoff = bench.reserve(bench.job([*range(1, 15), 40, 41], max_tokens=4))

    assert handoff.num_cached == 3 and handoff.block_ids is not None
    bench.finish(handoff)
    bench.run()
    bench.assert_idle()
    assert bench.inspect().figures["tokens_cached"] == 12


def test_generated_tokens_are_cached_for_the_next_turn_of_a_conversation() -> None:
    bench = SchedulerBench(limits())
    (first,) = import_now(bench, bench.job(range(1, 10), max_tokens=8))
    bench.run()
    answer = bench.choices[first].output

    handoff = bench.reserve(bench.job([*range(1, 10), *answer, 30, 31], max_tokens=4))

    assert handoff.num_cached == 16 // 4
    bench.finish(handoff)
    bench.run()
    bench.assert_idle()


def test_a_granted_prefix_is_neither_evicted_nor_reused_while_the_rest_is_moved() -> None:
    bench = SchedulerBench(limits(num_blocks=8))
    import_now(bench, bench.job(range(1, 18), max_tokens=2))
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
    import_now(bench, bench.job(range(1, 18), max_tokens=2))
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
    import_now(bench, bench.job(range(1, 18), max_tokens=2, salt="a"))

    assert bench.reserve(bench.job(range(1, 18), salt="b")).num_cached == 0
    assert bench.reserve(bench.job(range(1, 18), salt="a")).num_cached == 4


def test_a_prefix_leased_to_another_worker_is_pinned_until_released() -> None:
    bench = SchedulerBench(limits(num_blocks=6))
    (handle,) = import_now(bench, bench.job(range(1, 10), max_tokens=8))
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
