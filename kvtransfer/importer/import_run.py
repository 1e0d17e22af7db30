"""One hand-off at its importer: runs its `import_machine`, performs the actions, and feeds back what happens.

Owns the call, the channel, the reservation it waits for and the timer of one attempt. It goes on after the request has
its answer, until nothing of it can write to the pool any more.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from cluster.clock import Clock
from cluster.errors import HandOffFailed, HandOffReason, MalformedMessage, TandemError
from cluster.messages import LayoutFingerprint, Ticket
from cluster.protocol.kv_wire import fingerprint_to_wire
from cluster.protocol.received import checked
from cluster.protocol.versions import ProtocolRange
from kvtransfer.counters import TransferCounters
from kvtransfer.deadline_timer import DeadlineTimer
from kvtransfer.digest.definitions import SUMS, DigestDefinition
from kvtransfer.importer.block_source import BlockSource, Reservation
from kvtransfer.importer.channel_reads import ChannelReads
from kvtransfer.importer.import_ways import ImportWays
from kvtransfer.importer.pairs import PairBook
from kvtransfer.importer.ready_calls import ReadyCalls
from kvtransfer.protocol import import_events as events
from kvtransfer.protocol import import_machine as machine
from kvtransfer.protocol.handoff import (
    Accepted,
    Attach,
    ExporterMessage,
    Failed,
    Finished,
    ImporterMessage,
    Renew,
    Settle,
)
from kvtransfer.protocol.import_state import Reading
from kvtransfer.protocol.verification import VerifyMode, unverified_places
from kvtransfer.transports.base import ImporterTransport
from kvtransfer.wire.handoff_wire import accepted_digests, accepted_protocol, from_wire, settle_to_wire
from kvtransfer.wire.wire_format import WireFormat
from tandem.v1 import kv_pb2

_LOG = logging.getLogger(__name__)
_DICE = random.SystemRandom()  # nobody can tell which blocks a sample takes


@dataclass(frozen=True, slots=True)
class ImportMeans:
    """What every hand-off of one importer uses."""

    wire: WireFormat
    layout: LayoutFingerprint
    transports: Mapping[str, ImporterTransport]  # best first
    verify: VerifyMode
    pairs: PairBook
    calls: ReadyCalls
    verifier: ThreadPoolExecutor
    clock: Clock
    counters: TransferCounters
    unhealthy: Callable[[str], None]
    protocol: ProtocolRange
    digests: tuple[DigestDefinition, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The machine's answer, with what the driver saw beside it."""

    admit: events.Admit
    transport: str
    kv_bytes: int
    exposed_transfer_s: float
    total_s: float


class ImportRun:
    """Made and started on the event loop. `answer` is set once, whatever remains to be done after it."""

    def __init__(
        self,
        *,
        means: ImportMeans,
        ticket: Ticket,
        signed_ticket: bytes,
        plan: machine.ImportPlan,
        handoff_id: int,
        blocks: BlockSource,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._means, self._ticket, self._signed_ticket, self._plan = means, ticket, signed_ticket, plan
        self.handoff_id, self._blocks = handoff_id, blocks
        self.answer: asyncio.Future[Admitted] = loop.create_future()
        self._ended = asyncio.Event()
        self._began_s = means.clock.now_s()
        self._finished_s = self._began_s
        self._ways = ImportWays(
            epoch=plan.epoch,
            transports=means.transports,
            pairs=means.pairs,
            clock=means.clock,
            counters=means.counters,
        )
        self._reads: ChannelReads | None = None  # over the channel, once there is one
        self._digests: DigestDefinition = SUMS  # until the exporter has said which
        self._cause = ""  # what the last error outside of the machine said
        self._reservation: asyncio.Task[None] | None = None
        self._read: asyncio.Task[None] | None = None
        self._is_destroying = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer = DeadlineTimer(means.clock, lambda: self._take(events.Tick()))
        self._call = means.calls.take(ticket.exporter_address)
        self._call.serve(on_message=self._hear, on_ended=self._on_call_ended)
        self._state, actions = machine.begin(plan, self._began_s)
        self._keep(self._call.task)
        self._perform(actions)

    def cancel(self) -> None:
        """The request does not need it: gives back at once what nothing writes to, and the rest when it is quiet."""
        self._take(events.Cancel())

    @property
    def was_admitted(self) -> bool:
        """The answer is there, and it is the blocks."""
        return self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None

    async def until_quiet(self) -> None:
        """Until the machine is done and every task it needed has ended."""
        await self._ended.wait()
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def abandon(self) -> None:
        """Ends what is left of the conversation; for a process that ends."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, event: events.Event) -> None:
        if self._state.is_over:
            return
        self._state, actions = machine.advance(self._state, event, self._means.clock.now_s())
        self._perform(actions)

    def _perform(self, actions: Sequence[events.Action]) -> None:
        for action in actions:
            match action:
                case events.Send(message):
                    self._call.send(self._to_wire(message))
                case events.Reserve(num_blocks):
                    self._reservation = self._keep(self._reserve(num_blocks))
                case events.StartRead():
                    self._read = self._keep(self._read_blocks(action))
                case events.DestroyChannel():
                    self._keep(self._destroy())
                case events.FallBack(reason):
                    self._fall_back(reason)
                case events.Discard(quarantined):
                    self._discard(quarantined)
                case events.Quiet(block_ids):
                    self._means.counters.quarantined(-len(block_ids))
                    self._blocks.quiet(block_ids)
                case events.GiveUp():
                    self._give_up(action)
                case events.Admit():
                    self._admit(action)
                case events.ReportUnhealthy():
                    self._means.unhealthy(f"a read for request {self._ticket.request_id} cannot be proven quiet")
                case events.Close():
                    self._close()
        self._timer.set(self._state.next_deadline_s)

    def _to_wire(self, message: ImporterMessage) -> kv_pb2.ImporterMessage:
        match message:
            case Attach():
                endpoints = self._ways.offered()
                return kv_pb2.ImporterMessage(
                    attach=kv_pb2.Attach(
                        ticket=kv_pb2.SignedTicket.FromString(self._signed_ticket),
                        transports=list(endpoints),
                        layout=fingerprint_to_wire(self._means.layout),
                        endpoints=endpoints,
                        protocol_oldest=self._means.protocol.oldest,
                        protocol_newest=self._means.protocol.newest,
                        digests=[definition.name for definition in self._means.digests],
                        reads_then=True,
                    )
                )
            case Renew():
                return kv_pb2.ImporterMessage(renew=kv_pb2.Renew())
            case Settle():
                return settle_to_wire(message)

    def _hear(self, wire: kv_pb2.ExporterMessage) -> None:
        try:
            checked(wire)
        except MalformedMessage as error:
            failed = Failed(self._plan.epoch, HandOffReason.MALFORMED_MESSAGE, error.message)
            self._take(events.FromExporter(failed))
            return
        heard = [message for message in (wire, *wire.then) if message.WhichOneof("message") is not None]
        # One of a kind that this version does not know may be ignored within one version of the protocol.
        for message in heard:
            self._hear_one(message, is_followed=message is not heard[-1])

    def _hear_one(self, wire: kv_pb2.ExporterMessage, *, is_followed: bool) -> None:
        try:
            message = self._checked(from_wire(wire, self._plan.epoch), wire)
        except (ValueError, TandemError) as error:
            message = Failed(self._plan.epoch, HandOffReason.PROTOCOL, str(error))
        if isinstance(message, Accepted):
            accepted = wire.accepted
            ways = [(accepted.transport, accepted.endpoint)]
            ways += [(other.transport, other.endpoint) for other in accepted.alternatives]
            message = replace(message, num_alternatives=self._ways.take(ways))
        if isinstance(message, Finished):
            self._finished_s = self._means.clock.now_s() - max(0.0, wire.finished.age_s)
        self._take(events.FromExporter(message, is_followed))

    def _checked(self, message: ExporterMessage, wire: kv_pb2.ExporterMessage) -> ExporterMessage:
        """Raises ValueError when the exporter goes on in a version, or with digests, that were not offered, or from a
        token that this model does not have."""
        if isinstance(message, Accepted):
            version = accepted_protocol(wire.accepted)
            if version not in self._means.protocol:
                raise ValueError(f"accepted in protocol {version}, where {self._means.protocol} was offered")
            self._digests = accepted_digests(wire.accepted, self._means.digests)
        if isinstance(message, Finished):
            highest = max((first.token_id for first in message.first_tokens), default=-1)
            if highest >= self._plan.vocab_size:
                raise ValueError(f"first token {highest} is outside the vocabulary of {self._plan.vocab_size}")
        return message

    def _on_call_ended(self, error: str) -> None:
        self._cause = error
        self._take(events.CallEnded())

    async def _reserve(self, num_blocks: int) -> None:
        try:
            reservation = await self._blocks.reserve(self.handoff_id, num_blocks)
        except Exception as error:  # noqa: BLE001 - this hand-off ends now, and gives everything back
            self._cause = _told(error)
            self._take(events.Unreservable())
        else:
            self._take(events.Reserved(reservation.block_ids, reservation.num_cached, self._unverified(reservation)))

    def _unverified(self, reservation: Reservation) -> frozenset[int]:
        return unverified_places(
            self._means.verify,
            num_cached=reservation.num_cached,
            num_sealed=self._plan.num_sealed,
            num_blocks=self._plan.num_blocks,
            dice=_DICE,
        )

    async def _read_blocks(self, read: events.StartRead) -> None:
        """Opens the channel with the first read. Digests are part of the read: what is not verified did not arrive."""
        try:
            if self._reads is None:
                means = self._means
                channel = await self._ways.open()
                self._reads = ChannelReads(channel, means.wire, means.verifier, self._digests, self._ways.was_read)
        except Exception as error:  # noqa: BLE001 - memory, device or library: nothing was written
            self._has_failed(error)
            self._take(events.OpenFailed(read.read_id, self._cause))
            return
        try:
            digests = await self._reads.read(read.remote_block_ids, read.local_block_ids, read.unverified)
        except Exception as error:  # noqa: BLE001 - memory, device or library: the channel is destroyed
            self._has_failed(error)
            self._take(events.ReadFailed(read.read_id, self._cause))
        else:
            reading = self._state.reading
            self._take(events.ReadCompleted(read.read_id, digests))
            asyncio.get_running_loop().call_soon(self._count_checked, reading, digests)  # what follows leaves first

    def _has_failed(self, error: Exception) -> None:
        self._cause = _told(error)
        if not self._is_destroying:  # by ourselves, which says nothing about the way
            self._ways.failed()

    def _count_checked(self, reading: Reading | None, digests: Sequence[bytes]) -> None:
        num_unverified = digests.count(b"")
        self._means.counters.checked(num_verified=len(digests) - num_unverified, num_unverified=num_unverified)
        for place, digest in zip(reading.places if reading else (), digests, strict=False):
            offered = self._state.offered[place]
            if offered is not None and digest and offered.digest != digest:
                self._means.counters.digest_failure(transport=self._ways.transport)

    async def _destroy(self) -> None:
        """A read that has not got its channel yet has nothing to write with once it is cancelled; one whose channel is
        destroyed has nothing to say any more."""
        self._is_destroying = True
        if self._reads is not None:
            await self._reads.destroy()
        if self._read is not None:
            self._read.cancel()
            await asyncio.wait([self._read])
        if self._reads is not None:  # it was opened in the meantime
            await self._reads.destroy()
        self._reads, self._is_destroying = None, False
        self._take(events.ChannelDestroyed())

    def _discard(self, quarantined: frozenset[int]) -> None:
        if self._reservation is not None:
            self._reservation.cancel()
        self._means.counters.quarantined(len(quarantined))
        self._blocks.discard(self.handoff_id, quarantined)

    def _fall_back(self, reason: events.FallBackReason) -> None:
        if reason is events.FallBackReason.READ_TIMEOUT:  # nobody else says so: the read had not failed
            self._ways.failed()
        self._ways.fall_back(reason, self._cause)

    def _give_up(self, action: events.GiveUp) -> None:
        outcome = "unneeded" if action.reason is HandOffReason.CANCELLED else "failed"
        self._count(outcome, action.reason)
        detail = action.detail or self._cause
        if not self.answer.done():
            self.answer.set_exception(HandOffFailed(action.reason, f"request {self._ticket.request_id}: {detail}"))

    def _admit(self, action: events.Admit) -> None:
        now_s = self._means.clock.now_s()
        kv_bytes = action.num_read * self._means.wire.memory.block_bytes
        self._count("ok", None)
        self._means.counters.moved(transport=self._ways.transport, num_bytes=kv_bytes)
        admitted = Admitted(action, self._ways.transport, kv_bytes, now_s - self._finished_s, now_s - self._began_s)
        if self.answer.done():  # the request went away in this turn of the loop
            self._blocks.discard(self.handoff_id, frozenset())
        else:
            self.answer.set_result(admitted)

    def _close(self) -> None:
        self._call.half_close()
        if self._reads is not None and not self._is_destroying:
            self._keep(self._reads.release())
        self._ended.set()

    def _count(self, outcome: str, reason: HandOffReason | None) -> None:
        self._means.counters.handoff(
            side="importer", transport=self._ways.transport, outcome=outcome, reason=reason or ""
        )

    def _keep(self, work: Coroutine[object, object, None] | asyncio.Task[None]) -> asyncio.Task[None]:
        task = work if isinstance(work, asyncio.Task) else asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("hand-off for request %s", self._ticket.request_id, exc_info=task.exception())


def _told(error: Exception) -> str:
    if isinstance(error, HandOffFailed):
        return error.detail
    return error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
