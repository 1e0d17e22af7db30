"""The exporter: gives out tickets for a prefill's KV, offers its blocks as they are sealed, says when they are free.

Lives on the worker's event loop. Never touches the block pool: it reads bytes, and calls `release` once per ticket.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.config import TransferSettings
from cluster.errors import HandOffReason
from cluster.messages import LayoutFingerprint, MemberId
from kvtransfer.counters import TransferCounters
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import ExporterTransport


@dataclass(frozen=True, slots=True)
class IssuedTicket:
    ticket_id: bytes
    signed: bytes  # a serialized tandem.v1.SignedTicket


@dataclass(frozen=True, slots=True)
class FirstToken:
    token_id: int
    ended: bool  # nothing of this choice needs to be decoded


@dataclass(frozen=True, slots=True)
class TailBlock:
    """The last, partly filled block, frozen, unused positions zeroed."""

    block_id: int
    num_valid: int


class Exporter:
    """All methods are for the event loop's thread; none but `start` and `close` waits."""

    def __init__(
        self,
        *,
        member: MemberId,
        address: str,  # of the gRPC server that carries KvTransferServicer
        memory: PoolMemory,
        layout: LayoutFingerprint,
        key: bytes,
        settings: TransferSettings,
        transports: Sequence[ExporterTransport],
        release: Callable[[bytes], None],  # ticket id; called exactly once per issued ticket, on the loop
        clock: Clock,
        counters: TransferCounters,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Opens the transports."""

    async def close(self) -> None:
        """Ends every hand-off and releases every ticket."""

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
        """A ticket for a prefill that is queued; nothing of it need be computed yet."""
        raise NotImplementedError

    def seal(self, ticket_id: bytes, *, first_index: int, block_ids: Sequence[int]) -> None:
        """These are written and will not change; first_index counts in the ticket's order."""

    def finish(self, ticket_id: bytes, *, first_tokens: Sequence[FirstToken], tail: TailBlock | None) -> None:
        """Prefill is done."""

    def fail(self, ticket_id: bytes, *, reason: HandOffReason, detail: str) -> None:
        """Prefill will not finish: whoever attached is told; the blocks are released as soon as nobody reads them."""

    @property
    def num_live_tickets(self) -> int:
        """Issued and not yet released: what a drain waits for."""
        raise NotImplementedError
