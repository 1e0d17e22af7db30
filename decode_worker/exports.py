"""Frozen sequences: their KV is offered to another decode worker by a ticket.

This module owns the tickets of frozen sequences and the pending Freeze and Thaw calls. A ticket ends when no lease of
it is left. If the router neither thaws nor cancels the sequence within `grace_s` after that, the sequence is cancelled.

Freeze and Thaw have tables of futures here and do not use `StepLoop.ask`, for two reasons. `ask` resumes its caller one
turn of the event loop after the event; but a ticket must be issued, and an old handle forgotten, before the next event
is applied, which may end the same sequence. And `ask` drops the answer of a caller that was cancelled; but a sequence
that is frozen then still needs its ticket, which alone leads to the release of its blocks.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster import holders
from cluster.errors import DuplicateRequest, HandOffReason, NotFound, TandemError, TooManyFrozen
from cluster.messages import MemberId
from cluster.protocol import tickets
from cluster.protocol.hashing import hash_prompt
from engine.scheduling import commands
from engine.scheduling.commands import Release
from kvtransfer.exporter.exporter import Exporter, FirstToken, TailBlock

MAX_FROZEN = 4  # sequences, for all routers together; the clients of all of them wait
_TURN_S = 0.05  # the usual duration of a move

Key = tuple[MemberId, int]  # a router and its handle


@dataclass(frozen=True, slots=True)
class FreezeOrder:
    """A router's request to freeze a sequence so that `importer` can continue it as `attempt`."""

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


@dataclass(frozen=True, slots=True)
class _Thawing:
    handle: int  # of the frozen sequence
    answer: asyncio.Future[None]


class Exports:
    """Runs on the worker's event loop. `on_forgotten` is called for a sequence that its router left frozen."""

    def __init__(
        self,
        *,
        exporter: Exporter,
        hash_key: bytes,
        post: Callable[[commands.Command], None],
        on_forgotten: Callable[[MemberId, int], None],
        grace_s: float,  # after a ticket's end, for its router to thaw or cancel the sequence
        max_frozen: int = MAX_FROZEN,
    ) -> None:
        self._exporter = exporter
        self._hash_key = hash_key
        self._post = post
        self._on_forgotten = on_forgotten
        self._grace_s = grace_s
        self._max_frozen = max_frozen
        self._tickets: dict[Key, bytes] = {}  # of the sequences that are frozen or being frozen
        self._issued: set[bytes] = set()
        self._freezing: dict[bytes, _Freezing] = {}
        self._thawing: dict[Key, _Thawing] = {}  # by the new handle

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def num_tickets(self) -> int:
        """The number of tickets that were issued for frozen sequences and not yet released."""
        return len(self._issued)

    def owners(self) -> Iterator[str]:
        """Return the tickets that are being frozen, as holders of blocks."""
        return map(holders.ticket, self._freezing)

    async def freeze(self, order: FreezeOrder) -> FrozenSequence:
        """Freeze a sequence and issue its ticket, even if the caller is cancelled meanwhile. Raises NotFound if it does
        not decode here or is frozen already, and TooManyFrozen."""
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

    def thaw(self, router: MemberId, handle: int, new_handle: int) -> asyncio.Future[None]:
        """Continue a frozen sequence, even if the caller does not await the result. Raises DuplicateRequest; the future
        raises NotFound too."""
        key = (router, new_handle)
        if key in self._thawing:
            raise DuplicateRequest(f"handle {new_handle} is in use")
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._thawing[key] = _Thawing(handle, answer)
        self._post(commands.Thaw(router, handle, new_handle))
        return answer

    def forget(self, router: MemberId, handles: frozenset[int]) -> None:
        """End the tickets of sequences that ended or decode again. An importer that has attached keeps its lease."""
        for handle in handles:
            ticket_id = self._tickets.pop((router, handle), None)
            if ticket_id is not None:
                self._exporter.fail(
                    ticket_id, reason=HandOffReason.CANCELLED, detail="the sequence is no longer frozen"
                )

    def on_frozen(self, event: commands.Frozen) -> None:
        """Issue the ticket. All its blocks are sealed, so it is finished at once."""
        freezing = self._freezing.pop(event.ticket_id)
        order = freezing.order
        if self._tickets.get((order.router, order.handle)) != event.ticket_id:
            self._post(Release(event.ticket_id))  # the sequence was cancelled in the meantime
            _fail(freezing.answer, NotFound(f"sequence {order.handle} was cancelled"))
            return
        issued = self._exporter.issue(
            request_id=event.request_id,
            attempt=order.attempt,
            importer=order.importer,
            num_tokens=len(event.token_ids),
            prompt_hash=hash_prompt(self._hash_key, event.token_ids),
            num_choices=1,
            ticket_id=event.ticket_id,
        )
        self._issued.add(event.ticket_id)
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
        _fail(freezing.answer, event.error)

    def on_thawed(self, event: commands.Thawed | commands.ThawRefused) -> int:
        """Complete a Thaw call. Return the handle that no sequence has any more: the old one, or the new one if the
        thaw was refused."""
        thawing = self._thawing.pop((event.router, event.handle))
        if isinstance(event, commands.ThawRefused):
            _fail(thawing.answer, event.error)
            return event.handle
        if not thawing.answer.done():
            thawing.answer.set_result(None)
        return thawing.handle

    def release(self, ticket_id: bytes) -> None:
        """Release a ticket. The exporter calls this when no lease of it is left."""
        self._post(Release(ticket_id))
        self._issued.discard(ticket_id)
        key = next((key for key, known in self._tickets.items() if known == ticket_id), None)
        if key is not None:
            asyncio.get_running_loop().call_later(self._grace_s, self._end_forgotten, key, ticket_id)

    def _end_forgotten(self, key: Key, ticket_id: bytes) -> None:
        """Report a sequence that no worker can import any more and that its router left frozen."""
        if self._tickets.get(key) == ticket_id:
            self._on_forgotten(*key)


def _fail(waiting: asyncio.Future[FrozenSequence] | asyncio.Future[None], error: TandemError) -> None:
    if not waiting.done():
        waiting.set_exception(error)
