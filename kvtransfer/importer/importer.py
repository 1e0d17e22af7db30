"""The importer: moves one ticket's blocks into the local pool and verifies them, or fails with a named reason.

It lives on the worker's event loop. It owns the hand-offs in progress and those that have their result but may still
write to the pool. It never owns blocks: it asks a BlockSource for them and reports when nothing writes to them any
more.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import grpc

from cluster import holders
from cluster.auth.keys import ClusterKeys
from cluster.clock import Clock
from cluster.errors import HandOffFailed, HandOffReason
from cluster.member import OUR_VERSIONS, ProtocolRange
from cluster.messages import ExportWait, LayoutFingerprint, MemberId, Ticket
from cluster.protocol import tickets
from cluster.serving.serving import open_channel
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.counters import TransferCounters
from kvtransfer.digests import KNOWN_DIGESTS, VerifyMode
from kvtransfer.importer.calls import READY_S, CallPool, CallSettings, GrpcChannelPool
from kvtransfer.importer.handoff_driver import HandOffContext, HandOffDriver
from kvtransfer.importer.imported_blocks import ImportedBlocks as ImportedBlocks
from kvtransfer.importer.links import LinkTable
from kvtransfer.keyed_digests import accepted_definitions
from kvtransfer.memory import BlockSource as BlockSource
from kvtransfer.memory import PopulatedPages
from kvtransfer.protocol.handoff import FirstToken as FirstToken
from kvtransfer.protocol.import_machine import HandOffPlan
from kvtransfer.transports.base import ImporterTransport
from kvtransfer.wire.wire_format import WireFormat

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpectedPrompt:
    """The prompt that the request expects a ticket to hold. A ticket that differs is refused."""

    num_tokens: int
    prompt_hash: bytes
    num_choices: int
    vocab_size: int = 1 << 31  # first tokens are below it


class Importer:
    def __init__(
        self,
        *,
        member: MemberId,
        wire: WireFormat,
        layout: LayoutFingerprint,
        block_size: int,
        keys: ClusterKeys,
        settings: TransferSettings,
        transports: Sequence[ImporterTransport],  # best first
        clock: Clock,
        counters: TransferCounters,
        connect: Callable[[str], grpc.aio.Channel] = open_channel,  # to an exporter's address
        links: LinkTable | None = None,  # None: a new table
        unhealthy: Callable[[str], None] = _LOG.critical,  # reports blocks that only a restart of the process frees
        protocol: ProtocolRange = OUR_VERSIONS,
        digests: Sequence[str] = KNOWN_DIGESTS,  # the definitions without a key that it can compute
    ) -> None:
        self._member, self._block_size, self._keys, self._settings = member, block_size, keys, settings
        self._counters = counters
        self._channels = GrpcChannelPool(connect)
        self._calls = CallPool(
            CallSettings(
                channels=self._channels,
                importer=str(member),
                timeout_s=READY_S + settings.attach_timeout_s + settings.max_lease_s + settings.lease_s,
                linger_s=settings.lease_s,
            )
        )
        self._verifier = ThreadPoolExecutor(1, "kv-verify")
        self._pages = PopulatedPages(wire.memory)
        verify = VerifyMode(settings.kv_verify)
        self._context = HandOffContext(
            wire=wire,
            layout=layout,
            transports={transport.name: transport for transport in transports},
            verify=verify,
            links=links or LinkTable([transport.name for transport in transports]),
            calls=self._calls,
            verifier=self._verifier,
            pages=self._pages,
            clock=clock,
            counters=counters,
            unhealthy=unhealthy,
            protocol=protocol,
            definitions=partial(accepted_definitions, verify, tuple(digests), keys),
        )
        self._runs: dict[asyncio.Task[None], HandOffDriver] = {}  # by the task that waits for its end

    @property
    def num_live(self) -> int:
        """Return the number of hand-offs that are in progress or may still write to the pool."""
        return len(self._runs)

    def owners(self) -> Iterator[str]:
        """Return the holders of blocks that this object tracks."""
        return (holders.hand_off(run.handoff_id) for run in self._runs.values())

    async def import_blocks(
        self, *, handoff_id: int, signed_ticket: bytes, expected: ExpectedPrompt, blocks: BlockSource
    ) -> ImportedBlocks:
        """Import a ticket's blocks.

        Raises HandOffFailed; then nothing is reserved any more, and blocks that a read may still write to are in
        quarantine. Cancelling the caller settles the hand-off as unneeded and returns its blocks before CancelledError
        is raised."""
        try:
            ticket = self._checked(signed_ticket, expected)
        except HandOffFailed as error:
            self._counters.handoff(side="importer", transport="", outcome="refused", reason=error.handoff_reason)
            raise
        run = HandOffDriver(
            context=self._context,
            ticket=ticket,
            signed_ticket=signed_ticket,
            plan=self._plan(ticket, expected.vocab_size),
            handoff_id=handoff_id,
            blocks=blocks,
        )
        waiter = asyncio.create_task(run.until_quiet(), name=f"hand-off {ticket.request_id}")
        self._runs[waiter] = run
        waiter.add_done_callback(self._runs.pop)
        try:
            return await run.answer
        except BaseException:
            run.cancel()  # does nothing if it has ended
            if run.was_delivered:  # in the same turn of the loop; the caller will not receive it
                blocks.discard(handoff_id, frozenset())
            raise

    def report_wait(self, handoff_id: int, wait: ExportWait) -> None:
        """Report to the exporter of a hand-off how it waits for exports of this worker."""
        for run in self._runs.values():
            if run.handoff_id == handoff_id:
                run.report_wait(wait)

    async def close(self) -> None:
        """End every hand-off, then the channels. A read that does not end within `quarantine_s` ends with the
        process."""
        runs = dict(self._runs)
        for run in runs.values():
            run.cancel()
        for transport in self._context.transports.values():
            await transport.close()
        if runs:
            _, stuck = await asyncio.wait(runs, timeout=self._settings.quarantine_s)
            for waiter in stuck:
                waiter.cancel()
        for run in runs.values():
            await run.abandon()
        await self._calls.close()
        await self._channels.close()
        await asyncio.to_thread(self._verifier.shutdown)
        await asyncio.to_thread(self._pages.close)

    def _checked(self, signed_ticket: bytes, expected: ExpectedPrompt) -> Ticket:
        ticket = tickets.verify(signed_ticket, self._keys, importer=str(self._member))
        if (ticket.num_tokens, ticket.num_choices) != (expected.num_tokens, expected.num_choices):
            detail = f"{ticket.num_tokens} tokens and {ticket.num_choices} choices in the ticket, "
            detail += f"{expected.num_tokens} and {expected.num_choices} in the request"
            raise HandOffFailed(HandOffReason.COUNT_MISMATCH, detail)
        if ticket.prompt_hash != expected.prompt_hash:
            raise HandOffFailed(HandOffReason.PROMPT_MISMATCH, "the ticket is for another prompt")
        return ticket

    def _plan(self, ticket: Ticket, vocab_size: int) -> HandOffPlan:
        settings = self._settings
        return HandOffPlan(
            epoch=ticket.epoch,
            num_sealed=ticket.num_tokens // self._block_size,
            num_choices=ticket.num_choices,
            num_tail_valid=ticket.num_tokens % self._block_size,
            num_tokens=ticket.num_tokens,
            prompt_hash=ticket.prompt_hash,
            attach_timeout_s=min(settings.attach_timeout_s, settings.read_timeout_s, settings.lease_s),
            read_timeout_s=settings.read_timeout_s,
            quarantine_s=settings.quarantine_s,
            timeout_s=settings.attach_timeout_s + settings.max_lease_s,
            vocab_size=vocab_size,
            verifies_all=self._context.verify.verifies_all,
        )
