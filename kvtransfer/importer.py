"""The importer: carries one ticket's blocks into the local pool, verified, or says by name why not.

Lives on the worker's event loop. Never owns blocks: it asks a BlockSource for them and says when nobody writes to them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.clock import Clock
from cluster.config import TransferSettings
from cluster.messages import LayoutFingerprint, MemberId
from kvtransfer.counters import TransferCounters
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import ImporterTransport


class BlockSource(Protocol):
    """The worker's block pool as an importer sees it: commands to the thread that owns it."""

    async def reserve(self, handoff_id: int, num_blocks: int) -> tuple[int, ...]:
        """Waits until they can be set aside all at once. Raises HandOffFailed(NOT_ENOUGH_BLOCKS) when they never can.
        Cancelled: the reservation is forgotten, whether it was made or not, when `discard` follows."""
        ...

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        """The hand-off is over without its sequences joining; these of its blocks may still be written to."""
        ...

    def quiet(self, block_ids: frozenset[int]) -> None:
        """Nobody can write to these quarantined blocks any more."""
        ...


@dataclass(frozen=True, slots=True)
class Expected:
    """What the request itself says about the KV it is to receive; a ticket that differs is refused."""

    num_tokens: int
    prompt_hash: bytes
    num_choices: int


@dataclass(frozen=True, slots=True)
class ImportedToken:
    token_id: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Imported:
    """Verified and settled: the reserved blocks belong to the caller now."""

    sealed_block_ids: tuple[int, ...]  # in the prompt's order, shared by all choices
    tail_block_ids: tuple[int, ...]  # one per choice; empty when the prompt ends on a block boundary
    first_tokens: tuple[ImportedToken, ...]  # one per choice
    transport: str
    kv_bytes: int  # read over the transport
    exposed_transfer_s: float  # from the end of prefill, as seen here, to settled
    total_s: float


class Importer:
    def __init__(
        self,
        *,
        member: MemberId,
        memory: PoolMemory,
        layout: LayoutFingerprint,
        block_size: int,
        key: bytes,
        settings: TransferSettings,
        transports: Sequence[ImporterTransport],  # best first
        clock: Clock,
        counters: TransferCounters,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        raise NotImplementedError

    async def import_blocks(
        self, *, handoff_id: int, signed_ticket: bytes, expected: Expected, blocks: BlockSource
    ) -> Imported:
        """Raises HandOffFailed; then nothing is reserved any more, and what a reader may still touch is quarantined.
        Cancelling the awaiting task settles as unneeded and gives everything back before CancelledError goes on."""
        raise NotImplementedError

    async def close(self) -> None:
        """Closes channels and ends background work; hand-offs in progress must have been cancelled before."""
