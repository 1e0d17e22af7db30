"""The exporter: issues tickets for the KV of prefills, offers blocks as they are sealed, and reports when they are
free.

It lives on the worker's event loop and drives one `export_machine` per ticket. It owns the tickets that are not
released and the calls of importers. It never touches the block pool: it reads bytes, and calls `release` once per
ticket.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from cluster import holders
from cluster.auth.keys import ClusterKeys
from cluster.clock import Clock
from cluster.errors import HandOffFailed, HandOffReason
from cluster.member import OUR_VERSIONS, ProtocolRange
from cluster.messages import NO_WAIT, ExportWait, LayoutFingerprint, MemberId, Ticket
from cluster.protocol import tickets
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.counters import TransferCounters
from kvtransfer.digests import KNOWN_DIGESTS, VerifyMode, digest_blocks
from kvtransfer.exporter.ticket_driver import AttachRules, IncomingCall, TicketDriver
from kvtransfer.keyed_digests import TAIL, BlockTags, exported_definition
from kvtransfer.protocol import export_machine as machine
from kvtransfer.protocol.handoff import FirstToken as FirstToken
from kvtransfer.protocol.handoff import RemoteBlock, Renew, Settle, Tail
from kvtransfer.protocol.leases import LeasePolicy
from kvtransfer.transports.base import ExporterTransport
from kvtransfer.wire.wire_format import WireFormat
from tandem.internal.v1 import kv_pb2

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IssuedTicket:
    ticket_id: bytes
    signed: bytes  # a serialized tandem.internal.v1.SignedTicket


@dataclass(frozen=True, slots=True)
class TailBlock:
    """The last, partly filled block. It does not change any more, and its unused positions are zero."""

    block_id: int
    num_valid: int
    is_unverified: bool = False  # came from another worker, and was not verified


@dataclass(frozen=True, slots=True)
class _Written:
    """Blocks that wait for their digests, and the event for the ticket's machine that follows."""

    ticket_id: bytes
    tags: BlockTags  # of the ticket
    block_ids: tuple[int, ...]
    first_place: int  # in the ticket's order, or TAIL
    unverified: frozenset[int]
    event: Callable[[tuple[RemoteBlock, ...]], machine.Event]


class Exporter:
    """The exporter of a worker. Call all methods on the event loop's thread. Only `start` and `close` wait."""

    def __init__(
        self,
        *,
        member: MemberId,
        address: str,  # of the gRPC server with KvTransferServicer
        wire: WireFormat,
        layout: LayoutFingerprint,
        keys: ClusterKeys,
        settings: TransferSettings,
        transports: Sequence[ExporterTransport],
        release: Callable[[bytes], None],  # ticket id; called exactly once per issued ticket, on the loop
        importer_waits: Callable[[bytes, ExportWait], None] = lambda ticket_id, wait: None,  # the last one reported
        clock: Clock,
        counters: TransferCounters,
        wall_clock: Callable[[], float] = time.time,
        protocol: ProtocolRange = OUR_VERSIONS,
        digests: Sequence[str] = KNOWN_DIGESTS,  # the definitions without a key that it offers, best first
    ) -> None:
        self._member, self._address = member, address
        self._wire = wire
        self._keys = keys
        self._settings = settings
        self._definition = partial(exported_definition, VerifyMode(settings.kv_verify), digests[0], keys)
        self._policy = LeasePolicy(settings.lease_s, settings.max_lease_s, settings.attach_timeout_s)
        self._transports = tuple(transports)
        self._release, self._importer_waits = release, importer_waits
        self._clock, self._wall_clock = clock, wall_clock
        self._counters = counters
        self._rules = AttachRules(
            member=member,
            layout=layout,
            keys=keys,
            transports=self._transports,
            protocol=protocol,
            digests=digests,
        )
        self._tickets: dict[bytes, TicketDriver] = {}
        self._calls: dict[IncomingCall, TicketDriver | None] = {}  # None: not attached yet
        self._next_call = 0
        self._written: deque[_Written] = deque()
        self._is_digesting = False
        # One thread: digests leave in the order in which blocks were sealed.
        self._digester = ThreadPoolExecutor(1, "kv-digest")

    @property
    def num_live_tickets(self) -> int:
        """Return the number of tickets that were issued and not yet released. A drain waits until it is 0."""
        return len(self._tickets)

    def owners(self) -> Iterator[str]:
        """Return the holders of blocks that this object tracks."""
        return map(holders.ticket, self._tickets)

    async def start(self) -> None:
        """Start the transports. Raises OSError.

        It also prepares the kernels and matrices of digests, which takes longer than a short hand-off."""
        for transport in self._transports:
            await transport.start()
        await asyncio.get_running_loop().run_in_executor(self._digester, self._prepare, (0,), self._definition().seed)

    def end_idle_calls(self) -> None:
        """End the calls on which no hand-off has begun, so that the server does not wait for them when it stops."""
        for call in tuple(self._calls):
            if call.attached is None:
                call.end()

    async def close(self) -> None:
        """End every hand-off and release every ticket."""
        for export in tuple(self._tickets.values()):
            export.apply(machine.Fail(HandOffReason.CANCELLED, "the exporter is shutting down"))
        for call in tuple(self._calls):
            call.end()
            self.end_call(call)
        assert not self._tickets, f"{len(self._tickets)} tickets outlive every attempt on them"
        self._written.clear()
        for transport in self._transports:
            await transport.close()
        await asyncio.to_thread(self._digester.shutdown, cancel_futures=True)

    def issue(
        self,
        *,
        request_id: str,
        attempt: int,
        importer: MemberId,
        num_tokens: int,
        prompt_hash: bytes,
        num_choices: int,
        ticket_id: bytes | None = None,  # None: a random one
    ) -> IssuedTicket:
        """Issue a ticket for a queued prefill. Nothing needs to be computed yet."""
        ticket = Ticket(
            ticket_id=ticket_id or secrets.token_bytes(tickets.TICKET_ID_BYTES),
            exporter=self._member,
            exporter_address=self._address,
            importer=importer,
            request_id=request_id,
            attempt=attempt,
            num_tokens=num_tokens,
            prompt_hash=prompt_hash,
            num_choices=num_choices,
            expires_at_s=self._wall_clock() + self._settings.attach_timeout_s + self._settings.max_lease_s,
        )
        assert ticket.ticket_id not in self._tickets, "a ticket id was reused"
        self._tickets[ticket.ticket_id] = TicketDriver(
            ticket=ticket,
            definition=self._definition(),
            policy=self._policy,
            clock=self._clock,
            counters=self._counters,
            released=self._on_released,
        )
        return IssuedTicket(ticket.ticket_id, tickets.sign(ticket, self._keys))

    def seal(
        self, ticket_id: bytes, *, first_index: int, block_ids: Sequence[int], unverified: Set[int] = frozenset()
    ) -> None:
        """Offer blocks that are written and will not change. `first_index` counts in the ticket's order.

        `unverified` are those among them that came from another worker and were not verified."""
        export = self._tickets.get(ticket_id)
        if export is None:
            return  # the ticket was released in the meantime
        self._after_digests(
            _Written(
                ticket_id,
                export.tags,
                tuple(block_ids),
                first_index,
                frozenset(unverified) & frozenset(block_ids),
                lambda blocks: machine.SealBlocks(first_index, blocks),
            )
        )

    def finish(
        self,
        ticket_id: bytes,
        *,
        first_tokens: Sequence[FirstToken],
        tail: TailBlock | None,
        ended_s: float | None = None,  # when the last step ended, by this exporter's clock; None: now
    ) -> None:
        """Announce that the prefill is done. Call it after the last `seal` of the ticket."""

        export = self._tickets.get(ticket_id)
        if export is None:
            return
        export.ended_s = self._clock.now_s() if ended_s is None else ended_s
        ticket, firsts = export.ticket, tuple(first_tokens)

        def finished(blocks: tuple[RemoteBlock, ...]) -> machine.Event:
            digested = None if tail is None else Tail(blocks[0], tail.num_valid)
            return machine.Finish(firsts, ticket.num_tokens, ticket.prompt_hash, digested)

        block_ids = () if tail is None else (tail.block_id,)
        unverified = frozenset(block_ids if tail is not None and tail.is_unverified else ())
        self._after_digests(_Written(ticket_id, export.tags, block_ids, TAIL, unverified, finished))

    def fail(self, ticket_id: bytes, *, reason: HandOffReason, detail: str) -> None:
        """Announce that the prefill will not finish. Attached importers receive the failure; blocks are released when
        their leases end."""
        export = self._tickets.get(ticket_id)
        if export is not None:
            export.apply(machine.Fail(reason, detail))

    def expect_soon(self, ticket_id: bytes) -> None:
        """Close the ticket to new importers one lease (`lease_s`) from now. Attached importers are not affected.

        Call it when the router that received the ticket has its result or is gone: every importer that will come
        attaches within a lease."""
        if ticket_id in self._tickets:
            asyncio.get_running_loop().call_later(self._settings.lease_s, self._withdraw_unattached, ticket_id)

    def reap(self) -> None:
        """End everything that is past its deadline. Timers do this; a test with a manual clock calls it."""
        for export in tuple(self._tickets.values()):
            export.apply(machine.Tick())

    def start_call(self, importer: str) -> IncomingCall:
        """Start serving a HandOff stream. `importer` is the member that the call's metadata names."""
        self._next_call += 1
        call = IncomingCall(number=self._next_call, importer=importer, counters=self._counters)
        self._calls[call] = None
        return call

    def attach(self, call: IncomingCall, message: kv_pb2.Attach) -> None:
        """Handle the first message of a call: refuse it with a reason, or pass it to the ticket's machine."""
        try:
            accepted = self._rules.check(
                message,
                importer=call.importer,
                wall_s=self._wall_clock(),
                definition_of=lambda ticket_id: self._held(ticket_id).tags.definition,
            )
            export = self._held(accepted.ticket.ticket_id)
        except HandOffFailed as error:
            call.refuse(error.handoff_reason, error.detail)
        else:
            self._calls[call] = export
            self._record_wait(export, NO_WAIT)
            export.attach(call, accepted)

    def receive(self, call: IncomingCall, message: Renew | Settle) -> None:
        """Handle a later message of a call whose Attach was accepted."""
        export = self._calls.get(call)
        if export is not None:  # else the exporter has closed
            self._record_wait(export, message.wait if isinstance(message, Renew) else NO_WAIT)
            export.receive(call, message)

    def end_call(self, call: IncomingCall) -> None:
        """Handle the end of a stream, whichever side ended it."""
        export = self._calls.pop(call, None)
        if export is not None:
            self._record_wait(export, NO_WAIT)
            export.call_ended(call)

    def _record_wait(self, export: TicketDriver, wait: ExportWait) -> None:
        """Report how the importer of a ticket waits for room. The last report of two importers counts."""
        if {wait, export.wait} != {NO_WAIT} and export.ticket.ticket_id in self._tickets:
            export.wait = wait
            self._importer_waits(export.ticket.ticket_id, wait)

    def _held(self, ticket_id: bytes) -> TicketDriver:
        """Raises HandOffFailed."""
        export = self._tickets.get(ticket_id)
        if export is None:
            raise HandOffFailed(HandOffReason.UNKNOWN_TICKET, "the exporter does not hold this ticket")
        return export

    def _withdraw_unattached(self, ticket_id: bytes) -> None:
        export = self._tickets.get(ticket_id)
        if export is not None and not export.was_attached:
            export.apply(machine.Fail(HandOffReason.TICKET_EXPIRED, "no importer attached in time"))

    def _on_released(self, export: TicketDriver) -> None:
        del self._tickets[export.ticket.ticket_id]
        self._release(export.ticket.ticket_id)

    def _after_digests(self, written: _Written) -> None:
        """Apply the event to the ticket's machine when the blocks' digests are known, in the order of the calls."""
        self._written.append(written)
        if not self._is_digesting:
            self._is_digesting = True
            asyncio.get_running_loop().call_soon(self._digest_next)  # together with the other blocks of the same step

    def _digest_next(self) -> None:
        """Digest the entry that has waited longest, together with the entries of the same ticket that follow it."""
        if not self._written:
            self._is_digesting = False
            return
        batch = [self._written.popleft()]
        while self._written and self._written[0].ticket_id == batch[0].ticket_id:
            batch.append(self._written.popleft())
        block_ids = tuple(block_id for written in batch for block_id in written.block_ids)
        seed = batch[0].tags.definition.seed
        digesting: asyncio.Future[tuple[bytes, ...]]
        if len(block_ids) * self._wire.memory.block_bytes <= self._wire.short_bytes:
            digesting = asyncio.create_task(self._prepare_here(block_ids, seed))
        else:
            digesting = asyncio.create_task(self._prepare_off_the_loop(block_ids, seed))
        digesting.add_done_callback(lambda digests: self._on_digests(batch, digests))

    def _on_digests(self, batch: Sequence[_Written], digests: asyncio.Future[tuple[bytes, ...]]) -> None:
        if digests.cancelled():
            return  # by `close`
        self._digest_next()
        error = digests.exception()
        left = iter(digests.result() if error is None else ())
        for written in batch:
            export = self._tickets.get(written.ticket_id)
            if export is None:
                return
            if error is not None:
                _LOG.error("request %s: digests failed", export.ticket.request_id, exc_info=error)
                export.apply(machine.Fail(HandOffReason.PREFILL_FAILED, "the exporter could not read its blocks"))
            else:
                export.apply(written.event(_announced(written, left)))

    async def _prepare_here(self, block_ids: tuple[int, ...], seed: bytes) -> tuple[bytes, ...]:
        return self._prepare(block_ids, seed)

    async def _prepare_off_the_loop(self, block_ids: tuple[int, ...], seed: bytes) -> tuple[bytes, ...]:
        return await asyncio.wrap_future(self._digester.submit(self._prepare, block_ids, seed))

    def _prepare(self, block_ids: tuple[int, ...], seed: bytes) -> tuple[bytes, ...]:
        """Encode the blocks and return their digests, empty ones with --kv-verify off.

        It runs on the digest thread unless the blocks are few."""
        if not self._wire.is_pool:
            self._wire.encode(block_ids)
        if self._settings.kv_verify == VerifyMode.OFF:
            return (b"",) * len(block_ids)
        return digest_blocks(self._wire.memory, block_ids, seed)


def _announced(written: _Written, digests: Iterator[bytes]) -> tuple[RemoteBlock, ...]:
    """Return the written blocks with their tags, made of the next digests."""
    blocks = []
    for place, block_id in enumerate(written.block_ids, written.first_place):
        is_unverified = block_id in written.unverified
        tag = written.tags.tag(place, next(digests), is_unverified=is_unverified)
        blocks.append(RemoteBlock(block_id, tag, is_unverified))
    return tuple(blocks)
