"""How deep hand-offs wait for exports of their own worker, and which of them is refused in a cycle."""

from dataclasses import dataclass, field

import pytest

from cluster.errors import HandOffFailed, HandOffReason
from cluster.messages import MAX_WAIT_DEPTH, NO_WAIT, ExportWait, Role
from engine.scheduling.commands import Event, ImporterWaits, SetRole, WaitsForExports
from tests.unit.engine.rigs.export_bench import export_job, limits
from tests.unit.engine.rigs.scheduler_bench import HandOff, SchedulerBench

_NUM_BLOCKS = 12  # of four tokens
_CYCLE_DEPTH = MAX_WAIT_DEPTH // 2


@dataclass
class _Bench(SchedulerBench):
    waits: dict[int, ExportWait] = field(default_factory=dict)  # the last one reported, by hand-off

    def export(self, first: int, num_blocks: int) -> bytes:
        """Compute a prompt, which another worker is to import."""
        ticket_id = self.admit_export(export_job(range(first, first + 4 * num_blocks)))
        self.run()
        assert self.tickets[ticket_id].finished is not None
        return ticket_id

    def wait_for(self, num_blocks: int) -> HandOff:
        handoff = self.reserve(self.job(range(500, 500 + 4 * num_blocks)))
        assert handoff.block_ids is None
        return handoff

    def report(self, ticket_id: bytes, depth: int, mark: int = 0) -> None:
        self.apply(ImporterWaits(ticket_id, ExportWait(depth, mark)))

    def wait_of(self, handoff: HandOff) -> ExportWait:
        return self.waits.get(handoff.handoff_id, NO_WAIT)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, WaitsForExports):
            self.waits[event.handoff_id] = event.wait
        super()._on_event(event)


@pytest.fixture
def bench() -> _Bench:
    bench = _Bench(limits(num_blocks=_NUM_BLOCKS, max_model_len=4 * _NUM_BLOCKS))
    bench.apply(SetRole(Role.PREFILL))
    return bench


def test_a_wait_is_one_deeper_than_those_of_the_importers_whose_reads_make_enough_room(bench: _Bench) -> None:
    near, far = bench.export(1, 4), bench.export(101, 4)
    small, large = bench.wait_for(7), bench.wait_for(9)
    assert bench.wait_of(small).depth == bench.wait_of(large).depth == 1

    bench.report(far, 5)
    assert bench.wait_of(small).depth == 1  # the other export makes enough room
    bench.report(near, 3)
    assert bench.wait_of(small).depth == bench.wait_of(large).depth == 4

    bench.discard(small)
    assert bench.wait_of(large).depth == 6  # needs both
    bench.release_export(far)
    bench.release_export(near)
    assert large.block_ids is not None


def test_a_hand_off_that_waits_for_running_sequences_does_not_wait_for_exports(bench: _Bench) -> None:
    ticket_id = bench.export(1, 2)
    (handle,) = bench.admit(bench.job(range(300, 320), max_tokens=8))
    bench.step()
    handoff = bench.wait_for(8)
    bench.report(ticket_id, 9)
    assert bench.wait_of(handoff) == NO_WAIT

    bench.cancel([handle])
    assert handoff.block_ids is not None


def test_a_hand_off_behind_a_prompt_that_exports_hold_up_waits_for_them_too(bench: _Bench) -> None:
    ticket_id = bench.export(1, 4)
    bench.admit(bench.job(range(300, 336)))  # nine blocks
    bench.step()
    handoff = bench.wait_for(5)
    bench.report(ticket_id, 2)
    assert bench.wait_of(handoff).depth == 3


def test_the_worker_that_gets_its_own_mark_back_refuses_its_first_hand_off(bench: _Bench) -> None:
    ticket_id = bench.export(1, 6)
    first, second = bench.wait_for(7), bench.wait_for(8)
    mark = bench.wait_of(first).mark
    bench.report(ticket_id, _CYCLE_DEPTH, mark + 1)
    assert bench.wait_of(first) == ExportWait(_CYCLE_DEPTH + 1, mark + 1) and not bench.refused_handoffs

    bench.report(ticket_id, _CYCLE_DEPTH, mark)
    (refused,) = bench.refused_handoffs
    assert refused.handoff_id == first.handoff_id and isinstance(refused.error, HandOffFailed)
    assert refused.error.handoff_reason is HandOffReason.NOT_ENOUGH_BLOCKS
    bench.run()
    assert bench.wait_of(second).depth == 1, "the reports of a cycle that has ended count"
    assert bench.inspect().violation == ""


def test_a_cycle_ends_although_a_mark_has_outlived_its_request(bench: _Bench) -> None:
    ticket_id = bench.export(1, 6)
    handoff = bench.wait_for(7)
    bench.report(ticket_id, MAX_WAIT_DEPTH - 1, (1 << 32) - 1)
    assert bench.wait_of(handoff).depth == MAX_WAIT_DEPTH and not bench.refused_handoffs
    bench.report(ticket_id, MAX_WAIT_DEPTH, (1 << 32) - 1)
    assert len(bench.refused_handoffs) == 1
