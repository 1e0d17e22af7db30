"""Imports of hand-offs into this worker: one task each, from ticket to AdmitImported.

This module owns the tasks. It implements kvtransfer's `BlockSource`: every call becomes a command to the step thread,
which owns the block pool.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from cluster import holders
from cluster.errors import InternalError, TandemError
from cluster.messages import DecodeJob, MemberId
from cluster.protocol.hashing import NewChain, hash_prompt
from engine.scheduling import commands
from engine.scheduling.commands import Quiet
from engine.steps.questions import StepInbox
from kvtransfer.importer.importer import ExpectedPrompt, ImportedBlocks, Importer
from kvtransfer.memory import Reservation

_LOG = logging.getLogger("tandem.decode.imports")


@dataclass(slots=True)
class _Import:
    job: DecodeJob
    task: asyncio.Task[None] | None = None
    cancelled_handles: set[int] = field(default_factory=set)


class Imports:
    """Runs on the worker's event loop. Every import ends with a call of `on_admitted` or `on_failed`, or is
    cancelled."""

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

    async def reserve(self, handoff_id: int, num_blocks: int) -> Reservation:
        """Return when the step thread has reserved all the blocks. `discard` must follow unless the hand-off is
        admitted. Raises HandOffFailed if the pool can never hold so many."""
        command = commands.Reserve(handoff_id, num_blocks)
        if (entry := self._imports.get(handoff_id)) is not None:
            command = replace(command, block_hashes=self._block_hashes(entry.job), job=entry.job)
        reserved = await self._steps.ask(command)
        return Reservation(reserved.block_ids, reserved.num_cached)

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
