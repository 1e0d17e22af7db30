"""Random work for a decode worker's scheduler: arrivals, hand-offs, cancels, failing steps and deadlines."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cluster.messages import NO_TENANT, TenantShare
from cluster.service_times import ServiceTimes, StepLimit
from cluster.settings.worker_settings import SCHEDULING_POLICIES
from engine.scheduling.commands import Quiet
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.scheduler_bench import SPEEDS, HandOff, SchedulerBench, known_lengths


def _prompt(num_shared: int, rest: list[int]) -> list[int]:
    return [*range(1, num_shared + 1), *rest] or [1]


# Many begin alike: what one sequence has computed, another one finds.
_PROMPTS = st.builds(_prompt, st.integers(0, 10), st.lists(st.integers(1, 49), max_size=6))
TENANTS = st.sampled_from([NO_TENANT, NO_TENANT, TenantShare("a", 1), TenantShare("b", 3)])
_STANDINGS = st.tuples(st.integers(-1, 1), st.sampled_from([False, False, True]), TENANTS)  # priority, batch class


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
        times=st.sampled_from(SPEEDS),
        target_s=st.sampled_from([0.0, 3.0]),
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
        times: ServiceTimes | None,
        target_s: float,
    ) -> None:
        small = limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_prefill_tokens=max_prefill_tokens,
            watermark=watermark,
            max_queue=5,
            num_swap_slots=num_swap_slots,
        )
        self.bench = SchedulerBench(
            replace(small, step_limit=StepLimit(target_s)),
            wire_dtype=wire_dtype,
            policy=policy,
            lengths=known_lengths() if is_predicting else None,
            draft_period=draft_period,
            times=times,
        )
        # A copy costs as much as four tokens: a sequence with one open block is computed again.
        self.bench.cost.copy_s_per_block = 1.0
        token_s = 9.0 if is_computing_dear else 0.5
        self.bench.cost.compute_s = lambda num_tokens: token_s * num_tokens

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
        standing: tuple[int, bool, TenantShare],
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
            tenant=standing[2],
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
        self,
        prompt: list[int],
        max_tokens: int,
        num_choices: int,
        stops: set[int],
        standing: tuple[int, bool, TenantShare],
    ) -> None:
        priority, is_batch, tenant = standing
        job = self.bench.job(
            prompt,
            max_tokens=max_tokens,
            num_choices=num_choices,
            stops=stops,
            priority=priority,
            is_batch=is_batch,
            tenant=tenant,
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
        """Release all hand-offs and leases, and check that every sequence ends."""
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.run()
        bench.end_all()

    def _granted(self) -> list[HandOff]:
        return [handoff for handoff in self.bench.handoffs.values() if handoff.block_ids is not None]
