"""Tests of cached and pulled prefixes in a prefill worker."""

import pytest

from engine.scheduling.commands import (
    CancelExport,
    Sealed,
)
from tests.unit.engine.rigs.export_bench import export_bench, export_job
from tests.unit.engine.rigs.fake_paged_runner import num_tokens


def test_a_prompt_with_a_cached_prefix_computes_only_the_rest() -> None:
    bench = export_bench()
    first = bench.admit_export(export_job(range(1, 31)))
    bench.run()
    bench.release_export(first)
    assert bench.inspect().blocks["cached"] == 7

    second = bench.admit_export(export_job([*range(1, 23), *range(40, 48)]))
    plans = bench.run()

    assert num_tokens(plans[0]) == 10 and len(plans) == 1
    finished = bench.tickets[second].finished
    assert finished is not None and finished.num_cached == 20
    assert bench.inspect().figures["tokens_cached"] == 20


def test_cached_blocks_are_announced_before_the_first_chunk_is_computed() -> None:
    bench = export_bench()
    bench.admit_export(export_job(range(1, 31)))
    bench.run()
    second = bench.admit_export(export_job(range(1, 41)))

    events, plan = bench.scheduler.plan(bench.now_s)

    (sealed,) = events
    assert isinstance(sealed, Sealed) and plan is not None
    assert (sealed.ticket_id, sealed.first_index, len(sealed.block_ids)) == (second, 0, 7)
    assert sealed.block_ids == plan.chunks[0].block_ids[:7]


@pytest.mark.parametrize("length", [16, 17])
def test_the_last_token_is_computed_in_a_private_block_however_much_is_cached(length: int) -> None:
    bench = export_bench()
    before = bench.admit_export(export_job(range(1, length + 1)))
    bench.run()

    again = bench.admit_export(export_job(range(1, length + 1)))
    (plan,) = bench.run()

    assert num_tokens(plan) == length - (length - 1) // 4 * 4
    finished, repeated = bench.tickets[before].finished, bench.tickets[again].finished
    assert finished is not None and repeated is not None and repeated.tokens == finished.tokens
    written = plan.chunks[0].block_ids[-1]
    assert written not in bench.tickets[before].pinned


def test_a_block_that_two_tickets_have_pinned_stays_until_both_are_released() -> None:
    bench = export_bench(num_blocks=6)
    first, second = bench.admit_export(export_job(range(1, 18))), bench.admit_export(export_job(range(1, 18)))
    bench.run()
    assert bench.tickets[first].sealed == bench.tickets[second].sealed
    assert bench.inspect().blocks["leased"] == 6

    bench.release_export(first)
    bench.admit_export(export_job(range(20, 45), imported=False))
    bench.run()

    assert bench.inspect().blocks["leased"] == 5
    bench.release_export(second)
    bench.run()
    bench.assert_none_in_use()


def test_only_unused_cached_blocks_are_evicted_for_another_prompt() -> None:
    bench = export_bench(num_blocks=10, max_prefill_tokens=4)
    for start in (1, 30):
        bench.release_export(bench.admit_export(export_job(range(start, start + 17), imported=False)))
        bench.run()
    assert bench.inspect().blocks["cached"] == 8

    running = bench.admit_export(export_job([*range(30, 47), 1, 2, 3, 4, 5]))
    bench.step()
    bench.admit_export(export_job(range(60, 76), imported=False))
    bench.run()

    finished = bench.tickets[running].finished
    assert finished is not None and finished.num_cached == 16
    assert bench.inspect().figures["evicted_blocks"] == 4


def test_tenants_share_no_prefix() -> None:
    bench = export_bench()
    for salt, num_cached in (("a", 0), ("b", 0), ("", 0), ("a", 16)):
        ticket_id = bench.admit_export(export_job(range(1, 18), salt=salt))
        bench.run()
        finished = bench.tickets[ticket_id].finished
        assert finished is not None and finished.num_cached == num_cached


def test_blocks_sealed_by_a_cancelled_or_failed_prefill_are_reused_by_the_next() -> None:
    bench = export_bench()
    cancelled = bench.admit_export(export_job(range(1, 49), imported=False))
    bench.step()
    bench.apply(CancelExport(cancelled))
    failed = bench.admit_export(export_job(range(1, 49), imported=False))
    bench.step(RuntimeError("the device is gone"))
    assert bench.tickets[failed].error is not None

    ticket_id = bench.admit_export(export_job(range(1, 49), imported=False))
    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and finished.num_cached == 16


def test_without_prefix_caching_no_block_is_reused_or_cached() -> None:
    bench = export_bench(prefix_caching=False)
    for _ in range(2):
        ticket_id = bench.admit_export(export_job(range(1, 31), imported=False))
        bench.run()
        finished = bench.tickets[ticket_id].finished
        assert finished is not None and finished.num_cached == 0
    assert bench.inspect().blocks["free"] == bench.limits.num_blocks


def test_a_prompt_reuses_the_prefix_pulled_for_it() -> None:
    bench = export_bench()
    bench.finish_pull(bench.pull(range(1, 17)))

    ticket_id = bench.admit_export(export_job(range(1, 20)))
    (plan,) = bench.run()

    assert num_tokens(plan) == 3
    finished = bench.tickets[ticket_id].finished
    assert finished is not None and finished.num_cached == 16


def test_a_pull_reuses_cached_blocks_and_reserves_no_block_that_a_waiting_prompt_needs() -> None:
    bench = export_bench(num_blocks=10, max_num_seqs=1, max_prefill_tokens=4)
    bench.admit_export(export_job(range(30, 50), imported=False))
    bench.admit_export(export_job(range(60, 76), imported=False))
    bench.step()

    refused = bench.pull(range(1, 17))
    assert refused not in bench.pulls
    bench.run()
    bench.finish_pull(bench.pull(range(1, 17)))
    longer = bench.pull(range(1, 25))
    assert bench.pulls[longer].num_cached == 4 and len(bench.pulls[longer].block_ids or ()) == 6
    bench.discard_pull(longer)
    bench.assert_none_in_use()


def test_an_offered_prefix_is_pinned_until_released_and_a_too_short_one_is_not_pinned() -> None:
    bench = export_bench(num_blocks=6)
    bench.admit_export(export_job(range(1, 14), imported=False))
    bench.run()

    few, offered = bench.offer(range(1, 9), min_blocks=3), bench.offer(range(1, 30), min_blocks=3)
    assert (len(bench.offered[few][0]), len(bench.offered[offered][0])) == (0, 3)
    assert bench.inspect().blocks["leased"] == 3
    bench.admit_export(export_job(range(30, 43), imported=False))
    assert bench.step() is None

    bench.end_offer(offered)
    bench.run()
    bench.assert_none_in_use()
