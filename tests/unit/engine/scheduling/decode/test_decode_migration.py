"""Sequences that are frozen, then moved or thawed: their tokens are those of a serial run, and no block leaks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cluster.errors import DeadlineExceeded, DuplicateRequest, NotFound
from cluster.messages import FinishReason
from engine.scheduling.commands import Frozen, Thaw, ThawRefused
from tests.examples import num_examples
from tests.unit.engine.rigs.decode_schedules import AnySchedule
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.scheduler_bench import ROUTER, SchedulerBench


class _AnyMigration(AnySchedule):
    """The schedules of decode_schedules.py, with sequences that are frozen, read, thawed or cancelled at any moment."""

    def frozen_handles(self) -> list[int]:
        batch = self.bench.scheduler._batch
        return [handle for handle in self.bench.live if batch.is_frozen(self.bench.sequence(handle))]

    def decoding_handles(self) -> list[int]:
        batch = self.bench.scheduler._batch
        return [handle for handle in self.bench.live if batch.can_freeze(self.bench.sequence(handle))]

    @precondition(lambda self: self.decoding_handles())
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        assert self.bench.freeze(data.draw(st.sampled_from(self.decoding_handles()))) is not None

    @precondition(lambda self: self.decoding_handles())
    @rule(data=st.data())
    def freeze_and_thaw(self, data: st.DataObject) -> None:
        """Freeze and thaw a sequence, which continues on this worker while the ticket's reader still reads."""
        handle = data.draw(st.sampled_from(self.decoding_handles()))
        self.bench.freeze(handle)
        self.bench.thaw(handle)
        self.bench.step()

    @precondition(lambda self: self.bench.live)
    @rule(data=st.data())
    def freeze_what_does_not_decode(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from([*self.bench.live, 10_000]))
        assert handle in self.decoding_handles() or self.bench.freeze(handle) is None

    @precondition(lambda self: self.frozen_handles())
    @rule(data=st.data())
    def thaw(self, data: st.DataObject) -> None:
        self.bench.thaw(data.draw(st.sampled_from(self.frozen_handles())))

    @precondition(lambda self: self.bench.frozen)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.bench.release(data.draw(st.sampled_from(list(self.bench.frozen))))

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            for ticket_id in list(self.bench.frozen):
                self.bench.release(ticket_id)
            for handle in self.frozen_handles():
                self.bench.thaw(handle)
        super().teardown()


TestSequencesThatMoveGiveTheirSerialTokensAndLeakNoBlock = _AnyMigration.TestCase
TestSequencesThatMoveGiveTheirSerialTokensAndLeakNoBlock.settings = settings(
    max_examples=num_examples(suite=33, search=250), stateful_step_count=50
)


def _running(bench: SchedulerBench, *, prompt: int = 6, num_choices: int = 1, max_tokens: int = 20) -> list[int]:
    """Return choices that have drawn two tokens."""
    handles = bench.admit(bench.job(range(1, 1 + prompt), num_choices=num_choices, max_tokens=max_tokens))
    bench.step()
    bench.step()
    return handles


def _frozen(bench: SchedulerBench, handle: int) -> Frozen:
    frozen = bench.freeze(handle)
    assert frozen is not None
    return frozen


def test_a_frozen_sequence_is_in_no_step_and_keeps_its_blocks() -> None:
    bench = SchedulerBench(limits())
    (moving,) = _running(bench)
    (staying,) = bench.admit(bench.job([9, 8], max_tokens=9))

    frozen = _frozen(bench, moving)
    plans = bench.run()

    assert bench.choices[staying].ended == FinishReason.LENGTH
    assert len(bench.choices[moving].output) == 2 == frozen.num_output
    assert all(len(plan.chunks) == 1 for plan in plans)
    figures = bench.inspect().figures
    assert (figures["frozen"], figures["running"], figures["leased_tickets"]) == (1, 0, 1)
    assert bench.inspect().blocks["leased"] == 2


@pytest.mark.parametrize(("prompt", "num_valid"), [(6, 3), (7, 0)])
def test_a_frozen_sequence_leases_all_computed_tokens(prompt: int, num_valid: int) -> None:
    """The last drawn token is not leased: the worker that continues the sequence computes its KV."""
    bench = SchedulerBench(limits())
    frozen = _frozen(bench, *_running(bench, prompt=prompt))

    assert len(frozen.token_ids) == prompt + 1
    assert (frozen.tail.num_valid if frozen.tail else 0) == num_valid
    assert len(frozen.sealed_block_ids) == (prompt + 1) // 4


def test_a_cancelled_frozen_sequence_is_freed_when_its_reader_ends() -> None:
    bench = SchedulerBench(limits())
    (moving,) = _running(bench)
    frozen = _frozen(bench, moving)

    bench.cancel([moving])
    assert bench.inspect().blocks["leased"] == 2
    bench.read(frozen)
    bench.release(frozen.ticket_id)

    bench.assert_idle()


def test_a_frozen_sequence_keeps_its_blocks_when_its_lease_ends() -> None:
    bench = SchedulerBench(limits())
    (moving,) = _running(bench)
    bench.release(_frozen(bench, moving).ticket_id)

    assert bench.inspect().blocks["held"] == 2
    bench.thaw(moving)
    bench.run()
    bench.assert_idle()


def test_a_thawed_sequence_continues_under_its_new_handle_without_copies() -> None:
    bench = SchedulerBench(limits())
    (moving,) = _running(bench, max_tokens=9)
    bench.release(_frozen(bench, moving).ticket_id)

    new_handle = bench.thaw(moving)
    plans = bench.run()

    assert bench.choices[new_handle].ended == FinishReason.LENGTH
    assert not any(plan.copies for plan in plans)
    bench.assert_idle()


def test_a_thawed_sequence_copies_its_tail_while_an_importer_still_reads() -> None:
    bench = SchedulerBench(limits())
    (moving,) = _running(bench)
    frozen = _frozen(bench, moving)

    bench.thaw(moving)
    plan = bench.step()

    assert plan is not None and frozen.tail is not None
    assert [copy.source for copy in plan.copies] == [frozen.tail.block_id]
    bench.run()
    bench.read(frozen)
    bench.release(frozen.ticket_id)
    bench.assert_idle()


def test_a_younger_sequence_is_preempted_when_a_thaw_lacks_a_block_for_its_tail() -> None:
    bench = SchedulerBench(limits(num_blocks=3))
    (moving,) = _running(bench, prompt=2, max_tokens=3)
    (younger,) = bench.admit(bench.job(range(1, 8), max_tokens=2))
    frozen = _frozen(bench, moving)
    bench.step()

    new_handle = bench.thaw(moving)
    bench.run()

    assert bench.inspect().figures["preemptions"] == 1
    assert {bench.choices[handle].ended for handle in (new_handle, younger)} == {FinishReason.LENGTH}
    bench.release(frozen.ticket_id)
    bench.assert_idle()


def test_choices_of_one_prompt_move_one_by_one() -> None:
    bench = SchedulerBench(limits())
    handles = _running(bench, prompt=10, num_choices=3, max_tokens=12)

    first, second = _frozen(bench, handles[0]), _frozen(bench, handles[1])

    assert first.sealed_block_ids == second.sealed_block_ids  # one block, two leases
    bench.cancel([handles[0]])
    bench.release(first.ticket_id)
    bench.read(second)
    bench.thaw(handles[1])
    bench.release(second.ticket_id)
    bench.run()
    bench.assert_idle()


def test_a_choice_can_be_frozen_one_step_after_its_tail_is_its_own() -> None:
    bench = SchedulerBench(limits())
    handles = bench.admit(bench.job(range(1, 11), num_choices=3, max_tokens=12))
    bench.step()

    assert bench.freeze(handles[1]) is None  # its tail is still the first one's, which writes to it next
    shared = _frozen(bench, handles[0])
    bench.step()

    assert bench.freeze(handles[1]) is not None
    bench.read(shared)


def test_a_freeze_or_thaw_of_a_sequence_that_does_not_decode_is_refused() -> None:
    bench = SchedulerBench(limits(max_num_seqs=1, max_prefill_tokens=4))
    (running,) = bench.admit(bench.job([1, 2], max_tokens=30))
    bench.step()
    (waiting,) = bench.admit(bench.job([3, 4]))
    _frozen(bench, running)
    (prefilling,) = bench.admit(bench.job(range(1, 20)))
    bench.cancel([waiting])
    bench.step()

    for handle in (running, prefilling, 77):
        assert bench.freeze(handle) is None
    refused = bench.thaw(prefilling)

    assert refused == prefilling
    assert all(isinstance(refusal.error, NotFound) for refusal in bench.refused_moves)
    assert "does not decode here" in str(bench.refused_moves[0].error)


def test_a_prompt_that_lacks_its_last_token_cannot_be_frozen() -> None:
    bench = SchedulerBench(limits(max_prefill_tokens=4))
    handles = bench.admit(bench.job(range(1, 6), num_choices=2, max_tokens=4))
    bench.step()

    assert all(bench.freeze(handle) is None for handle in handles)
    bench.run()
    bench.assert_idle()


def test_a_sequence_that_ended_before_its_freeze_is_not_found() -> None:
    bench = SchedulerBench(limits())
    (handle,) = _running(bench, max_tokens=2)

    assert bench.choices[handle].ended == FinishReason.LENGTH
    assert bench.freeze(handle) is None
    bench.assert_idle()


def test_a_thaw_to_a_handle_in_use_leaves_the_sequence_frozen() -> None:
    bench = SchedulerBench(limits())
    (moving,), (other,) = _running(bench), _running(bench)
    frozen = _frozen(bench, moving)

    (refused,) = bench.scheduler.apply(Thaw(ROUTER, moving, other), 0.0)

    assert isinstance(refused, ThawRefused) and isinstance(refused.error, DuplicateRequest)
    bench.release(frozen.ticket_id)
    bench.thaw(moving)
    bench.run()
    bench.assert_idle()


def test_a_deadline_ends_a_frozen_sequence_and_a_thawed_one_under_its_new_handle() -> None:
    bench = SchedulerBench(limits())
    frozen_one, thawed_one = (
        bench.admit(bench.job([1, 2, 3], max_tokens=50, timeout_s=timeout_s))[0] for timeout_s in (5.0, 6.0)
    )
    bench.step()
    for handle in (frozen_one, thawed_one):
        bench.release(_frozen(bench, handle).ticket_id)
    new_handle = bench.thaw(thawed_one)

    bench.now_s = 10.0
    assert bench.step() is None

    assert [failed.handles for failed in bench.failures] == [(frozen_one,), (new_handle,)]
    assert all(isinstance(failed.error, DeadlineExceeded) for failed in bench.failures)
    bench.assert_idle()


def test_a_thawed_sequence_waits_when_its_slot_is_in_use() -> None:
    bench = SchedulerBench(limits(max_num_seqs=1))
    (moving,) = _running(bench)
    bench.release(_frozen(bench, moving).ticket_id)
    (newcomer,) = bench.admit(bench.job([7, 7], max_tokens=4))
    bench.step()

    new_handle = bench.thaw(moving)
    bench.step()
    assert len(bench.choices[new_handle].output) == 2
    bench.run()

    assert {bench.choices[handle].ended for handle in (new_handle, newcomer)} == {FinishReason.LENGTH}
    bench.assert_idle()


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_a_sequence_moved_to_another_worker_draws_the_tokens_of_a_serial_run(num_tokens: int) -> None:
    """The lengths cover every distance from a block's boundary."""
    source, target = SchedulerBench(limits()), SchedulerBench(limits())
    (moving,) = source.admit(source.job(range(1, 6), max_tokens=20))
    for _ in range(num_tokens):
        source.step()
    frozen = _frozen(source, moving)

    arrived = target.receive(source, frozen, moving)
    source.cancel([moving])
    source.release(frozen.ticket_id)
    target.run()

    job = source.choices[moving].job
    expected = source.serial(job.prompt_token_ids, job.stops, seed=moving, num_output=20)
    assert tuple(target.choices[arrived].output) == expected
    source.assert_idle()
    target.assert_idle()
