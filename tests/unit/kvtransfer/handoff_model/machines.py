"""The production machines, numbered: each state and message has a number, and each step is computed once."""

from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from cluster.errors import HandOffReason
from cluster.messages import Epoch, MemberId
from kvtransfer.protocol import export_machine as exporting
from kvtransfer.protocol import import_machine as importing
from kvtransfer.protocol import import_state
from kvtransfer.protocol.export_machine import ExporterPhase, ExporterState
from kvtransfer.protocol.handoff import (
    GUARDS,
    Accepted,
    ExporterMessage,
    Guards,
    ImporterMessage,
    Outcome,
    Settle,
    Settled,
)
from kvtransfer.protocol.import_machine import HandOffPlan, ImporterPhase, ImporterState
from kvtransfer.protocol.leases import LeasePolicy
from tests.unit.kvtransfer.handoff_model.scenario import DECODING, ENDED, Scenario, Violation

EXPORTER = MemberId("prefill", "1")
Value = TypeVar("Value")
Message = ImporterMessage | ExporterMessage
_UNSEEN = (import_state.ReportFailure, import_state.Close, import_state.ReportUnhealthy, import_state.FallBack)


class Post(NamedTuple):
    """A numbered message for the network."""

    packed: int  # number * 2 + may be duplicated
    valid_for: int | None  # the hand-off whose lease it confirms


Do = Post | import_state.Action


class Machines:
    """The machines of one scenario, under the given guards."""

    def __init__(self, scenario: Scenario, guards: Guards = GUARDS) -> None:
        self.scenario = scenario
        self.guards = guards
        self.exports = _Numbered[ExporterState]()
        self.imports = _Numbered[ImporterState]()
        self.messages = _Numbered[
            tuple[int, bool, Message | None]
        ]()  # (hand-off, to the importer, message or None: call ended)
        self._export_cache: dict[tuple[int, exporting.Event], tuple[int, tuple[Post, ...]]] = {}
        self._import_cache: dict[tuple[int, import_state.Event], tuple[int, tuple[Do, ...]]] = {}
        self._dues: dict[int, tuple[bool, bool]] = {}
        self._waits: dict[int, tuple[bool, bool]] = {}
        self._lives: dict[tuple[int, int], bool] = {}
        self._free: dict[object, tuple[int, ...]] = {}
        self.tickets = (0, 0) if scenario.is_retry else (0, 1)
        self.attempts = (1, 2) if scenario.is_retry else (1, 1)
        self._policy = LeasePolicy(lease_s=3.0, max_lease_s=3.5, attach_timeout_s=3.0)

    def export_step(self, number: int, event: exporting.Event) -> tuple[int, tuple[Post, ...]]:
        key = (number, event)
        found = self._export_cache.get(key)
        if found is None:
            state, actions = exporting.advance(self.exports[number], event, 0.0, self.guards)
            posts = tuple(self._told(action) for action in actions if isinstance(action, exporting.Send))
            found = self._export_cache[key] = (self.number_export(state), posts)
        return found

    def _told(self, send: exporting.Send) -> Post:
        message = send.message
        if isinstance(message, Accepted):
            message = replace(message, num_alternatives=self.scenario.alternatives)
        return self.post(send.call, True, message)

    def number_export(self, state: ExporterState) -> int:
        state.leases.check()
        if state.phase is ExporterPhase.RELEASED and state.leases.is_pinned:
            raise Violation("a lease is, or may become, good for blocks that were freed")
        return self.exports.number(replace(state, history=()))

    def import_step(self, number: int, event: import_state.Event) -> tuple[int, tuple[Do, ...]]:
        key = (number, event)
        found = self._import_cache.get(key)
        if found is None:
            state, actions = importing.advance(self.imports[number], event, 0.0, self.guards)
            found = self._import_cache[key] = (self.number_import(state), self.posted(actions))
        return found

    def posted(self, actions: tuple[import_state.Action, ...]) -> tuple[Do, ...]:
        """Return the same with numbered messages."""
        done: list[Do] = []
        for action in actions:
            if isinstance(action, import_state.Send):
                message = action.message
                if isinstance(message, Settle) and message.outcome is Outcome.FAILED:
                    message = replace(message, reason=None)  # it changes nothing
                done.append(self.post(self.handoff_of(message.epoch), False, message))
            elif not isinstance(action, _UNSEEN):
                done.append(action)
        return tuple(done)

    def post(self, handoff: int, to_importer: bool, message: Message | None) -> Post:
        number = self.messages.number((handoff, to_importer, message))
        valid_for = self.handoff_of(message.epoch) if isinstance(message, Settled) and message.valid else None
        return Post(2 * number + self.scenario.duplicates, valid_for)

    @staticmethod
    def to_importer(message: Message | None, is_followed: bool = False) -> import_state.Event:
        assert not isinstance(message, ImporterMessage)
        return import_state.CallEnded() if message is None else import_state.FromExporter(message, is_followed)

    def moment(self, handoff: int, net: tuple[int, ...]) -> tuple[int, ...]:
        """Return the messages in flight to this hand-off's importer, without the end of its call."""
        whose = (self.messages[packed >> 1] for packed in net)
        return tuple(
            packed
            for packed, (addressed, to_importer, message) in zip(net, whose, strict=True)
            if addressed == handoff and to_importer and message is not None
        )

    @staticmethod
    def to_exporter(call: int, message: Message | None) -> exporting.Event:
        assert not isinstance(message, ExporterMessage)
        return exporting.CallEnded(call) if message is None else exporting.FromImporter(call, message)

    def handoff_of(self, epoch: Epoch) -> int:
        return epoch.attempt - 1 if self.scenario.is_retry else epoch.ticket_id[0]

    def number_import(self, state: ImporterState) -> int:
        if state.phase is ImporterPhase.ENDED:
            return ENDED
        if state.phase is ImporterPhase.DELIVERED:
            return DECODING
        state = replace(state, history=(), num_reads=0)
        if state.reading is not None:  # there is only one, so its number has no meaning
            state = replace(state, reading=replace(state.reading, read_id=0))
        if not self.scenario.renewals:
            state = replace(state, renew_at_s=None)
        if state.phase is ImporterPhase.DRAINING:
            cancelled = state.failure is HandOffReason.CANCELLED
            failure = HandOffReason.CANCELLED if cancelled else HandOffReason.READ_FAILED
            state = replace(
                state,
                failure=failure,
                offered=(),
                finished=None,
                num_cached=0,
                num_needless=0,
                complete=frozenset(),
                unverified=frozenset(),
                pulled_again=frozenset(),
                num_transports_left=0,
                broken=None,
            )
        return self.imports.number(state)

    def export_later(self, number: int, duration_s: float) -> int:
        state = self.exports[number]
        moved = tuple(
            replace(
                lease, deadline_s=_earlier(lease.deadline_s, duration_s), latest_s=_earlier(lease.latest_s, duration_s)
            )
            for lease in state.leases.leases
        )
        vacant_until_s = _earlier(state.leases.vacant_until_s, duration_s)
        leases = replace(state.leases, leases=moved, vacant_until_s=vacant_until_s)
        return self.exports.number(replace(state, leases=leases))

    def import_later(self, number: int, duration_s: float) -> int:
        state = self.imports[number]
        reading = state.reading
        return self.imports.number(
            replace(
                state,
                deadline_s=state.deadline_s - duration_s,
                wait_until_s=_earlier(state.wait_until_s, duration_s),
                renew_at_s=_earlier(state.renew_at_s, duration_s),
                reading=replace(reading, deadline_s=_earlier(reading.deadline_s, duration_s)) if reading else None,
            )
        )

    def due(self, number: int) -> tuple[bool, bool]:
        """Return whether an exporter has something to reap, and whether its clock could move to its next deadline."""
        found = self._dues.get(number)
        if found is None:
            due_s = self.exports[number].next_deadline_s
            reaps = due_s is not None and due_s <= 0 and self.export_step(number, exporting.Tick())[0] != number
            found = self._dues[number] = (reaps, due_s is not None and due_s > 0)
        return found

    def waits(self, number: int) -> tuple[bool, bool]:
        """Return whether an importer renews at intervals, and whether it would act at its next deadline."""
        found = self._waits.get(number)
        if found is None:
            state = self.imports[number]
            due_s = replace(state, renew_at_s=None).next_deadline_s
            acts = (
                due_s is not None
                and self.import_step(self.import_later(number, due_s), import_state.Tick())[0] != number
            )
            found = self._waits[number] = (state.renew_at_s is not None, acts)
        return found

    def is_live(self, export: int, handoff: int) -> bool:
        """Return whether the hand-off has a lease, or may get one."""
        found = self._lives.get((export, handoff))
        if found is None:
            lease = self.exports[export].leases.find(self.attempts[handoff])
            found = self._lives[export, handoff] = lease is not None and lease.is_live
        return found

    def free_remote(self, jobs: tuple[tuple[int, tuple[int, ...]], ...], exports: tuple[int, ...]) -> tuple[int, ...]:
        """Return the blocks of the prefill pool that neither a running prefill nor an unreleased ticket holds."""
        found = self._free.get((jobs, exports))
        if found is None:
            used: set[int] = set()
            for ticket, (stage, block_ids) in enumerate(jobs):
                if 0 < stage < self.scenario.blocks[ticket]:
                    used.update(block_ids)
                elif self.exports[exports[ticket]].phase is not ExporterPhase.RELEASED:
                    used.update(block_ids if stage >= 0 else block_ids[: -1 - stage])
            found = tuple(block for block in range(self.scenario.prefill_pool) if block not in used)
            self._free[jobs, exports] = found
        return found

    def plan(self, handoff: int) -> HandOffPlan:
        num_blocks = self.scenario.blocks[self.tickets[handoff]]
        return HandOffPlan(
            epoch=Epoch(EXPORTER, bytes([self.tickets[handoff]]), self.attempts[handoff]),
            num_sealed=num_blocks - 1,
            num_choices=1,
            num_tail_valid=1,
            num_tokens=4 * (num_blocks - 1) + 1,
            prompt_hash=bytes([self.tickets[handoff]]),
            attach_timeout_s=4.0,
            read_timeout_s=4.0,
            quarantine_s=4.0,
            timeout_s=4.0 if not self.scenario.alternatives else 12.0,
        )


class _Numbered(Generic[Value]):
    """Numbers values in the order of their first occurrence."""

    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}
        self._values: list[Value] = []

    def number(self, value: Value) -> int:
        number = self._numbers.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def __getitem__(self, number: int) -> Value:
        return self._values[number]


def _earlier(time_s: float | None, duration_s: float) -> float | None:
    return None if time_s is None else time_s - duration_s
