"""What this worker's prefix cache holds, offered to another worker under a ticket of its own.

Lives on the event loop. Owns the questions to the step thread, which finds the blocks and leases them. Such a ticket is
whole at once: sealed blocks only, no tail, and no choice that goes on from it.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster import holders
from cluster.protocol import tickets, wire
from cluster.protocol.hashing import HASH_BYTES
from cluster.protocol.received import checked
from kvtransfer.exporter.exporter import Exporter
from tandem.v1 import kv_pb2


class AskForPrefix(Protocol):
    def __call__(self, ticket_id: bytes, block_hashes: tuple[bytes, ...], min_blocks: int) -> None:
        """To the step thread; `on_offered` has the answer."""
        ...


class PrefixOffers:
    def __init__(
        self, *, exporter: Exporter, block_size: int, ask: AskForPrefix, release: Callable[[bytes], None]
    ) -> None:
        """`release`: the leases of a ticket that was never issued."""
        self._exporter = exporter
        self._block_size = block_size
        self._ask = ask
        self._release = release
        self._asked: dict[bytes, asyncio.Future[_Found]] = {}

    def owners(self) -> Iterator[str]:
        """Holders of blocks that live here."""
        return map(holders.ticket, self._asked)

    async def offer(self, request: kv_pb2.OfferPrefixRequest) -> kv_pb2.OfferPrefixResponse:
        """Raises MalformedMessage."""
        checked(request)
        importer = wire.member_from_wire(request.importer)
        hashes = _hashes(request.block_hashes)
        found, ticket_id = await self._find(hashes, max(1, request.min_blocks))
        block_ids = found.block_ids
        if not block_ids:
            return kv_pb2.OfferPrefixResponse()
        try:
            issued = self._exporter.issue(
                request_id=request.request_id,
                attempt=request.attempt,
                importer=importer,
                num_tokens=len(block_ids) * self._block_size,
                prompt_hash=hashes[len(block_ids) - 1],  # it covers all before it
                num_choices=0,
                ticket_id=ticket_id,
            )
        except BaseException:
            self._release(ticket_id)
            raise
        self._exporter.seal(ticket_id, first_index=0, block_ids=block_ids, unverified=found.unverified)
        self._exporter.finish(ticket_id, first_tokens=(), tail=None)
        self._exporter.expect_soon(ticket_id)  # or, stopped meanwhile, we answer one who has long given up
        return kv_pb2.OfferPrefixResponse(ticket=issued.signed, num_blocks=len(block_ids))

    def on_offered(
        self, ticket_id: bytes, block_ids: tuple[int, ...], unverified: frozenset[int] = frozenset()
    ) -> None:
        """The step thread has leased these to the ticket; none: too few are here. `unverified`: those among them that
        came from another worker and were not verified."""
        answer = self._asked.get(ticket_id)
        if answer is not None and not answer.done():
            answer.set_result(_Found(block_ids, unverified))
        elif block_ids:
            self._release(ticket_id)

    async def _find(self, hashes: Sequence[bytes], min_blocks: int) -> tuple["_Found", bytes]:
        ticket_id = secrets.token_bytes(tickets.TICKET_ID_BYTES)
        answer = self._asked[ticket_id] = asyncio.get_running_loop().create_future()
        try:
            self._ask(ticket_id, tuple(hashes), min_blocks)
            return await answer, ticket_id
        except BaseException:
            if answer.done() and not answer.cancelled() and answer.result().block_ids:
                self._release(ticket_id)  # leased, and no caller to issue a ticket
            raise
        finally:
            del self._asked[ticket_id]


@dataclass(frozen=True, slots=True)
class _Found:
    """Leading blocks of a prompt that are here, and which of them nobody verified."""

    block_ids: tuple[int, ...]
    unverified: frozenset[int]


def _hashes(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))
