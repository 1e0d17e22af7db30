"""The prefill worker's decisions: chunks, seals and leases of every prompt, under any schedule."""

import pytest

from cluster.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    QueueFull,
    StepFailed,
    WorkerTooSmall,
)
from cluster.messages import FinishReason, Role, TokenStops
from engine.scheduling.commands import (
    CancelExport,
    DrainExports,
    ExportFinished,
    LimitQueue,
    Sealed,
    SetRole,
    Tail,
)
from tests.unit.engine.rigs.export_bench import export_bench, export_job
from tests.unit.engine.rigs.fake_paged_runner import num_tokens


def test_blocks_are_sealed_chunk_by_chunk_before_the_prompt_is_done() -> None:
    bench = export_bench()
    ticket_id = bench.admit_export(export_job(range(1, 51)))

    sealed = []
    for _ in range(3):
        bench.step()
        sealed.append(len(bench.tickets[ticket_id].sealed))

    assert sealed == [4, 8, 12]
    assert bench.tickets[ticket_id].is_live
    bench.step()
    finished = bench.tickets[ticket_id].finished
    assert finished is not None and isinstance(finished.tail, Tail) and finished.tail.num_valid == 2


def test_exports_leave_room_for_the_longest_hand_off_where_hand_offs_may_come() -> None:
    bench = export_bench()  # 64 blocks; the longest sequence has 50
    bench.apply(SetRole(Role.BOTH))
    tickets = [bench.tickets[bench.admit_export(export_job(range(first, first + 40)))] for first in (1, 101, 201)]
    bench.run()
    assert [ticket.is_live for ticket in tickets] == [False, True, True] and not tickets[1].sealed

    bench.release_export(next(iter(bench.tickets)))
    bench.run()
    assert [ticket.is_live for ticket in tickets] == [False, False, True]

    bench.apply(SetRole(Role.PREFILL))
    bench.run()
    assert not tickets[2].is_live


def test_an_export_that_would_leave_too_few_blocks_starts_alone() -> None:
    bench = export_bench()
    bench.apply(SetRole(Role.BOTH))
    ticket_id = bench.admit_export(export_job(range(1, 101)))
    bench.run()
    assert not bench.tickets[ticket_id].is_live


def test_blocks_that_a_running_step_has_written_are_announced_once_and_leased() -> None:
    bench = export_bench()
    ticket_id = bench.admit_export(export_job(range(1, 11)))
    _, plan = bench.scheduler.plan(0.0)
    assert plan is not None and plan.announces
    result = bench.runner.run(plan)

    (sealed,) = bench.scheduler.written(plan)
    (finished,) = bench.scheduler.complete(plan, result, 1.0)

    assert isinstance(sealed, Sealed) and (sealed.ticket_id, sealed.first_index) == (ticket_id, 0)
    assert sealed.block_ids == plan.chunks[0].block_ids[:2]
    assert isinstance(finished, ExportFinished) and finished.tail is not None
    assert bench.inspect().blocks["leased"] == 3


def test_blocks_that_were_announced_stay_leased_after_their_step_has_failed() -> None:
    bench = export_bench()
    ticket_id = bench.admit_export(export_job(range(1, 11)))
    bench.step(RuntimeError("the device is gone"))

    assert len(bench.tickets[ticket_id].sealed) == 2 and isinstance(bench.tickets[ticket_id].error, StepFailed)
    assert bench.inspect().blocks["leased"] == 2
    bench.release_export(ticket_id)
    bench.assert_none_in_use()


@pytest.mark.parametrize(("num_tokens", "imported"), [(3, True), (10, False)], ids=["no full block", "no importer"])
def test_a_step_that_seals_nothing_for_an_importer_announces_nothing(num_tokens: int, imported: bool) -> None:
    bench = export_bench()
    bench.admit_export(export_job(range(num_tokens), imported=imported))
    plan = bench.step()
    assert plan is not None and not plan.announces


def test_leased_blocks_stay_until_release_and_only_until_then() -> None:
    bench = export_bench(num_blocks=3)
    first = bench.admit_export(export_job(range(1, 11)))
    second = bench.admit_export(export_job(range(1, 5)))
    bench.run()
    assert bench.inspect().blocks["leased"] == 3
    assert bench.tickets[second].is_live

    bench.release_export(first)
    bench.run()

    assert bench.tickets[second].finished is not None
    bench.release_export(second)
    bench.assert_none_in_use()


def test_unclaimed_tickets_block_prefill_until_the_full_queue_refuses_with_a_retry_time() -> None:
    """Decode is full: prefill runs ahead of it by no more than its own pool."""
    bench = export_bench(num_blocks=6, max_queue=2, prefix_caching=False)
    first, second = (bench.admit_export(export_job(range(1, 11))) for _ in range(2))
    bench.now_s = 3.0
    bench.run()
    third, fourth = (bench.admit_export(export_job(range(1, 11))) for _ in range(2))
    bench.run()
    assert bench.tickets[third].is_live and bench.tickets[fourth].is_live
    assert bench.inspect().blocks["leased"] == 6

    bench.admit_export(export_job(range(1, 11)))
    (refusal,) = (refused.error for refused in bench.refused)
    assert isinstance(refusal, QueueFull) and refusal.retry_after_s is not None

    bench.release_export(first)
    bench.run()
    assert bench.tickets[third].finished is not None and bench.tickets[fourth].is_live
    for ticket_id in (second, third):
        bench.release_export(ticket_id)
    bench.run()
    bench.release_export(fourth)
    bench.assert_none_in_use()


def test_a_prompt_without_an_importer_frees_all_blocks_at_its_end() -> None:
    bench = export_bench()
    ticket_id = bench.admit_export(export_job(range(1, 11), imported=False))

    bench.run()

    assert bench.tickets[ticket_id].finished is not None
    bench.assert_none_in_use()


def test_a_released_ticket_that_still_runs_is_finished_without_leases() -> None:
    bench = export_bench()
    ticket_id = bench.admit_export(export_job(range(1, 51)))
    bench.step()
    bench.release_export(ticket_id)

    bench.run()

    assert bench.tickets[ticket_id].finished is not None
    bench.assert_none_in_use()


def test_a_prompt_reserves_all_its_blocks_at_once_and_later_prompts_do_not_overtake() -> None:
    bench = export_bench(num_blocks=10, prefix_caching=False)
    first = bench.admit_export(export_job(range(1, 25)))
    large, small = bench.admit_export(export_job(range(1, 25))), bench.admit_export(export_job([1, 2]))
    bench.step()
    assert bench.inspect().blocks == {"quarantined": 0, "leased": 4, "held": 2, "cached": 0, "free": 4}

    bench.run()
    assert bench.tickets[large].is_live and bench.tickets[small].is_live
    bench.release_export(first)
    bench.run()

    assert bench.tickets[large].finished and bench.tickets[small].finished


def test_a_prompt_lost_at_another_worker_goes_before_younger_requests_and_after_running_prompts() -> None:
    bench = export_bench(max_prefill_tokens=16)
    running = bench.admit_export(export_job(range(32)))
    bench.step()
    bench.now_s = 5.0
    later = bench.admit_export(export_job(range(100, 116)))
    lost = bench.admit_export(export_job(range(200, 216), age_s=4.0))
    oldest = bench.admit_export(export_job(range(300, 316), age_s=7.0))
    interrupted = bench.admit_export(export_job(range(400, 416), age_s=1.0, num_committed=1))
    ended = []
    while bench.step() is not None:
        ended += [ticket for ticket in bench.tickets if not bench.tickets[ticket].is_live and ticket not in ended]
    assert ended == [running, interrupted, oldest, lost, later]


def test_with_a_backlog_steps_carry_exactly_the_budget_shared_by_prompts() -> None:
    bench = export_bench(num_blocks=500, max_queue=100, prefix_caching=False)
    for place in range(80):
        bench.admit_export(export_job(range(1, 8 + 5 * (place % 9)), imported=False))

    plans = bench.run()

    full = [plan for plan in plans if num_tokens(plan) == bench.limits.max_prefill_tokens]
    assert len(plans) > 100 and len(full) >= 0.95 * len(plans)
    assert max(len(plan.chunks) for plan in plans) > 1


def test_a_step_holds_at_most_max_num_seqs_prompts() -> None:
    bench = export_bench(max_num_seqs=3)
    for _ in range(8):
        bench.admit_export(export_job([1, 2], imported=False))

    assert [len(plan.chunks) for plan in bench.run()] == [3, 3, 2]


def test_cancel_frees_unsealed_blocks_and_release_frees_sealed_blocks() -> None:
    bench = export_bench()
    running, waiting = bench.admit_export(export_job(range(1, 101))), bench.admit_export(export_job(range(1, 31)))
    bench.step()

    bench.apply(CancelExport(running))
    bench.apply(CancelExport(waiting))

    assert bench.inspect().blocks["leased"] == 4 and bench.inspect().blocks["held"] == 0
    assert bench.run() == []
    bench.release_export(running)
    bench.assert_none_in_use()


def test_choices_get_a_first_token_each_from_one_prefill() -> None:
    bench = export_bench()
    ticket_id = bench.admit_export(export_job(range(1, 11), num_choices=3))

    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and len({token.token_id for token in finished.tokens}) > 1
    assert bench.inspect().figures["tokens_computed"] == 10


@pytest.mark.parametrize(
    ("stops", "num_committed", "expected"),
    [
        (TokenStops(max_tokens=1), 0, FinishReason.LENGTH),
        (TokenStops(max_tokens=6), 5, FinishReason.LENGTH),
        (TokenStops(max_tokens=6), 4, None),
        (TokenStops(max_tokens=6, stop_token_ids=frozenset(range(50))), 0, FinishReason.STOP),
        (TokenStops(max_tokens=6, min_tokens=2, stop_token_ids=frozenset(range(49))), 1, None),
        (TokenStops(max_tokens=6, min_tokens=2, stop_token_ids=frozenset(range(50))), 2, FinishReason.STOP),
    ],
)
def test_the_first_token_obeys_the_stop_rules_at_its_index(
    stops: TokenStops, num_committed: int, expected: FinishReason | None
) -> None:
    bench = export_bench()
    ticket_id = bench.admit_export(export_job(range(1, 11), stops=stops, num_committed=num_committed))

    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and finished.tokens[0].finish_reason is expected


def test_prompts_that_are_too_long_empty_or_too_many_are_refused() -> None:
    bench = export_bench(num_blocks=10, max_queue=1)
    bench.admit_export(export_job(range(41)))
    bench.admit_export(export_job([]))
    bench.admit_export(export_job([1]))
    bench.admit_export(export_job([2]))

    too_long, empty, full = (refused.error for refused in bench.refused)

    assert isinstance(too_long, WorkerTooSmall) and "41 tokens" in str(too_long) and "holds at most 40" in str(too_long)
    assert isinstance(empty, InvalidRequest)
    assert isinstance(full, QueueFull) and "--max-queue is 1" in str(full)


def test_a_changed_limit_of_the_queue_applies_to_the_next_prompt_and_those_that_wait_stay() -> None:
    bench = export_bench(num_blocks=10, max_queue=2)
    kept = [bench.admit_export(export_job([token])) for token in (1, 2)]
    bench.scheduler.apply(LimitQueue(1), 0.0)
    bench.admit_export(export_job([3]))
    bench.scheduler.apply(LimitQueue(3), 0.0)
    kept.append(bench.admit_export(export_job([4])))

    bench.run()

    (full,) = (refused.error for refused in bench.refused)
    assert isinstance(full, QueueFull) and "2 sequences wait and --max-queue is 1" in str(full)
    assert all(bench.tickets[ticket_id].finished for ticket_id in kept)


def test_an_exceeded_deadline_names_the_phase_of_the_prompt() -> None:
    bench = export_bench(max_num_seqs=1)
    running = bench.admit_export(export_job(range(1, 101), timeout_s=3.0))
    waiting = bench.admit_export(export_job(range(1, 101), timeout_s=2.0))
    bench.step()
    assert bench.scheduler.reap(1.0) == ((), 2.0)

    bench.now_s = 3.0
    assert bench.step() is None

    errors = [bench.tickets[ticket_id].error for ticket_id in (running, waiting)]
    assert all(isinstance(error, DeadlineExceeded) for error in errors)
    assert [str(error) for error in errors] == [
        "3 s passed in prefill, after 16 of 100 tokens",
        "2 s passed in the prefill queue",
    ]


def test_a_failing_step_ends_its_prompts_only_and_keeps_their_leases() -> None:
    bench = export_bench()
    hit = bench.admit_export(export_job(range(1, 41)))
    spared = bench.admit_export(export_job(range(1, 9)))
    bench.step()

    bench.step(RuntimeError("the device is gone"))

    error = bench.tickets[hit].error
    assert isinstance(error, StepFailed) and "RuntimeError: the device is gone" in str(error)
    assert bench.inspect().blocks["leased"] == 4
    bench.run()
    assert bench.tickets[spared].finished is not None


def test_finished_accounts_for_queue_and_prefill_time() -> None:
    bench = export_bench()
    ticket_id = bench.admit_export(export_job(range(1, 21), imported=False))
    bench.now_s = 2.0
    _, plan = bench.scheduler.plan(2.0)
    assert plan is not None
    bench.scheduler.complete(plan, bench.runner.run(plan), 3.0)
    bench.now_s = 7.0
    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and (finished.queue_s, finished.prefill_s) == (2.0, 5.0)


def test_a_draining_worker_finishes_begun_prompts_and_refuses_waiting_and_new_ones() -> None:
    bench = export_bench(max_prefill_tokens=16)
    begun, waiting = bench.admit_export(export_job(range(40))), bench.admit_export(export_job(range(100, 140)))
    bench.step()
    bench.apply(DrainExports())
    bench.admit_export(export_job(range(8)))
    bench.run()
    assert bench.tickets[begun].finished is not None
    assert isinstance(bench.tickets[waiting].error, Draining)
    assert [type(refused.error) for refused in bench.refused] == [Draining]
    bench.release_export(begun)
    bench.assert_none_in_use()
