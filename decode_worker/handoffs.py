"""The hand-offs of a decode worker: imports of KV into its pool, and exports of frozen sequences.

`Imports` owns one task per import, from ticket to AdmitImported. It implements the `BlockSource` of kvtransfer: every
call becomes a command to the step thread, which owns the block pool.

`Exports` owns the tickets of frozen sequences, which offer KV to another decode worker, and the pending Freeze and Thaw
calls. A ticket ends when no lease of it is left. If the router neither thaws nor cancels the sequence within `grace_s`
after that, the sequence is cancelled.

Freeze and Thaw have tables of futures here and do not use `StepLoop.ask`, for two reasons. `ask` resumes its caller one
turn of the event loop after the event; but a ticket must be issued, and an old handle forgotten, before the next event
is applied, which may end the same sequence. And `ask` drops the answer of a caller that was cancelled; but a sequence
that is frozen then still needs its ticket, which alone leads to the release of its blocks.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from cluster import holders
from cluster.errors import DuplicateRequest, HandOffReason, InternalError, NotFound, TandemError, TooManyFrozen
from cluster.messages import DecodeJob, MemberId
from cluster.protocol import tickets
from cluster.protocol.hashing import NewChain, hash_prompt
from engine.scheduling import commands
from engine.scheduling.commands import Quiet, Release
from engine.steps.questions import StepInbox
from kvtransfer.exporter.exporter import Exporter, FirstToken, TailBlock
from kvtransfer.importer.importer import ExpectedPrompt, ImportedBlocks, Importer
from kvtransfer.memory import Reservation

_LOG = logging.getLogger("tandem.decode.imports")


@dataclass(slots=True)
class _Import:
    job: DecodeJob
    task: asyncio.Task[None] | None = None
    cancelled_handles: set[int] = field(default_factory=set)


class Imports:
    """The imports in progress, on the worker's event loop. Every import ends with a call of `on_admitted` or
    `on_failed`, or is cancelled.
    """

    def __init__(
        self,
        *,
        importer: Importer,
        hash_key: bytes,
        new_chain: NewChain,
        wire_dtype: str,
        handoff_ids: Iterator[int],
        vocab_size: int,
        steps: StepInbox[commands.Command],
        on_admitted: Callable[[DecodeJob, ImportedBlocks, frozenset[int]], None],
        on_failed: Callable[[DecodeJob, TandemError], None],
    ) -> None:
        self._importer = importer
        self._hash_key = hash_key
        self._new_chain = new_chain
        self._wire_dtype = wire_dtype
        self._handoff_ids = handoff_ids
        self._vocab_size = vocab_size
        self._steps = steps
        self._on_admitted = on_admitted
        self._on_failed = on_failed
        self._imports: dict[int, _Import] = {}

    def __len__(self) -> int:
        return len(self._imports)

    def owners(self) -> Iterator[str]:
        """Return the imports in progress, as holders of blocks."""
        return map(holders.hand_off, self._imports)

    def start(self, job: DecodeJob) -> None:
        """Import the job's KV and admit its sequences."""
        handoff_id = self.new_id()
        entry = self._imports[handoff_id] = _Import(job)
        entry.task = asyncio.create_task(self._run(handoff_id, entry), name=f"import {job.request_id}")
        entry.task.add_done_callback(lambda _: self._imports.pop(handoff_id))

    def new_id(self) -> int:
        """Return a new hand-off id. A link check reserves blocks under such an id as well."""
        return next(self._handoff_ids)

    def cancel(self, router: MemberId, handles: frozenset[int]) -> None:
        """End imports whose every choice is cancelled; the other imports remember their cancelled choices."""
        for entry in tuple(self._imports.values()):
            if entry.job.router == router:
                entry.cancelled_handles |= handles & {s.handle for s in entry.job.sequences}
                if entry.task is not None and len(entry.cancelled_handles) == len(entry.job.sequences):
                    entry.task.cancel()

    async def close(self) -> None:
        """Cancel every import and wait until its blocks are released or admitted."""
        tasks = [entry.task for entry in self._imports.values() if entry.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reserve(self, handoff_id: int, num_blocks: int, *, is_announced: bool) -> Reservation:
        """Return when the step thread has reserved all the blocks. `discard` must follow unless the hand-off is
        admitted. Raises HandOffFailed if the pool can never hold that many.
        """
        command = commands.Reserve(handoff_id, num_blocks, is_announced=is_announced)
        if (entry := self._imports.get(handoff_id)) is not None:
            command = replace(command, block_hashes=self._block_hashes(entry.job), job=entry.job)
        reserved = await self._steps.ask(command)
        return Reservation(reserved.block_ids, reserved.num_cached)

    def announce(self, handoff_id: int) -> None:
        self._steps.post(commands.Announce(handoff_id))

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        self._steps.post(commands.Discard(handoff_id, quarantined))

    def release_quarantined(self, block_ids: frozenset[int]) -> None:
        self._steps.post(Quiet(block_ids))

    async def _run(self, handoff_id: int, entry: _Import) -> None:
        try:
            assert entry.job.signed_ticket is not None
            imported = await self._importer.import_blocks(
                handoff_id=handoff_id,
                signed_ticket=entry.job.signed_ticket,
                expected=self._expected(entry.job),
                blocks=self,
            )
        except TandemError as error:
            self._on_failed(entry.job, error)
        except Exception as error:  # noqa: BLE001 - the importer has released the blocks, and the router needs the error
            _LOG.exception("request %s: the import failed", entry.job.request_id)
            self._on_failed(entry.job, InternalError(f"the import failed: {type(error).__name__}: {error}"))
        else:
            self._admit(handoff_id, entry, imported)

    def _expected(self, job: DecodeJob) -> ExpectedPrompt:
        token_ids = _token_ids(job)
        prompt_hash = hash_prompt(self._hash_key, token_ids)
        return ExpectedPrompt(len(token_ids), prompt_hash, len(job.sequences), self._vocab_size)

    def _block_hashes(self, job: DecodeJob) -> tuple[bytes, ...]:
        chain = self._new_chain(job.cache_salt, self._wire_dtype)
        chain.extend(_token_ids(job))
        return tuple(chain.hashes)

    def _admit(self, handoff_id: int, entry: _Import, imported: ImportedBlocks) -> None:
        self._steps.post(
            commands.AdmitImported(
                handoff_id=handoff_id,
                job=entry.job,
                sealed_block_ids=imported.sealed_block_ids,
                tail_block_ids=imported.tail_block_ids,
                first_tokens=tuple(None if first.ended else first.token_id for first in imported.first_tokens),
                unverified=imported.unverified_block_ids,
            )
        )
        self._on_admitted(entry.job, imported, frozenset(entry.cancelled_handles))


def _token_ids(job: DecodeJob) -> tuple[int, ...]:
    """Return the tokens that a ticket covers: the prompt and the committed tokens of a resumed sequence."""
    return job.prompt_token_ids + job.sequences[0].committed_token_ids


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
    """The exports of frozen sequences, on the worker's event loop. `on_forgotten` is called for a sequence that its
    router left frozen.
    """

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
                f"{len(self._tickets)} sequences are frozen here, the maximum; try again", retry_after_s=_TURN_S
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
            else TailBlock(event.tail.block_id, event.tail.num_valid, event.tail.is_unverified),
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
