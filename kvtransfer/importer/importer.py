"""The importer: carries one ticket's blocks into the local pool, verified, or says by name why not.

Lives on the worker's event loop. Owns the hand-offs in progress, and those that have given their answer but not yet
been proven quiet. Never owns blocks: it asks a BlockSource for them and says when nobody writes to them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from cluster import holders
from cluster.clock import Clock
from cluster.errors import HandOffFailed, HandOffReason
from cluster.messages import LayoutFingerprint, MemberId, Ticket
from cluster.protocol import tickets
from cluster.protocol.versions import OURS, ProtocolRange
from cluster.serving.serving import open_channel
from cluster.settings.transfer_settings import TransferSettings
from kvtransfer.counters import TransferCounters
from kvtransfer.digest.definitions import DEFINITIONS, DigestDefinition
from kvtransfer.importer.block_source import BlockSource as BlockSource
from kvtransfer.importer.exporter_channels import ExporterChannels
from kvtransfer.importer.import_call import CallMeans
from kvtransfer.importer.import_run import Admitted, ImportMeans, ImportRun
from kvtransfer.importer.pairs import PairBook
from kvtransfer.importer.ready_calls import READY_S, ReadyCalls
from kvtransfer.protocol.handoff import FirstToken as FirstToken
from kvtransfer.protocol.import_machine import ImportPlan
from kvtransfer.protocol.verification import VerifyMode
from kvtransfer.transports.base import ImporterTransport
from kvtransfer.wire.wire_format import WireFormat

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the request itself says about the KV it is to receive; a ticket that differs is refused."""

    num_tokens: int
    prompt_hash: bytes
    num_choices: int
    vocab_size: int = 1 << 31  # first tokens are below it


@dataclass(frozen=True, slots=True)
class Imported:
    """Read, verified as --kv-verify says, and settled: the reserved blocks belong to the caller now."""

    sealed_block_ids: tuple[int, ...]  # in the prompt's order, shared by all choices
    tail_block_ids: tuple[int, ...]  # one per choice; empty when the prompt ends on a block boundary. Those of choices
    # that ended with their first token hold nothing
    first_tokens: tuple[FirstToken, ...]  # one per choice
    transport: str
    num_cached: int  # leading sealed blocks that the pool had already; they were not read
    kv_bytes: int  # read over the transport, and verified as --kv-verify says
    exposed_transfer_s: float  # from the end of the prefill's last step to settled
    total_s: float
    unverified_block_ids: frozenset[int] = frozenset()  # taken as they came, here or at a worker before


class Importer:
    def __init__(
        self,
        *,
        member: MemberId,
        wire: WireFormat,
        layout: LayoutFingerprint,
        block_size: int,
        key: bytes,
        settings: TransferSettings,
        transports: Sequence[ImporterTransport],  # best first
        clock: Clock,
        counters: TransferCounters,
        connect: Callable[[str], grpc.aio.Channel] = open_channel,  # to an exporter's address
        pairs: PairBook | None = None,  # None: one of its own
        unhealthy: Callable[[str], None] = _LOG.critical,  # blocks that only a restart of the process gives back
        protocol: ProtocolRange = OURS,
        digests: Sequence[DigestDefinition] = DEFINITIONS,  # that it can compute
    ) -> None:
        self._member, self._block_size, self._key, self._settings = member, block_size, key, settings
        self._counters = counters
        self._channels = ExporterChannels(connect)
        self._calls = ReadyCalls(
            CallMeans(
                channels=self._channels,
                importer=str(member),
                timeout_s=READY_S + settings.attach_timeout_s + settings.max_lease_s + settings.lease_s,
                linger_s=settings.lease_s,
            )
        )
        self._verifier = ThreadPoolExecutor(1, "kv-verify")
        self._means = ImportMeans(
            wire=wire,
            layout=layout,
            transports={transport.name: transport for transport in transports},
            verify=VerifyMode(settings.kv_verify),
            pairs=pairs or PairBook([transport.name for transport in transports]),
            calls=self._calls,
            verifier=self._verifier,
            clock=clock,
            counters=counters,
            unhealthy=unhealthy,
            protocol=protocol,
            digests=tuple(digests),
        )
        self._runs: dict[asyncio.Task[None], ImportRun] = {}  # by the task that waits for its end

    @property
    def num_live(self) -> int:
        """Hand-offs that go on, or have given their answer but may still write to the pool."""
        return len(self._runs)

    def owners(self) -> Iterator[str]:
        """Holders of blocks that live here."""
        return (holders.hand_off(run.handoff_id) for run in self._runs.values())

    async def import_blocks(
        self, *, handoff_id: int, signed_ticket: bytes, expected: Expected, blocks: BlockSource
    ) -> Imported:
        """Raises HandOffFailed; then nothing is reserved any more, and what a reader may still touch is quarantined.
        Cancelling the awaiting task settles as unneeded and gives everything back before CancelledError goes on."""
        try:
            ticket = self._checked(signed_ticket, expected)
        except HandOffFailed as error:
            self._counters.handoff(side="importer", transport="", outcome="refused", reason=error.handoff_reason)
            raise
        run = ImportRun(
            means=self._means,
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
            return _imported(await run.answer)
        except BaseException:
            run.cancel()  # nothing, where it has ended
            if run.was_admitted:  # in the same turn of the loop, but no caller will see it
                blocks.discard(handoff_id, frozenset())
            raise

    async def close(self) -> None:
        """Ends every hand-off by force, then the channels. What is not quiet in time ends with the process."""
        runs = dict(self._runs)
        for run in runs.values():
            run.cancel()
        for transport in self._means.transports.values():
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

    def _checked(self, signed_ticket: bytes, expected: Expected) -> Ticket:
        ticket = tickets.verify(signed_ticket, self._key, importer=str(self._member))
        if (ticket.num_tokens, ticket.num_choices) != (expected.num_tokens, expected.num_choices):
            detail = f"{ticket.num_tokens} tokens and {ticket.num_choices} choices in the ticket, "
            detail += f"{expected.num_tokens} and {expected.num_choices} in the request"
            raise HandOffFailed(HandOffReason.COUNT_MISMATCH, detail)
        if ticket.prompt_hash != expected.prompt_hash:
            raise HandOffFailed(HandOffReason.PROMPT_MISMATCH, "the ticket is for another prompt")
        return ticket

    def _plan(self, ticket: Ticket, vocab_size: int) -> ImportPlan:
        settings = self._settings
        return ImportPlan(
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
            verifies_all=self._means.verify is VerifyMode.ALL,
        )


def _imported(admitted: Admitted) -> Imported:
    return Imported(
        sealed_block_ids=admitted.admit.sealed_block_ids,
        tail_block_ids=admitted.admit.tail_block_ids,
        first_tokens=admitted.admit.first_tokens,
        transport=admitted.transport,
        num_cached=admitted.admit.num_cached,
        kv_bytes=admitted.kv_bytes,
        exposed_transfer_s=admitted.exposed_transfer_s,
        total_s=admitted.total_s,
        unverified_block_ids=admitted.admit.unverified_block_ids,
    )
