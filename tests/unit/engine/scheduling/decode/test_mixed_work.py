"""Tests of a scheduler with work of both destinations: sequences that are decoded here, and prompts for export."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cluster.errors import Cancelled, DeadlineExceeded, Draining, QueueFull, StepFailed
from cluster.messages import TenantShare
from cluster.settings.worker_settings import SCHEDULING_POLICIES
from engine.scheduling.commands import CancelExport, DrainExports, Sealed
from tests.examples import num_examples
from tests.unit.engine.rigs.ahead_bench import AheadBench
from tests.unit.engine.rigs.decode_schedules import AnySchedule
from tests.unit.engine.rigs.export_bench import ExportBench, export_job, limits
from tests.unit.engine.rigs.fake_paged_runner import num_tokens
from tests.unit.engine.rigs.scheduler_bench import SchedulerBench, known_lengths
from tests.unit.engine.scheduling.decode.test_decode_ahead import Play


class _AnyMix(AnySchedule):
    """The schedules of sequences, with exports and pulls among them, over the same small pools."""

    @rule(
        num_shared=st.integers(0, 10),
        rest=st.lists(st.integers(1, 49), min_size=1, max_size=6),
        num_choices=st.integers(1, 3),
        is_imported=st.booleans(),
        is_patient=st.booleans(),
        standing=st.tuples(st.integers(-1, 1), st.booleans()),
    )
    def admit_export(
        self,
        num_shared: int,
        rest: list[int],
        num_choices: int,
        is_imported: bool,
        is_patient: bool,
        standing: tuple[int, bool],
    ) -> None:
        self.bench.admit_export(
            export_job(
                [*range(1, num_shared + 1), *rest],
                num_choices=num_choices,
                imported=is_imported,
                timeout_s=1e6 if is_patient else 8.0,
                priority=standing[0],
                is_batch=standing[1],
            )
        )

    @precondition(lambda self: self.bench.tickets)
    @rule(data=st.data())
    def cancel_export(self, data: st.DataObject) -> None:
        ticket_id = data.draw(st.sampled_from(list(self.bench.tickets)))
        was_live = self.bench.tickets[ticket_id].is_live
        self.bench.apply(CancelExport(ticket_id))
        assert isinstance(self.bench.tickets[ticket_id].error, Cancelled) or not was_live

    @precondition(lambda self: self.bench.tickets)
    @rule(data=st.data())
    def release_export(self, data: st.DataObject) -> None:
        self.bench.release_export(data.draw(st.sampled_from(list(self.bench.tickets))))

    @rule(num_tokens=st.integers(1, 12))
    def pull(self, num_tokens: int) -> None:
        size = self.bench.limits.block_size
        if num_tokens >= size:
            self.bench.pull(range(1, num_tokens // size * size + 1))

    @precondition(lambda self: self.bench.pulls)
    @rule(data=st.data())
    def finish_pull(self, data: st.DataObject) -> None:
        self.bench.finish_pull(data.draw(st.sampled_from(list(self.bench.pulls))))

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            _end(self.bench)


TestAnyMixGivesSerialTokensKeepsLeasedBlocksAndLeaksNone = _AnyMix.TestCase
TestAnyMixGivesSerialTokensKeepsLeasedBlocksAndLeaksNone.settings = settings(
    max_examples=num_examples(suite=33, search=250), stateful_step_count=40
)


class _MixedPlay(Play):
    """Random calls of every command of both destinations, between and during steps that are planned ahead or not."""

    @property
    def ways(self) -> tuple[Callable[[], None], ...]:
        return (
            *super().ways,
            *(self.export, self.export, self.release_export, self.release_export, self.cancel_export),
        )

    def export(self) -> None:
        dice = self.dice
        shared = range(1, dice.randint(1, 11))
        self.bench.admit_export(
            export_job(
                [*shared, *(dice.randint(1, 49) for _ in range(dice.randint(1, 6)))],
                num_choices=dice.choice([1, 1, 2]),
                imported=dice.random() < 0.8,
                timeout_s=dice.choice([1e6, 1e6, 12.0]),
                priority=dice.randint(-1, 1),
                is_batch=dice.random() < 0.2,
            )
        )

    def release_export(self) -> None:
        if self.bench.tickets:
            self.bench.release_export(self.dice.choice(list(self.bench.tickets)))

    def cancel_export(self) -> None:
        if self.bench.tickets:
            self.bench.settle_if_all_waits()
            self.bench.apply(CancelExport(self.dice.choice(list(self.bench.tickets))))

    def end(self) -> None:
        self.end_moves()
        _end(self.bench)


def _end(bench: SchedulerBench) -> None:
    """End all work that waits for another worker, and check that every sequence ends and no block is in use."""
    for handoff in list(bench.handoffs.values()):
        if handoff.handoff_id in bench.handoffs:
            bench.discard(handoff)
    bench.end_quarantine()
    bench.end_exports()
    bench.end_all()


@pytest.mark.parametrize("place", range(4))
def test_mixed_work_planned_ahead_gives_serial_tokens_keeps_leased_blocks_and_leaks_none(place: int) -> None:
    for seed in range(place, num_examples(suite=20, search=48), 4):
        _MixedPlay(seed).play(90)


def test_a_step_carries_decodes_and_the_chunk_of_an_export() -> None:
    bench = SchedulerBench(limits(max_prefill_tokens=8))
    (handle,) = bench.admit(bench.job(range(1, 4), max_tokens=9))
    bench.step()
    ticket_id = bench.admit_export(export_job(range(10, 30)))

    plans = [bench.step() for _ in range(3)]

    assert [[len(chunk.token_ids) for chunk in plan.chunks] for plan in plans if plan] == [[1, 7], [1, 7], [1, 6]]
    assert bench.tickets[ticket_id].finished is not None
    assert len(bench.choices[handle].output) == 4


def test_an_export_never_loses_blocks_to_a_decode_that_grows() -> None:
    """The decode waits for a block until the ticket is released, and then continues its output."""
    bench = SchedulerBench(limits(num_blocks=5), prefix_caching=False)
    (handle,) = bench.admit(bench.job(range(1, 8), max_tokens=9))
    bench.step()
    ticket_id = bench.admit_export(export_job(range(10, 22)))
    bench.run()

    assert bench.tickets[ticket_id].finished is not None and bench.live == [handle]
    assert bench.inspect().figures["preemptions"] == 0
    bench.release_export(ticket_id)
    bench.run()
    bench.assert_idle()


def test_an_export_of_the_batch_class_loses_its_slot_but_no_block_to_a_waiting_sequence() -> None:
    bench = SchedulerBench(limits(num_blocks=6, max_num_seqs=1, max_prefill_tokens=4), prefix_caching=False)
    ticket_id = bench.admit_export(export_job(range(10, 27), is_batch=True))
    bench.step()
    bench.admit(bench.job(range(1, 10), max_tokens=2))
    bench.step()
    held = bench.inspect()
    bench.run()

    assert held.blocks["leased"] + held.blocks["held"] == 5 and held.figures["displaced"] == 1
    assert bench.inspect().figures["preemptions"] == 0
    assert bench.tickets[ticket_id].finished is not None
    bench.release_export(ticket_id)
    bench.run()
    bench.assert_idle()


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_a_decode_that_cannot_grow_gives_up_its_only_slot_to_an_export(policy: str) -> None:
    """The export has blocks and no slot, the decode has the slot and lacks a block: each would wait for the other."""
    bench = SchedulerBench(limits(num_blocks=6, max_num_seqs=1, max_prefill_tokens=4), False, policy=policy)
    ticket_id = bench.admit_export(export_job(range(10, 25), is_batch=True))
    bench.step()
    (handle,) = bench.admit(bench.job(range(1, 8), max_tokens=9))
    bench.run()

    assert bench.tickets[ticket_id].finished is not None
    assert bench.live == [handle] and bench.choices[handle].output
    bench.release_export(ticket_id)
    bench.run()
    bench.assert_idle()


def test_an_export_leaves_the_watermark_to_decodes_and_starts_in_an_empty_pool_of_its_size() -> None:
    bench = SchedulerBench(limits(num_blocks=10, watermark=0.3), prefix_caching=False)
    (handle,) = bench.admit(bench.job(range(1, 8), max_tokens=6))
    bench.step()
    beside = bench.admit_export(export_job(range(10, 34)))
    bench.step()
    assert bench.tickets[beside].is_live and not bench.tickets[beside].sealed

    bench.cancel({handle})
    bench.run()
    assert bench.tickets[beside].finished is not None
    bench.release_export(beside)
    whole = bench.admit_export(export_job(range(10, 50)))
    bench.run()
    assert bench.tickets[whole].finished is not None


def test_a_sequence_decoded_here_reuses_the_blocks_of_an_export_and_the_other_way_round() -> None:
    bench = SchedulerBench(limits())
    bench.release_export(bench.admit_export(export_job(range(1, 18))))
    bench.run()
    bench.admit(bench.job(range(1, 18), max_tokens=8))
    bench.run()
    ticket_id = bench.admit_export(export_job(range(1, 18)))
    bench.run()

    finished = bench.tickets[ticket_id].finished
    assert finished is not None and finished.num_cached == 16
    assert bench.inspect().figures["tokens_cached"] == 32


def test_a_failing_step_ends_its_exports_and_its_sequences() -> None:
    bench = SchedulerBench(limits())
    (handle,) = bench.admit(bench.job(range(1, 4)))
    ticket_id = bench.admit_export(export_job(range(10, 15)))

    bench.step(RuntimeError("the device is gone"))

    assert isinstance(bench.tickets[ticket_id].error, StepFailed)
    assert bench.choices[handle].ended == "failed"
    bench.release_export(ticket_id)  # its block was announced before the step failed
    bench.assert_idle()


def test_a_deadline_ends_an_export_and_spares_the_sequences_beside_it() -> None:
    bench = SchedulerBench(limits())
    ticket_id = bench.admit_export(export_job(range(10, 60), timeout_s=2.0))
    (handle,) = bench.admit(bench.job(range(1, 4)))
    bench.step()
    bench.now_s = 2.0
    bench.run()

    assert isinstance(bench.tickets[ticket_id].error, DeadlineExceeded)
    assert bench.choices[handle].ended == "length"


def test_draining_exports_refuses_new_ones_and_leaves_sequences_decoded_here() -> None:
    bench = SchedulerBench(limits(max_num_seqs=1))
    (handle,) = bench.admit(bench.job(range(1, 4)))
    bench.step()
    waiting = bench.admit_export(export_job(range(10, 15)))
    bench.apply(DrainExports())
    bench.admit_export(export_job(range(10, 15)))
    (later,) = bench.admit(bench.job(range(1, 4)))
    bench.run()

    assert isinstance(bench.tickets[waiting].error, Draining)
    assert [type(refused.error) for refused in bench.refused] == [Draining]
    assert bench.choices[handle].ended == bench.choices[later].ended == "length"


def test_the_queue_is_bounded_for_both_destinations_together() -> None:
    bench = SchedulerBench(limits(max_num_seqs=1, max_queue=2))
    bench.admit(bench.job(range(1, 4)))
    bench.step()
    bench.admit(bench.job(range(1, 4)))
    bench.admit_export(export_job([1, 2]))

    bench.admit_export(export_job([3, 4]))
    bench.admit(bench.job(range(1, 4)))

    assert [type(refused.error) for refused in bench.refused] == [QueueFull]
    assert [type(failure.error) for failure in bench.failures] == [QueueFull]


def test_the_flood_of_one_tenant_fills_no_queue_for_another_one() -> None:
    """Neither of prompts for either destination, nor of hand-offs that wait for blocks."""
    flood, other, third = (TenantShare(name) for name in ("flood", "other", "third"))
    for admit in (_admit_local, _admit_export, _admit_handoff):
        bench = SchedulerBench(limits(max_num_seqs=1, max_queue=4, num_blocks=4))
        bench.admit(bench.job(range(1, 14), tenant=flood))
        bench.step()  # it has all blocks and the slot
        for tenant, is_admitted in [*[(flood, True)] * 4, (flood, False), (other, True), (third, False)]:
            assert admit(bench, tenant) is is_admitted, f"{admit.__name__}: {tenant.label}"


def _admit_local(bench: SchedulerBench, tenant: TenantShare) -> bool:
    num_failed = len(bench.failures)
    bench.admit(bench.job(range(1, 4), tenant=tenant))
    return len(bench.failures) == num_failed


def _admit_export(bench: SchedulerBench, tenant: TenantShare) -> bool:
    num_refused = len(bench.refused)
    bench.admit_export(export_job([1, 2], tenant=tenant))
    return len(bench.refused) == num_refused


def _admit_handoff(bench: SchedulerBench, tenant: TenantShare) -> bool:
    num_refused = len(bench.refused_handoffs)
    bench.reserve(bench.job(range(1, 4), tenant=tenant))
    return len(bench.refused_handoffs) == num_refused


def test_choices_of_an_export_use_one_slot_and_one_tail() -> None:
    bench = ExportBench(limits(num_blocks=3, max_num_seqs=1))
    ticket_id = bench.admit_export(export_job(range(1, 11), num_choices=5))
    (plan,) = bench.run()

    assert num_tokens(plan) == 10 and len(plan.chunks) == 1
    finished = bench.tickets[ticket_id].finished
    assert finished is not None and len(finished.tokens) == 5


def test_blocks_of_an_export_are_announced_while_the_next_step_runs() -> None:
    bench = AheadBench(limits(num_blocks=32), lengths=known_lengths())
    ticket_id = bench.admit_export(export_job(range(1, 40)))
    bench.step()

    assert bench.flying and bench.tickets[ticket_id].sealed
    bench.run()
    assert bench.plans_ahead > 0 and bench.tickets[ticket_id].finished is not None


def test_the_last_step_of_an_export_is_not_followed_by_a_decode() -> None:
    bench = AheadBench(limits())
    ticket_id = bench.admit_export(export_job(range(1, 5)))
    events, plan = bench.scheduler.plan(0.0)
    assert plan is not None and not events
    assert bench.scheduler.plan_ahead(0.0) == ((), None)
    told = bench.scheduler.complete(plan, bench.runner.run(plan), 0.0)
    assert isinstance(told[0], Sealed) and told[0].ticket_id == ticket_id
