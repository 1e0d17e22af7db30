"""The prefill worker's decisions: chunks, seals and leases of every prompt, under any schedule."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    QueueFull,
    StepFailed,
    WorkerTooSmall,
)
from cluster.messages import FinishReason, TokenStops
from cluster.settings.engine_settings import SCHEDULING_POLICIES
from engine.scheduling.commands import (
    CancelExport,
    DrainExports,
    Quiet,
    Sealed,
    Tail,
)
from tests.unit.export_bench import ExportBench, export_job, limits
from tests.unit.fake_paged_runner import num_tokens


def _bench(*, prefix_caching: bool = True, policy: str = "fcfs", **sizes: int) -> ExportBench:
    return ExportBench(limits(max_model_len=1 << 20, **sizes), prefix_caching, policy=policy)


class _AnySchedule(RuleBasedStateMachine):
    """Prompts, cancels, lapsed leases, failing steps and deadlines over pools too small for all."""

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.integers(1, 4),
        max_prefill_tokens=st.integers(1, 9),
        max_num_seqs=st.integers(1, 4),
        policy=st.sampled_from(SCHEDULING_POLICIES),
    )
    def start(self, num_blocks: int, block_size: int, max_prefill_tokens: int, max_num_seqs: int, policy: str) -> None:
        self.bench = _bench(
            num_blocks=num_blocks,
            block_size=block_size,
            max_prefill_tokens=max_prefill_tokens,
            max_num_seqs=max_num_seqs,
            max_queue=4,
            policy=policy,
        )

    @rule(
        num_shared=st.integers(0, 16),
        token_ids=st.lists(st.integers(1, 49), max_size=8),
        num_choices=st.integers(1, 3),
        imported=st.booleans(),
        patient=st.booleans(),
        salt=st.sampled_from(["", "", "tenant"]),
        priority=st.integers(-1, 1),
    )
    def submit(
        self,
        num_shared: int,
        token_ids: list[int],
        num_choices: int,
        imported: bool,
        patient: bool,
        salt: str,
        priority: int,
    ) -> None:
        """Prompts that begin alike, and part."""
        job = export_job(
            [*range(1, num_shared + 1), *token_ids],
            num_choices=num_choices,
            imported=imported,
            timeout_s=1e6 if patient else 8.0,
            salt=salt,
            priority=priority,
            is_batch=priority > 0,
        )
        self.bench.admit_export(job)

    @precondition(lambda self: self.bench.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket_id = data.draw(st.sampled_from(list(self.bench.tickets)))
        was_live = self.bench.tickets[ticket_id].is_live
        self.bench.apply(CancelExport(ticket_id))
        assert isinstance(self.bench.tickets[ticket_id].error, Cancelled) or not was_live

    @precondition(lambda self: self.bench.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.bench.release_export(data.draw(st.sampled_from(list(self.bench.tickets))))

    @rule(num_tokens=st.integers(1, 16))
    def pull(self, num_tokens: int) -> None:
        num_blocks = num_tokens // self.bench.limits.block_size
        if num_blocks:
            self.bench.pull(range(1, num_blocks * self.bench.limits.block_size + 1))

    @precondition(lambda self: self.bench.pulls)
    @rule(data=st.data())
    def finish_pull(self, data: st.DataObject) -> None:
        self.bench.finish_pull(data.draw(st.sampled_from(list(self.bench.pulls))))

    @precondition(lambda self: self.bench.pulls)
    @rule(data=st.data())
    def discard_pull(self, data: st.DataObject) -> None:
        pull_id = data.draw(st.sampled_from(list(self.bench.pulls)))
        pull = self.bench.pulls[pull_id]
        fresh_ids = (pull.block_ids or ())[pull.num_cached :]
        self.bench.discard_pull(pull_id, data.draw(st.sets(st.sampled_from(fresh_ids))) if fresh_ids else set())

    @precondition(lambda self: self.bench.quarantined)
    @rule()
    def quiet(self) -> None:
        self.bench.apply(Quiet(frozenset({self.bench.quarantined.pop()})))

    @rule(num_tokens=st.integers(1, 16), min_blocks=st.integers(1, 3))
    def offer(self, num_tokens: int, min_blocks: int) -> None:
        self.bench.offer(range(1, num_tokens + 1), min_blocks)

    @precondition(lambda self: self.bench.offered)
    @rule(data=st.data())
    def end_offer(self, data: st.DataObject) -> None:
        self.bench.end_offer(data.draw(st.sampled_from(list(self.bench.offered))))

    @rule()
    def failing_step(self) -> None:
        self.bench.step(RuntimeError("out of memory"))

    @rule(num_steps=st.integers(1, 5))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.bench.now_s += 1.0
            self.bench.step()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.end_quarantine()
        bench.end_exports()
        bench.assert_none_in_use()


TestAnyScheduleKeepsLeasedBlocksAndLeaksNone = _AnySchedule.TestCase
TestAnyScheduleKeepsLeasedBlocksAndLeaksNone.settings = settings(max_examples=100, stateful_step_count=40)


def test_blocks_are_sealed_chunk_by_chunk_before_the_prompt_is_done() -> None:
    bench = _bench()
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


def test_leased_blocks_stay_until_release_and_only_until_then() -> None:
    bench = _bench(num_blocks=3)
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
    bench = _bench(num_blocks=6, max_queue=2, prefix_caching=False)
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
    bench = _bench()
    ticket_id = bench.admit_export(export_job(range(1, 11), imported=False))

    bench.run()

    assert bench.tickets[ticket_id].finished is not None
    bench.assert_none_in_use()


def test_a_released_ticket_that_still_runs_is_finished_without_leases() -> None:
    bench = _bench()
    ticket_id = bench.admit_export(export_job(range(1, 51)))
    bench.step()
    bench.release_export(ticket_id)

    bench.run()

    assert bench.tickets[ticket_id].finished is not None
    bench.assert_none_in_use()


def test_a_prompt_reserves_all_its_blocks_at_once_and_later_prompts_do_not_overtake() -> None:
    bench = _bench(num_blocks=10, prefix_caching=False)
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
    bench = _bench(max_prefill_tokens=16)
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
    bench = _bench(num_blocks=500, max_queue=100, prefix_caching=False)
    for place in range(80):
        bench.admit_export(export_job(range(1, 8 + 5 * (place % 9)), imported=False))

    plans = bench.run()

    full = [plan for plan in plans if num_tokens(plan) == bench.limits.max_prefill_tokens]
    assert len(plans) > 100 and len(full) >= 0.95 * len(plans)
    assert max(len(plan.chunks) for plan in plans) > 1


def test_a_step_holds_at_most_max_num_seqs_prompts() -> None:
    bench = _bench(max_num_seqs=3)
    for _ in range(8):
        bench.admit_export(export_job([1, 2], imported=False))

    assert [len(plan.chunks) for plan in bench.run()] == [3, 3, 2]


def test_cancel_frees_unsealed_blocks_and_release_frees_sealed_blocks() -> None:
    bench = _bench()
    running, waiting = bench.admit_export(export_job(range(1, 101))), bench.admit_export(export_job(range(1, 31)))
    bench.step()

    bench.apply(CancelExport(running))
    bench.apply(CancelExport(waiting))

    assert bench.inspect().blocks["leased"] == 4 and bench.inspect().blocks["held"] == 0
    assert bench.run() == []
    bench.release_export(running)
    bench.assert_none_in_use()


def test_choices_get_a_first_token_each_from_one_prefill() -> None:
    bench = _bench()
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
    bench = _bench()
    ticket_id = bench.admit_export(export_job(range(1, 11), stops=stops, num_committed=num_committed))

    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and finished.tokens[0].finish_reason is expected


def test_prompts_that_are_too_long_empty_or_too_many_are_refused() -> None:
    bench = _bench(num_blocks=10, max_queue=1)
    bench.admit_export(export_job(range(41)))
    bench.admit_export(export_job([]))
    bench.admit_export(export_job([1]))
    bench.admit_export(export_job([2]))

    too_long, empty, full = (refused.error for refused in bench.refused)

    assert isinstance(too_long, WorkerTooSmall) and "41 tokens" in str(too_long) and "holds at most 40" in str(too_long)
    assert isinstance(empty, InvalidRequest)
    assert isinstance(full, QueueFull) and "--max-queue is 1" in str(full)


def test_an_exceeded_deadline_names_the_phase_of_the_prompt() -> None:
    bench = _bench(max_num_seqs=1)
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
    bench = _bench()
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
    bench = _bench()
    ticket_id = bench.admit_export(export_job(range(1, 21), imported=False))
    bench.now_s = 2.0
    _, plan = bench.scheduler.plan(2.0)
    assert plan is not None
    bench.scheduler.complete(plan, bench.runner.run(plan), 3.0)
    bench.now_s = 7.0
    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and (finished.queue_s, finished.prefill_s) == (2.0, 5.0)


def test_a_prompt_with_a_cached_prefix_computes_only_the_rest() -> None:
    bench = _bench()
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
    bench = _bench()
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
    bench = _bench()
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
    bench = _bench(num_blocks=6)
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
    bench = _bench(num_blocks=10, max_prefill_tokens=4)
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
    assert bench.inspect().figures["blocks_evicted"] == 4


def test_tenants_share_no_prefix() -> None:
    bench = _bench()
    for salt, num_cached in (("a", 0), ("b", 0), ("", 0), ("a", 16)):
        ticket_id = bench.admit_export(export_job(range(1, 18), salt=salt))
        bench.run()
        finished = bench.tickets[ticket_id].finished
        assert finished is not None and finished.num_cached == num_cached


def test_blocks_sealed_by_a_cancelled_or_failed_prefill_are_reused_by_the_next() -> None:
    bench = _bench()
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
    bench = _bench(prefix_caching=False)
    for _ in range(2):
        ticket_id = bench.admit_export(export_job(range(1, 31), imported=False))
        bench.run()
        finished = bench.tickets[ticket_id].finished
        assert finished is not None and finished.num_cached == 0
    assert bench.inspect().blocks["free"] == bench.limits.num_blocks


def test_a_prompt_reuses_the_prefix_pulled_for_it() -> None:
    bench = _bench()
    bench.finish_pull(bench.pull(range(1, 17)))

    ticket_id = bench.admit_export(export_job(range(1, 20)))
    (plan,) = bench.run()

    assert num_tokens(plan) == 3
    finished = bench.tickets[ticket_id].finished
    assert finished is not None and finished.num_cached == 16


def test_a_pull_reuses_cached_blocks_and_reserves_no_block_that_a_waiting_prompt_needs() -> None:
    bench = _bench(num_blocks=10, max_num_seqs=1, max_prefill_tokens=4)
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
    bench = _bench(num_blocks=6)
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


def test_a_draining_worker_finishes_begun_prompts_and_refuses_waiting_and_new_ones() -> None:
    bench = _bench(max_prefill_tokens=16)
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
