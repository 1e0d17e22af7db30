"""Tests that under any schedule of exports leased blocks stay and none is lost."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cluster.errors import (
    Cancelled,
)
from cluster.messages import TenantShare
from cluster.settings.worker_settings import SCHEDULING_POLICIES
from engine.scheduling.commands import (
    CancelExport,
    Quiet,
)
from tests.examples import num_examples
from tests.unit.engine.rigs.decode_schedules import TENANTS
from tests.unit.engine.rigs.export_bench import export_bench, export_job


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
        self.bench = export_bench(
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
        tenant=TENANTS,
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
        tenant: TenantShare,
    ) -> None:
        """Submit prompts with equal beginnings."""
        job = export_job(
            [*range(1, num_shared + 1), *token_ids],
            num_choices=num_choices,
            imported=imported,
            timeout_s=1e6 if patient else 8.0,
            salt=salt,
            priority=priority,
            is_batch=priority > 0,
            tenant=tenant,
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
TestAnyScheduleKeepsLeasedBlocksAndLeaksNone.settings = settings(
    max_examples=num_examples(suite=33, search=250), stateful_step_count=40
)
