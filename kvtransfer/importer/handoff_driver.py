"""One hand-off at its importer: runs its `import_machine`, performs the actions and feeds back the results.

The driver owns the call, the channel, the pending reservation and the timer of one attempt. It continues after the
request has its result, until nothing of the hand-off can write to the pool any more.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from cluster.clock import Clock, DeadlineTimer
from cluster.errors import HandOffFailed, HandOffReason, MalformedMessage, TandemError
from cluster.member import ProtocolRange
from cluster.messages import NO_WAIT, ExportWait, LayoutFingerprint, Ticket
from cluster.protocol.received import checked
from kvtransfer.counters import TransferCounters
from kvtransfer.digests import VerifyMode, unverified_places
from kvtransfer.importer.calls import CallPool
from kvtransfer.importer.imported_blocks import ImportedBlocks
from kvtransfer.importer.links import LinkTable
from kvtransfer.importer.reads import BlockReader, TransportChoice, message_of
from kvtransfer.keyed_digests import TAIL, BlockTags, DigestDefinition
from kvtransfer.memory import BlockSource, PopulatedPages, Reservation
from kvtransfer.protocol import import_machine as machine
from kvtransfer.protocol import import_state as events
from kvtransfer.protocol.handoff import (
    Accepted,
    Attach,
    ExportFailed,
    Finished,
    ImporterMessage,
    Renew,
    Settle,
)
from kvtransfer.protocol.import_state import Reading
from kvtransfer.transports.base import ImporterTransport
from kvtransfer.wire.handoff_wire import (
    attach_to_wire,
    from_wire,
    renew_to_wire,
    require_in_vocabulary,
    require_offered,
    settle_to_wire,
)
from kvtransfer.wire.wire_format import WireFormat
from tandem.internal.v1 import kv_pb2

_LOG = logging.getLogger(__name__)
_DICE = random.SystemRandom()  # a sample must not be predictable


@dataclass(frozen=True, slots=True)
class HandOffContext:
    """The objects and settings that all hand-offs of one importer share."""

    wire: WireFormat
    layout: LayoutFingerprint
    transports: Mapping[str, ImporterTransport]  # best first
    verify: VerifyMode
    links: LinkTable
    calls: CallPool
    verifier: ThreadPoolExecutor
    pages: PopulatedPages
    clock: Clock
    counters: TransferCounters
    unhealthy: Callable[[str], None]
    protocol: ProtocolRange
    definitions: Callable[[], Mapping[str, DigestDefinition]]  # of digests that it accepts now, by name


class HandOffDriver:
    """Drives one hand-off. Create it on the event loop; it starts at once.

    `answer` is set once, even if work remains to be done after it."""

    def __init__(
        self,
        *,
        context: HandOffContext,
        ticket: Ticket,
        signed_ticket: bytes,
        plan: machine.HandOffPlan,
        handoff_id: int,
        blocks: BlockSource,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._context, self._ticket, self._signed_ticket, self._plan = context, ticket, signed_ticket, plan
        self.handoff_id, self._blocks = handoff_id, blocks
        self.answer: asyncio.Future[ImportedBlocks] = loop.create_future()
        self._ended = asyncio.Event()
        self._began_s = context.clock.now_s()
        self._finished_s = self._began_s  # when the prefill's last step ended
        self._room_asked_s = self._reserved_s = self._began_s
        self._pieces: list[tuple[float, int]] = []  # when each piece had been read, and its bytes
        self._transports = TransportChoice(
            epoch=plan.epoch,
            transports=context.transports,
            links=context.links,
            clock=context.clock,
            counters=context.counters,
        )
        self._definitions = context.definitions()
        self._tags: BlockTags | None = None  # by the definition that the exporter accepted
        self._reads: BlockReader | None = None  # over the channel, once there is one
        self._cause = ""  # the message of the last error outside the machine
        self._reservation: asyncio.Task[None] | None = None
        self._wait = NO_WAIT  # how it waits for exports of this worker, while it waits for blocks
        self._must_announce = False  # the pool was asked for blocks before the exporter had begun to compute
        self._read: asyncio.Task[None] | None = None
        self._is_destroying = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer = DeadlineTimer(context.clock, lambda: self._apply(events.Tick()))
        self._call = context.calls.checkout(ticket.exporter_address)
        self._call.serve(on_message=self._receive, on_ended=self._on_call_ended)
        self._state, actions = machine.begin(plan, self._began_s)
        self._keep(self._call.task)
        self._perform(actions)

    def cancel(self) -> None:
        """Cancel the hand-off. Blocks that no read writes to are returned at once, the others when their read has
        ended."""
        self._apply(events.Cancel())

    def report_wait(self, wait: ExportWait) -> None:
        """Report at once how the hand-off waits for blocks. Does nothing if it waits no longer."""
        if self._reservation is not None and not self._reservation.done():
            self._wait = wait
            self._call.send(self._to_wire(Renew(self._plan.epoch)))

    @property
    def was_delivered(self) -> bool:
        """Return whether `answer` is set and holds blocks."""
        return self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None

    async def until_quiet(self) -> None:
        """Wait until the machine has ended and every task of it too."""
        await self._ended.wait()
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def abandon(self) -> None:
        """End the remaining tasks at once, because the process exits."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _apply(self, event: events.Event) -> None:
        if self._state.is_over:
            return
        self._state, actions = machine.advance(self._state, event, self._context.clock.now_s())
        self._perform(actions)

    def _perform(self, actions: Sequence[events.Action]) -> None:
        for action in actions:
            match action:
                case events.Send(message):
                    self._call.send(self._to_wire(message))
                case events.Reserve(num_blocks):
                    self._reservation = self._keep(self._reserve(num_blocks))
                case events.StartRead():
                    assert self._tags is not None and self._state.reading is not None
                    self._read = self._keep(self._read_blocks(action, self._state.reading.places, self._tags))
                case events.DestroyChannel():
                    self._keep(self._destroy())
                case events.FallBack(reason):
                    self._fall_back(reason)
                case events.Discard(quarantined):
                    self._discard(quarantined)
                case events.ReleaseQuarantined(block_ids):
                    self._context.counters.quarantined(-len(block_ids))
                    self._blocks.release_quarantined(block_ids)
                case events.ReportFailure():
                    self._report_failure(action)
                case events.Deliver():
                    self._deliver(action)
                case events.ReportUnhealthy():
                    self._context.unhealthy(f"a read for request {self._ticket.request_id} cannot be proven quiet")
                case events.Close():
                    self._close()
        self._timer.set(self._state.next_deadline_s)

    def _to_wire(self, message: ImporterMessage) -> kv_pb2.ImporterMessage:
        match message:
            case Attach():
                context, offered = self._context, self._transports.offered()
                return attach_to_wire(self._signed_ticket, context.layout, offered, context.protocol, self._definitions)
            case Renew():
                return renew_to_wire(self._wait)
            case Settle():
                return settle_to_wire(message)

    def _receive(self, wire: kv_pb2.ExporterMessage) -> None:
        try:
            checked(wire)
        except MalformedMessage as error:
            failed = ExportFailed(self._plan.epoch, HandOffReason.MALFORMED_MESSAGE, error.message)
            self._apply(events.FromExporter(failed))
            return
        messages = [message for message in (wire, *wire.then) if message.WhichOneof("message") is not None]
        # Within one version of the protocol, unknown messages may be ignored.
        for message in messages:
            self._receive_one(message, is_followed=message is not messages[-1])
        if self._must_announce and self._state.is_announced:
            self._must_announce = False
            self._blocks.announce(self.handoff_id)

    def _receive_one(self, wire: kv_pb2.ExporterMessage, *, is_followed: bool) -> None:
        try:
            message = from_wire(wire, self._plan.epoch)
            if isinstance(message, Accepted):
                require_offered(wire.accepted, self._context.protocol, self._definitions)
            if isinstance(message, Finished):
                require_in_vocabulary(message, self._plan.vocab_size)
        except (ValueError, TandemError) as error:
            message = ExportFailed(self._plan.epoch, HandOffReason.PROTOCOL, str(error))
        if isinstance(message, Accepted):
            accepted = wire.accepted
            ways = [(accepted.transport, accepted.endpoint)]
            ways += [(other.transport, other.endpoint) for other in accepted.alternatives]
            message = replace(message, num_alternatives=self._transports.accept(ways))
            definition = self._definitions[accepted.digest]
            self._tags = BlockTags(definition, self._ticket.exporter, self._ticket.ticket_id)
        if isinstance(message, Finished):
            self._finished_s = self._context.clock.now_s() - max(0.0, wire.finished.age_s)
        self._apply(events.FromExporter(message, is_followed))

    def _on_call_ended(self, error: str) -> None:
        self._cause = error
        self._apply(events.CallEnded())

    async def _reserve(self, num_blocks: int) -> None:
        self._room_asked_s = self._context.clock.now_s()
        try:
            is_announced = self._state.is_announced
            self._must_announce = not is_announced
            reservation = await self._blocks.reserve(self.handoff_id, num_blocks, is_announced=is_announced)
        except Exception as error:  # noqa: BLE001 - this hand-off ends now, and gives everything back
            self._cause = message_of(error)
            self._apply(events.Unreservable())
        else:
            self._must_announce, self._wait = False, NO_WAIT
            self._reserved_s = self._context.clock.now_s()
            self._context.pages.populate_soon(reservation.block_ids[reservation.num_cached :])
            self._apply(events.Reserved(reservation.block_ids, reservation.num_cached, self._unverified(reservation)))

    def _unverified(self, reservation: Reservation) -> frozenset[int]:
        return unverified_places(
            self._context.verify,
            num_cached=reservation.num_cached,
            num_sealed=self._plan.num_sealed,
            num_blocks=self._plan.num_blocks,
            dice=_DICE,
        )

    async def _read_blocks(self, read: events.StartRead, places: Sequence[int], tags: BlockTags) -> None:
        """Read blocks. The first read opens the channel. Digests are part of the read."""
        try:
            if self._reads is None:
                context = self._context
                channel = await self._transports.open_channel()
                seed = tags.definition.seed
                self._reads = BlockReader(channel, context.wire, context.verifier, self._record_piece, seed)
        except Exception as error:  # noqa: BLE001 - memory, device or library: nothing was written
            self._on_read_error(error)
            self._apply(events.OpenFailed(read.read_id, self._cause))
            return
        try:
            digests = await self._reads.read(read.remote_block_ids, read.local_block_ids, read.unverified)
        except Exception as error:  # noqa: BLE001 - memory, device or library: the channel is destroyed
            self._on_read_error(error)
            self._apply(events.ReadFailed(read.read_id, self._cause))
        else:
            reading = self._state.reading
            digests = self._tagged(tags, places, digests)
            self._apply(events.ReadCompleted(read.read_id, digests))
            asyncio.get_running_loop().call_soon(self._count_checked, reading, digests)  # the next messages leave first

    def _tagged(self, tags: BlockTags, places: Sequence[int], digests: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the tags that the exporter must have announced for blocks with these digests."""
        offered, num_sealed = self._state.offered, self._plan.num_sealed

        def tagged(place: int, digest: bytes) -> bytes:
            block = offered[place]
            is_unverified = block is not None and block.is_unverified
            return tags.tag(place if place < num_sealed else TAIL, digest, is_unverified=is_unverified)

        return tuple(tagged(place, digest) for place, digest in zip(places, digests, strict=True))

    def _record_piece(self, num_bytes: int, seconds: float) -> None:
        self._transports.record_read(num_bytes, seconds)
        self._pieces.append((self._context.clock.now_s(), num_bytes))

    def _on_read_error(self, error: Exception) -> None:
        self._cause = message_of(error)
        if not self._is_destroying:  # not by this driver, which would not be a failure of the link
            self._transports.record_failure()

    def _count_checked(self, reading: Reading | None, digests: Sequence[bytes]) -> None:
        num_unverified = digests.count(b"")
        self._context.counters.checked(num_verified=len(digests) - num_unverified, num_unverified=num_unverified)
        for place, digest in zip(reading.places if reading else (), digests, strict=False):
            offered = self._state.offered[place]
            if offered is not None and digest and offered.digest != digest:
                self._context.counters.digest_failure(transport=self._transports.transport)

    async def _destroy(self) -> None:
        """Destroy the channel and end the read.

        A read that is cancelled before it has a channel writes nothing, and the result of one whose channel is
        destroyed is ignored."""
        self._is_destroying = True
        if self._reads is not None:
            await self._reads.destroy()
        if self._read is not None:
            self._read.cancel()
            await asyncio.wait([self._read])
        if self._reads is not None:  # it was opened in the meantime
            await self._reads.destroy()
        self._reads, self._is_destroying = None, False
        self._apply(events.ChannelDestroyed())

    def _discard(self, quarantined: frozenset[int]) -> None:
        if self._reservation is not None:
            self._reservation.cancel()
        self._context.counters.quarantined(len(quarantined))
        self._blocks.discard(self.handoff_id, quarantined)

    def _fall_back(self, reason: events.FallBackReason) -> None:
        if reason is events.FallBackReason.READ_TIMEOUT:  # the read itself did not fail, so it was not recorded
            self._transports.record_failure()
        self._transports.switch_to_next(reason, self._cause)

    def _report_failure(self, action: events.ReportFailure) -> None:
        outcome = "unneeded" if action.reason is HandOffReason.CANCELLED else "failed"
        self._count(outcome, action.reason)
        detail = action.detail or self._cause
        if not self.answer.done():
            self.answer.set_exception(HandOffFailed(action.reason, f"request {self._ticket.request_id}: {detail}"))

    def _deliver(self, action: events.Deliver) -> None:
        now_s = self._context.clock.now_s()
        kv_bytes = action.num_read * self._context.wire.memory.block_bytes
        self._count("ok", None)
        queue_s = max(0.0, self._reserved_s - max(self._room_asked_s, self._finished_s))
        exposed_s, total_s = now_s - self._finished_s - queue_s, now_s - self._began_s
        self._transports.record_moved(kv_bytes, exposed_s, total_s)
        num_exposed = sum(num_bytes for ended_s, num_bytes in self._pieces if ended_s > self._finished_s)
        self._transports.record_hand_off(num_exposed, exposed_s)
        if self.answer.done():  # the request was cancelled in this turn of the loop
            self._blocks.discard(self.handoff_id, frozenset())
        else:
            self.answer.set_result(
                ImportedBlocks(
                    sealed_block_ids=action.sealed_block_ids,
                    tail_block_ids=action.tail_block_ids,
                    first_tokens=action.first_tokens,
                    transport=self._transports.transport,
                    num_cached=action.num_cached,
                    kv_bytes=kv_bytes,
                    queue_s=queue_s,
                    exposed_transfer_s=exposed_s,
                    total_s=total_s,
                    unverified_block_ids=action.unverified_block_ids,
                )
            )

    def _close(self) -> None:
        self._call.half_close()
        if self._reads is not None and not self._is_destroying:
            self._keep(self._reads.finish())
        self._ended.set()

    def _count(self, outcome: str, reason: HandOffReason | None) -> None:
        self._context.counters.handoff(
            side="importer", transport=self._transports.transport, outcome=outcome, reason=reason or ""
        )

    def _keep(self, work: Coroutine[object, object, None] | asyncio.Task[None]) -> asyncio.Task[None]:
        task = work if isinstance(work, asyncio.Task) else asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("the hand-off for request %s failed", self._ticket.request_id, exc_info=task.exception())
