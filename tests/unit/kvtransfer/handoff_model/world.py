"""A world while a step changes it: the network, the pools, and the effects that the machines request. Raises Violation
when a promise is broken.
"""

from typing import NamedTuple, TypeVar

from cluster.errors import HandOffReason
from kvtransfer.protocol import export_machine as exporting
from kvtransfer.protocol import import_machine as importing
from kvtransfer.protocol import import_state
from kvtransfer.protocol.import_machine import ImporterPhase
from kvtransfer.protocol.leases import LeasePhase
from tests.unit.kvtransfer.handoff_model.machines import Do, Machines, Post
from tests.unit.kvtransfer.handoff_model.scenario import (
    DEAD,
    DESTROYING,
    ENDED,
    FLYING,
    FREE,
    LANDED,
    LAPSED,
    LOST,
    NOT_BEGUN,
    RUNNING,
    TOLD_VALID,
    Violation,
    World,
)

Value = TypeVar("Value")
FAIL = exporting.Fail(HandOffReason.CANCELLED)


class Read(NamedTuple):
    handoff: int
    remote: tuple[int, ...]
    local: tuple[int, ...]
    status: int = FLYING
    values: tuple[int, ...] = ()  # once it has LANDED


class Draft:
    """A world that is being changed by one step. Its parts are tuples and are replaced, never changed in place."""

    __slots__ = (
        "claims",  # per decode worker: (hand-off, blocks), oldest first
        "contents",  # per decode worker, per block: ticket and place
        "exports",  # per ticket
        "granted",  # per hand-off: block ids on their way to the importer
        "imports",  # per hand-off: a machine's number, or what became of it
        "jobs",  # per ticket: blocks computed (0: queued; -1 - n: failed after n), block ids
        "known",  # per hand-off: LAPSED, TOLD_VALID, DESTROYING
        "machines",
        "net",  # message number * 2 + may still be duplicated
        "owners",  # per decode worker, per block
        "reads",
        "remote",  # per block of the prefill pool: ticket and place, 0 while it is being written
        "workers",  # the prefill worker, then the decode workers
    )

    def __init__(self, machines: Machines, world: World) -> None:
        self.machines = machines
        self.workers: tuple[int, ...]
        self.jobs: tuple[tuple[int, tuple[int, ...]], ...]
        self.exports: tuple[int, ...]
        self.remote: tuple[int, ...]
        self.imports: tuple[int, ...]
        self.owners: tuple[tuple[int, ...], ...]
        self.contents: tuple[tuple[int, ...], ...]
        self.claims: tuple[tuple[tuple[int, int], ...], ...]
        self.granted: tuple[tuple[int, ...], ...]
        self.reads: tuple[Read, ...]
        self.net: tuple[int, ...]
        self.known: tuple[int, ...]
        (
            self.workers,
            self.jobs,
            self.exports,
            self.remote,
            self.imports,
            self.owners,
            self.contents,
            self.claims,
            self.granted,
            self.reads,
            self.net,
            self.known,
        ) = world  # type: ignore[assignment]

    def freeze(self) -> World:
        """Return the world after the step, without state that no later step reads."""
        if self.net:
            self.net = tuple(sorted(filter(self._matters, self.net)))
        if len(self.reads) > 1:
            self.reads = tuple(sorted(self.reads))
        for handoff, number in enumerate(self.imports):
            if (number < -2 and self.known[handoff] & ~LAPSED) or (number == ENDED and self.known[handoff]):
                known = self.known[handoff] & LAPSED if self._is_live(handoff) else 0
                self.known = replaced(self.known, handoff, known)
        return (
            self.workers,
            self.jobs,
            self.exports,
            self.remote,
            self.imports,
            self.owners,
            self.contents,
            self.claims,
            self.granted,
            self.reads,
            self.net,
            self.known,
        )

    def _matters(self, packed: int) -> bool:
        handoff, to_importer, _ = self.machines.messages[packed >> 1]
        if to_importer:
            return self.recipient(handoff) is not None or self._has_successor(handoff)
        if self.workers[0] == DEAD:
            return False
        return self.imports[handoff] >= 0 or self._is_live(handoff)

    def _is_live(self, handoff: int) -> bool:
        return self.workers[0] != DEAD and self.machines.is_live(self.exports[self.machines.tickets[handoff]], handoff)

    def _has_successor(self, handoff: int) -> bool:
        """Return whether a later attempt on the same worker may receive messages that were sent to this one."""
        scenario = self.machines.scenario
        same = scenario.is_retry and handoff == 0 and scenario.workers[0] == scenario.workers[1]
        return same and self.workers[scenario.workers[1]] != DEAD and self.imports[1] == NOT_BEGUN and self._is_live(0)

    def recipient(self, handoff: int) -> int | None:
        """Return the hand-off whose machine receives messages sent to this one."""
        if self.imports[handoff] >= 0:
            return handoff
        scenario = self.machines.scenario
        if scenario.is_retry and handoff == 0 and scenario.workers[0] == scenario.workers[1] and self.imports[1] >= 0:
            return 1
        return None

    def has_failed(self, handoff: int) -> bool:
        number = self.imports[handoff]
        if number >= 0:
            gave_up = self.machines.imports[number].phase is ImporterPhase.DRAINING
            return gave_up or self.workers[self.machines.scenario.workers[handoff]] != RUNNING
        return number in (ENDED, LOST)

    def free_remote(self) -> tuple[int, ...]:
        return self.machines.free_remote(self.jobs, self.exports)

    def begin(self, handoff: int) -> None:
        state, actions = importing.begin(self.machines.plan(handoff), 0.0)
        self.imports = replaced(self.imports, handoff, self.machines.number_import(state))
        self.perform(handoff, self.machines.posted(actions))

    def is_shared(self) -> bool:
        scenario = self.machines.scenario
        return scenario.is_retry and scenario.workers[0] == scenario.workers[1]

    def check_quiet(self, handoff: int) -> None:
        """Raise Violation if a settled hand-off has a read in flight."""
        export = self.machines.exports[self.exports[self.machines.tickets[handoff]]]
        lease = export.leases.find(self.machines.attempts[handoff])
        is_running = lease is not None and lease.phase is LeasePhase.RUNNING and not self.known[handoff] & LAPSED
        if is_running and any(read.handoff == handoff and read.status != LANDED for read in self.reads):
            raise Violation("the blocks were settled, and may be freed, while they are being read")

    def export_time(self, ticket: int, duration_s: float) -> None:
        machines = self.machines
        self.exports = replaced(self.exports, ticket, machines.export_later(self.exports[ticket], duration_s))
        for handoff in (0, 1):
            if machines.tickets[handoff] == ticket:
                lease = machines.exports[self.exports[ticket]].leases.find(machines.attempts[handoff])
                due_s = lease.deadline_s if lease is not None and lease.phase is LeasePhase.RUNNING else None
                if due_s is not None and due_s <= 0:
                    self.known = replaced(self.known, handoff, self.known[handoff] | LAPSED)

    def end_call(self, handoff: int, to_importer: bool) -> None:
        self.net = (*self.net, self.machines.post(handoff, to_importer, None).packed & ~1)

    def advance_export(self, ticket: int, event: exporting.Event) -> None:
        number, posts = self.machines.export_step(self.exports[ticket], event)
        self.exports = replaced(self.exports, ticket, number)
        for packed, valid_for in posts:
            if valid_for is not None:
                if self.known[valid_for] & LAPSED:
                    raise Violation("a hand-off was told that its lease was valid, and it had lapsed")
                self.known = replaced(self.known, valid_for, self.known[valid_for] | TOLD_VALID)
            self.net = (*self.net, packed)

    def advance_import(self, handoff: int, event: import_state.Event) -> None:
        number, actions = self.machines.import_step(self.imports[handoff], event)
        self.imports = replaced(self.imports, handoff, number)
        self.perform(handoff, actions)

    def perform(self, handoff: int, actions: tuple[Do, ...]) -> None:
        worker = self.machines.scenario.workers[handoff] - 1
        for action in actions:
            match action:
                case Post(packed):
                    self.net = (*self.net, packed)
                case import_state.Reserve(num_blocks):
                    self.claims = replaced(self.claims, worker, (*self.claims[worker], (handoff, num_blocks)))
                    self.grant(worker)
                    if any(h == handoff for h, _ in self.claims[worker]) and handoff in self.owners[worker]:
                        raise Violation("a hand-off holds blocks and waits for more")
                case import_state.StartRead(_, remote, local):
                    self.reads = (*self.reads, Read(handoff, remote, local))
                case import_state.Discard(quarantined):
                    self._discard(worker, handoff, quarantined)
                case import_state.ReleaseQuarantined(block_ids):
                    self.free(worker, [block for block in block_ids if self.owners[worker][block] == handoff + 20])
                    self.grant(worker)
                case import_state.DestroyChannel():
                    self.known = replaced(self.known, handoff, self.known[handoff] | DESTROYING)
                case import_state.Deliver():
                    self._deliver(worker, handoff, action)
                case _:
                    pass

    def grant(self, worker: int) -> None:
        while self.claims[worker]:
            (handoff, num_blocks), *others = self.claims[worker]
            scenario = self.machines.scenario
            cached = (scenario.decode_pool + self.machines.tickets[handoff],) if scenario.cached else ()
            num_fresh = num_blocks - len(cached)
            free = [block for block, owner in enumerate(self.owners[worker]) if owner == FREE]
            if len(free) - num_fresh < scenario.watermark:
                return
            for block in free[:num_fresh]:
                self.own(worker, block, handoff)
            self.granted = replaced(self.granted, handoff, (*cached, *free[:num_fresh]))
            self.claims = replaced(self.claims, worker, tuple(others))

    def own(self, worker: int, block: int, owner: int) -> None:
        self.owners = replaced(self.owners, worker, replaced(self.owners[worker], block, owner))
        if owner == FREE:
            self.write(worker, block, 0)

    def write(self, worker: int, block: int, content: int) -> None:
        self.contents = replaced(self.contents, worker, replaced(self.contents[worker], block, content))

    def _discard(self, worker: int, handoff: int, quarantined: frozenset[int]) -> None:
        self.claims = replaced(
            self.claims, worker, tuple(claim for claim in self.claims[worker] if claim[0] != handoff)
        )
        self.granted = replaced(self.granted, handoff, ())
        held = [block for block, owner in enumerate(self.owners[worker]) if owner == handoff]
        assert quarantined <= set(held), "quarantines what it does not hold"
        for block in quarantined:
            self.own(worker, block, handoff + 20)
        self.free(worker, [block for block in held if block not in quarantined])
        self.grant(worker)

    def free(self, worker: int, block_ids: list[int]) -> None:
        for read in self.reads:
            is_here = self.machines.scenario.workers[read.handoff] - 1 == worker
            if is_here and read.status != LANDED and set(read.local) & set(block_ids):
                raise Violation("a block was freed while a read may still write into it")
        for block in block_ids:
            self.own(worker, block, FREE)

    def _deliver(self, worker: int, handoff: int, action: import_state.Deliver) -> None:
        machines = self.machines
        ticket = machines.tickets[handoff]
        if not self.known[handoff] & TOLD_VALID:
            raise Violation("blocks are decoded whose lease was not confirmed")
        needed = action.sealed_block_ids + (() if machines.scenario.ended else action.tail_block_ids)
        found = [self.contents[worker][block] for block in needed]
        if found != [16 * (ticket + 1) + place for place in range(len(needed))]:
            raise Violation("blocks are decoded that hold something else than the prompt's KV")
        if machines.scenario.wrong:
            raise Violation(f"blocks are decoded although the exporter told another {machines.scenario.wrong}")
        for block, owner in enumerate(self.owners[worker]):
            if owner == handoff:
                self.own(worker, block, handoff + 10)


def replaced(values: tuple[Value, ...], index: int, value: Value) -> tuple[Value, ...]:
    return (*values[:index], value, *values[index + 1 :])


def without(values: tuple[Value, ...], value: Value) -> tuple[Value, ...]:
    index = values.index(value)
    return values[:index] + values[index + 1 :]
