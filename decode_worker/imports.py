"""Hand-offs on their way into this worker: one task each, from ticket to AdmitImported.

Owns the tasks and the reservations they wait for. It is the importer's view of the block pool (kvtransfer's
BlockSource): every call becomes a command to the step thread, which owns the pool.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cluster import holders
from cluster.errors import InternalError, TandemError
from cluster.messages import DecodeJob, MemberId
from cluster.protocol.hashing import NewChain, hash_prompt
from decode_worker.scheduling import commands
from kvtransfer.importer.block_source import Reservation
from kvtransfer.importer.importer import Expected, Imported, Importer

_LOG = logging.getLogger("tandem.decode.imports")


@dataclass(slots=True)
class _Import:
    job: DecodeJob
    task: asyncio.Task[None] | None = None
    cancelled_handles: set[int] = field(default_factory=set)


class Imports:
    """Runs on the worker's event loop. `post` reaches the step thread; `on_admitted` and `on_failed` the service."""

    def __init__(
        self,
        *,
        importer: Importer,
        cluster_key: bytes,
        new_chain: NewChain,
        wire_dtype: str,
        vocab_size: int,
        post: Callable[[commands.Command], None],
        on_admitted: Callable[[DecodeJob, Imported, frozenset[int]], None],
        on_failed: Callable[[DecodeJob, TandemError], None],
    ) -> None:
        self._importer = importer
        self._cluster_key = cluster_key
        self._new_chain = new_chain
        self._wire_dtype = wire_dtype
        self._vocab_size = vocab_size
        self._post = post
        self._on_admitted = on_admitted
        self._on_failed = on_failed
        self._imports: dict[int, _Import] = {}
        self._reservations: dict[int, asyncio.Future[Reservation]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._imports)

    def owners(self) -> Iterator[str]:
        """Holders of blocks that live here."""
        return map(holders.hand_off, self._imports)

    def start(self, job: DecodeJob) -> None:
        """Pulls the job's KV and admits it."""
        handoff_id = self.new_id()
        entry = self._imports[handoff_id] = _Import(job)
        entry.task = asyncio.create_task(self._run(handoff_id, entry), name=f"import {job.request_id}")
        entry.task.add_done_callback(lambda _: self._imports.pop(handoff_id))

    def new_id(self) -> int:
        """Of a hand-off, or of whatever else reserves blocks as one does."""
        self._next_id += 1
        return self._next_id

    def cancel(self, router: MemberId, handles: frozenset[int]) -> None:
        """An import of which nobody waits for any choice ends; one that goes on remembers the cancelled ones."""
        for entry in tuple(self._imports.values()):
            if entry.job.router == router:
                entry.cancelled_handles |= handles & {s.handle for s in entry.job.sequences}
                if entry.task is not None and len(entry.cancelled_handles) == len(entry.job.sequences):
                    entry.task.cancel()

    async def close(self) -> None:
        """Ends every import and waits until its blocks are accounted for."""
        tasks = [entry.task for entry in self._imports.values() if entry.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reserve(self, handoff_id: int, num_blocks: int) -> Reservation:
        """Waits until the step thread has set all of them aside. Raises HandOffFailed if it never can."""
        reservation: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._reservations[handoff_id] = reservation
        entry = self._imports.get(handoff_id)
        if entry is None:
            self._post(commands.Reserve(handoff_id, num_blocks))
        else:
            self._post(commands.Reserve(handoff_id, num_blocks, self._block_hashes(entry.job), entry.job))
        try:
            return await reservation
        finally:
            del self._reservations[handoff_id]

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        self._post(commands.Discard(handoff_id, quarantined))

    def quiet(self, block_ids: frozenset[int]) -> None:
        self._post(commands.Quiet(block_ids))

    def on_reserved(self, event: commands.Reserved) -> None:
        reservation = self._reservations.get(event.handoff_id)
        if reservation is not None and not reservation.done():
            reservation.set_result(Reservation(event.block_ids, event.num_cached))

    def on_unreservable(self, event: commands.Unreservable) -> None:
        reservation = self._reservations.get(event.handoff_id)
        if reservation is not None and not reservation.done():
            reservation.set_exception(event.error)

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
        except Exception as error:  # noqa: BLE001 - the importer has given the blocks back, and the router must be told
            _LOG.exception("request %s: the import failed", entry.job.request_id)
            self._on_failed(entry.job, InternalError(f"the import failed: {type(error).__name__}: {error}"))
        else:
            self._admit(handoff_id, entry, imported)

    def _expected(self, job: DecodeJob) -> Expected:
        token_ids = _token_ids(job)
        prompt_hash = hash_prompt(self._cluster_key, token_ids)
        return Expected(len(token_ids), prompt_hash, len(job.sequences), self._vocab_size)

    def _block_hashes(self, job: DecodeJob) -> tuple[bytes, ...]:
        chain = self._new_chain(job.cache_salt, self._wire_dtype)
        chain.extend(_token_ids(job))
        return tuple(chain.hashes)

    def _admit(self, handoff_id: int, entry: _Import, imported: Imported) -> None:
        self._post(
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
    """What a ticket covers: the prompt and, for a resumed sequence, the tokens that its client has already."""
    return job.prompt_token_ids + job.sequences[0].committed_token_ids
