"""Sequences on their way out of this worker: frozen here, their KV offered to another decode worker.

Owns which sequence has which ticket, and the questions to the step thread about them. A ticket ends by itself, and then
its sequence does not wait for the router's word for ever. Never touches a block.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster import holders
from cluster.errors import HandOffReason, NotFound, TandemError, TooManyFrozen
from cluster.messages import MemberId
from cluster.protocol import tickets
from cluster.protocol.hashing import hash_prompt
from decode_worker.scheduling import commands
from kvtransfer.exporter.exporter import Exporter, FirstToken, TailBlock

MAX_FROZEN = 4  # sequences, of all routers together: each of their clients waits
_WORD_S = 60.0  # after a ticket's end, for its router to thaw or cancel the sequence
_TURN_S = 0.05  # a move takes about this long

Key = tuple[MemberId, int]  # a router and its handle


@dataclass(frozen=True, slots=True)
class FreezeOrder:
    """What a router asks: which sequence, and for which attempt of its request at which worker."""

    router: MemberId
    handle: int
    attempt: int
    importer: MemberId


@dataclass(frozen=True, slots=True)
class FrozenSequence:
    signed_ticket: bytes
    num_output: int


@dataclass(frozen=True, slots=True)
class _Freezing:
    order: FreezeOrder
    answer: asyncio.Future[FrozenSequence]


class Exports:
    """Runs on the worker's event loop. `post` reaches the step thread; `on_forgotten` the service."""

    def __init__(
        self,
        *,
        exporter: Exporter,
        cluster_key: bytes,
        post: Callable[[commands.Command], None],
        on_forgotten: Callable[[MemberId, int], None],
        word_s: float = _WORD_S,
        max_frozen: int = MAX_FROZEN,
    ) -> None:
        self._exporter = exporter
        self._cluster_key = cluster_key
        self._post = post
        self._on_forgotten = on_forgotten
        self._word_s = word_s
        self._max_frozen = max_frozen
        self._tickets: dict[Key, bytes] = {}  # of the sequences that are frozen, or about to be
        self._freezing: dict[bytes, _Freezing] = {}
        self._thawing: dict[Key, asyncio.Future[None]] = {}  # by the new handle

    def __len__(self) -> int:
        return len(self._tickets)

    def owners(self) -> Iterator[str]:
        """Holders of blocks that live here."""
        return map(holders.ticket, self._freezing)

    async def freeze(self, order: FreezeOrder) -> FrozenSequence:
        """Raises NotFound: it does not decode here, or it is frozen already; TooManyFrozen. Once asked for, it happens,
        whether or not the caller still waits for the answer."""
        key = (order.router, order.handle)
        if key in self._tickets:
            raise NotFound(f"sequence {order.handle} is frozen already")
        if len(self._tickets) >= self._max_frozen:
            raise TooManyFrozen(
                f"{len(self._tickets)} sequences are frozen here, the most at a time: try again", retry_after_s=_TURN_S
            )
        ticket_id = self._tickets[key] = secrets.token_bytes(tickets.TICKET_ID_BYTES)
        answer: asyncio.Future[FrozenSequence] = asyncio.get_running_loop().create_future()
        self._freezing[ticket_id] = _Freezing(order, answer)
        self._post(commands.Freeze(ticket_id, order.router, order.handle))
        return await answer

    async def thaw(self, router: MemberId, handle: int, new_handle: int) -> None:
        """Raises NotFound, DuplicateRequest."""
        answer = self._thawing[router, new_handle] = asyncio.get_running_loop().create_future()
        self._post(commands.Thaw(router, handle, new_handle))
        try:
            await answer
        finally:
            del self._thawing[router, new_handle]

    def forget(self, router: MemberId, handles: frozenset[int]) -> None:
        """These ended, or go on: nobody may attach to their tickets any more. Who reads has its lease."""
        for handle in handles:
            ticket_id = self._tickets.pop((router, handle), None)
            if ticket_id is not None:
                self._exporter.fail(
                    ticket_id, reason=HandOffReason.CANCELLED, detail="the sequence is no longer frozen"
                )

    def on_frozen(self, event: commands.Frozen) -> None:
        """Everything is sealed, so the ticket is whole at once."""
        freezing = self._freezing.pop(event.ticket_id)
        order = freezing.order
        if self._tickets.get((order.router, order.handle)) != event.ticket_id:
            self._post(commands.Release(event.ticket_id))  # cancelled meanwhile
            _answer(freezing.answer, NotFound(f"sequence {order.handle} was cancelled"))
            return
        issued = self._exporter.issue(
            request_id=event.request_id,
            attempt=order.attempt,
            importer=order.importer,
            num_tokens=len(event.token_ids),
            prompt_hash=hash_prompt(self._cluster_key, event.token_ids),
            num_choices=1,
            ticket_id=event.ticket_id,
        )
        if event.sealed_block_ids:
            self._exporter.seal(
                event.ticket_id, first_index=0, block_ids=event.sealed_block_ids, unverified=event.unverified
            )
        self._exporter.finish(
            event.ticket_id,
            first_tokens=[FirstToken(event.last_token_id, ended=False)],
            tail=None
            if event.tail is None
            else TailBlock(event.tail.block_id, event.tail.num_valid, event.tail.block_id in event.unverified),
        )
        if not freezing.answer.done():
            freezing.answer.set_result(FrozenSequence(issued.signed, event.num_output))

    def on_freeze_refused(self, event: commands.FreezeRefused) -> None:
        freezing = self._freezing.pop(event.ticket_id)
        key = (freezing.order.router, freezing.order.handle)
        if self._tickets.get(key) == event.ticket_id:
            del self._tickets[key]
        _answer(freezing.answer, event.error)

    def on_thawed(self, event: commands.Thawed | commands.ThawRefused) -> None:
        answer = self._thawing.get((event.router, event.handle))
        if answer is None or answer.done():
            return
        if isinstance(event, commands.ThawRefused):
            answer.set_exception(event.error)
        else:
            answer.set_result(None)

    def release(self, ticket_id: bytes) -> None:
        """The exporter's word that no lease of the ticket is left."""
        self._post(commands.Release(ticket_id))
        key = next((key for key, known in self._tickets.items() if known == ticket_id), None)
        if key is not None:
            asyncio.get_running_loop().call_later(self._word_s, self._look_after, key, ticket_id)

    def _look_after(self, key: Key, ticket_id: bytes) -> None:
        """Nobody can import it any more, and its router, if it lives, has forgotten it."""
        if self._tickets.get(key) == ticket_id:
            self._on_forgotten(*key)


def _answer(waiting: asyncio.Future[FrozenSequence], error: TandemError) -> None:
    if not waiting.done():
        waiting.set_exception(error)
