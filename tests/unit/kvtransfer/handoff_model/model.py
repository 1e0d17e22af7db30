"""The events that can happen next in a world."""

from collections.abc import Iterator

from kvtransfer.protocol import export_machine as exporting
from kvtransfer.protocol.handoff import GUARDS, Guards
from kvtransfer.protocol.import_machine import ImporterPhase
from tests.unit.kvtransfer.handoff_model.machines import EXPORTER, Machines
from tests.unit.kvtransfer.handoff_model.moves import MOVES, compute
from tests.unit.kvtransfer.handoff_model.scenario import (
    CACHED,
    DEAD,
    DECODING,
    DESTROYING,
    FLYING,
    FREE,
    LANDED,
    NOT_BEGUN,
    READ_FAULTS,
    RUNNING,
    STOPPED,
    Label,
    Scenario,
    World,
)
from tests.unit.kvtransfer.handoff_model.world import FAIL, Draft


class Model:
    """The steps of one scenario under the given guards."""

    def __init__(self, scenario: Scenario, guards: Guards = GUARDS) -> None:
        self.machines = Machines(scenario, guards)
        self.blamed: Label = ()  # the step that was tried last

    def first(self) -> World:
        scenario = self.machines.scenario
        exports = tuple(
            self.machines.number_export(exporting.export(EXPORTER, bytes([ticket]), 1, self.machines._policy))
            for ticket in range(len(scenario.blocks))
        )
        num_workers = max(scenario.workers)
        cached = tuple(16 * (ticket + 1) for ticket in range(len(scenario.blocks)) if scenario.cached)
        draft = Draft(
            self.machines,
            (
                (RUNNING,) * (1 + num_workers),
                ((0, ()),) * len(scenario.blocks),
                exports,
                (0,) * scenario.prefill_pool,
                (NOT_BEGUN, NOT_BEGUN),
                ((FREE,) * scenario.decode_pool + (CACHED,) * len(cached),) * num_workers,
                ((0,) * scenario.decode_pool + cached,) * num_workers,
                ((),) * num_workers,
                ((), ()),
                (),
                (),
                (0, 0),
            ),
        )
        if scenario.finished:
            for ticket, num_blocks in enumerate(scenario.blocks):
                for _ in range(num_blocks):
                    compute(draft, ticket)
        draft.begin(0)
        if not scenario.is_retry:
            draft.begin(1)
        return draft.freeze()

    def steps(self, world: World, *, with_faults: bool) -> Iterator[tuple[Label, bool, World]]:
        """Yield every (label of a step, whether it is a fault, world after it). Raises Violation, IllegalMove or
        AssertionError with the label of the step in `blamed`.
        """
        draft = Draft(self.machines, world)
        urgent = list(self._urgent(draft))
        for label in urgent:
            yield label, False, self._take(world, label)
        for label in self._unhurried(draft):
            yield label, False, self._take(world, label)
        for label in self._clocks(draft):
            free = not urgent or label[0] == "renew" or (label[0] == "time" and draft.workers[0] == STOPPED)
            if free or (with_faults and "expiry" in self.machines.scenario.kinds):
                yield label, not free, self._take(world, label)
        if with_faults:
            for label in self._faults(draft):
                yield label, True, self._take(world, label)

    def _take(self, world: World, label: Label) -> World:
        self.blamed = label
        draft = Draft(self.machines, world)
        MOVES[label[0]](draft, *label[1:])
        return draft.freeze()

    def _urgent(self, draft: Draft) -> Iterator[Label]:
        prefill = draft.workers[0] == RUNNING
        for packed in dict.fromkeys(draft.net):
            handoff, to_importer, _ = self.machines.messages[packed >> 1]
            hears = draft.workers[self.machines.scenario.workers[handoff] if to_importer else 0] == RUNNING
            if hears and not (to_importer and draft.recipient(handoff) is None):
                yield "deliver", packed, False
                if packed & 1:
                    yield "deliver", packed, True
        if self.machines.scenario.together:
            yield from self._moments(draft)
        if prefill:
            for ticket, (stage, _) in enumerate(draft.jobs):
                if self.machines.due(draft.exports[ticket])[0]:
                    yield "reap", ticket
                if 0 < stage < self.machines.scenario.blocks[ticket]:
                    yield "compute", ticket
            queued = next((t for t, (stage, _) in enumerate(draft.jobs) if stage == 0), None)
            if queued is not None and len(draft.free_remote()) >= self.machines.scenario.blocks[queued]:
                yield "compute", queued
        for handoff in (0, 1):
            if draft.workers[self.machines.scenario.workers[handoff]] != RUNNING:
                continue
            if draft.granted[handoff]:
                yield "reserved", handoff
            if draft.imports[handoff] == DECODING:
                yield "decoded", handoff
            if draft.known[handoff] & DESTROYING:
                yield "destroyed", handoff
        for read in draft.reads:
            if draft.workers[self.machines.scenario.workers[read.handoff]] == RUNNING and (
                prefill or read.status == LANDED
            ):
                yield "land", read

    def _unhurried(self, draft: Draft) -> Iterator[Label]:
        for worker, status in enumerate(draft.workers):
            if status == STOPPED:
                yield "wake", worker
        for read in draft.reads:
            running = draft.workers[self.machines.scenario.workers[read.handoff]] == RUNNING
            if read.status != LANDED and not (running and draft.workers[0] == RUNNING):
                yield "land", read
            if read.status == FLYING and running and draft.workers[0] == DEAD:
                yield "report", read
        if self._may_reissue(draft):
            yield ("reissue",)

    def _may_reissue(self, draft: Draft) -> bool:
        machines = self.machines
        return (
            machines.scenario.is_retry
            and draft.imports[1] == NOT_BEGUN
            and draft.workers[0] == RUNNING == draft.workers[machines.scenario.workers[1]]
            and (machines.scenario.hedged or draft.has_failed(0))
            and exporting.can_reissue(machines.exports[draft.exports[0]], 2, machines.guards)
        )

    def _clocks(self, draft: Draft) -> Iterator[Label]:
        if draft.workers[0] != DEAD:
            for ticket, number in enumerate(draft.exports):
                if self.machines.due(number)[1]:
                    yield "time", ticket
        for handoff, number in enumerate(draft.imports):
            if number < 0 or draft.workers[self.machines.scenario.workers[handoff]] != RUNNING:
                continue
            renews, times_out = self.machines.waits(number)
            if renews:
                yield "renew", handoff
            if times_out:
                yield "timeout", handoff

    def _moments(self, draft: Draft) -> Iterator[Label]:
        for handoff, number in enumerate(draft.imports):
            hears = number >= 0 and draft.workers[self.machines.scenario.workers[handoff]] == RUNNING
            if hears and len(self.machines.moment(handoff, draft.net)) > 1:
                yield "moment", handoff

    def _faults(self, draft: Draft) -> Iterator[Label]:
        kinds = self.machines.scenario.kinds
        if "loss" in kinds:
            for packed in dict.fromkeys(draft.net):
                if self.machines.messages[packed >> 1][2] is not None:
                    yield "lose", packed
        if "cancel" in kinds:
            yield from self._cancels(draft)
        for worker, status in enumerate(draft.workers):
            if "stop" in kinds and status == RUNNING:
                yield "stop", worker
            if "death" in kinds and status != DEAD:
                yield "die", worker
        for read in draft.reads:
            if read.status == FLYING and draft.workers[self.machines.scenario.workers[read.handoff]] == RUNNING:
                for kind in sorted(kinds & READ_FAULTS):
                    yield kind, read
        if "break" in kinds:
            for handoff, number in enumerate(draft.imports):
                if number >= 0:
                    yield "sever", handoff

    def _cancels(self, draft: Draft) -> Iterator[Label]:
        machines = self.machines
        for handoff, number in enumerate(draft.imports):
            is_running = draft.workers[machines.scenario.workers[handoff]] == RUNNING
            if number >= 0 and is_running and machines.imports[number].phase is not ImporterPhase.DRAINING:
                yield "cancel", handoff
        for ticket, (stage, _) in enumerate(draft.jobs):
            if draft.workers[0] == RUNNING and stage >= 0:
                before = draft.exports[ticket]
                if stage < machines.scenario.blocks[ticket] or machines.export_step(before, FAIL)[0] != before:
                    yield "abort", ticket

    def is_good_end(self, world: World) -> bool:
        """Return whether no import or read is live and all blocks of the living workers are free."""
        draft = Draft(self.machines, world)
        if any(number >= 0 or number == DECODING for number in draft.imports) or draft.reads:
            return False
        if draft.workers[0] != DEAD and len(draft.free_remote()) != self.machines.scenario.prefill_pool:
            return False
        for worker, (owners, claims) in enumerate(zip(draft.owners, draft.claims, strict=True), 1):
            if draft.workers[worker] != DEAD and (claims or any(owner not in (FREE, CACHED) for owner in owners)):
                return False
        return True
