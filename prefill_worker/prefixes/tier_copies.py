"""The bytes of the tiers under the pool: slots of host memory, and files. Owns both; never decides what lies where.

Its methods block, on helper threads; the index keeps two of them from one slot, and the scheduler from a block that is
read or written here. Every block is compared with its digest before it enters the pool. Nothing here raises for a
broken disk or a damaged block: the outcome says it, in one word.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtransfer.digest.definitions import SUMS, digest_tensor
from kvtransfer.memory import PoolMemory
from prefill_worker.prefixes.block_files import BadBlockFile, BlockFiles
from prefill_worker.prefixes.tier_index import Place, Store

_LOG = logging.getLogger("tandem.prefill.tiers")
_DIGESTS = SUMS  # what every version makes of a file: they find each other's, and on a host all cost the same
OK, DAMAGED, UNREADABLE, UNWRITABLE, LATE = "ok", "damaged", "unreadable", "unwritable", "late"


@dataclass(frozen=True, slots=True)
class Fetched:
    """The first `num_blocks` are in the pool; why the next one is not."""

    num_blocks: int
    outcome: str
    seconds: float


class TierCopies:
    def __init__(self, pool: PoolMemory, num_slots: int, files: BlockFiles | None) -> None:
        self._pool = pool.raw
        self._files = files
        self._slots = torch.zeros(num_slots, pool.block_bytes, dtype=torch.uint8, pin_memory=pool.raw.is_cuda)
        self._digests = [b""] * num_slots
        self._scratch = torch.zeros(1, pool.block_bytes, dtype=torch.uint8)  # of the one thread that fetches
        self._stream = torch.cuda.Stream(pool.raw.device) if pool.raw.is_cuda else None  # type: ignore[no-untyped-call]
        self._told = ""

    def demote(self, stores: Sequence[Store]) -> list[str]:
        """Empties their slots; what became of the block that was in each."""
        return [self._demote(store) for store in stores]

    def store(self, jobs: Sequence[tuple[Store, int]]) -> None:
        """Copies pool blocks into empty slots."""
        for store, block_id in jobs:
            self._copy(self._slots[store.slot], self._pool[block_id])
        self._end_copies()
        for store, _ in jobs:
            self._digests[store.slot] = digest_tensor(self._slots[store.slot : store.slot + 1], _DIGESTS)[0]

    def fetch(self, jobs: Sequence[tuple[Place, int]], stop: threading.Event) -> Fetched:
        """Of each (place, pool block), until one fails or it is told to stop."""
        started_s, outcome, num_blocks = time.monotonic(), OK, 0
        try:
            for place, block_id in jobs:
                outcome = LATE if stop.is_set() else self._fetch(place, block_id)
                if outcome != OK:
                    break
                num_blocks += 1
        finally:  # what has begun to be copied must not be written after this call
            self._end_copies()
        return Fetched(num_blocks, outcome, time.monotonic() - started_s)

    def flush(self, places: Sequence[Place], for_s: float) -> int:
        """Writes slots to disk as long as there is time and nothing fails; how many."""
        until_s = time.monotonic() + for_s
        for number, place in enumerate(places):
            assert place.slot is not None
            if time.monotonic() > until_s or self._write(place.block_hash, place.slot) != OK:
                return number
        return len(places)

    def remove(self, block_hashes: Sequence[bytes]) -> None:
        for block_hash in block_hashes:
            try:
                if self._files is not None:
                    self._files.remove(block_hash)
            except OSError as error:
                self._tell(error)

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def _demote(self, store: Store) -> str:
        self.remove(store.given_up)
        return OK if store.demoted is None else self._write(store.demoted, store.slot)

    def _write(self, block_hash: bytes, slot: int) -> str:
        assert self._files is not None
        try:
            self._files.write(block_hash, self._digests[slot], self._slots[slot].numpy().data)
        except OSError as error:
            self._tell(error)
            return UNWRITABLE
        return OK

    def _fetch(self, place: Place, block_id: int) -> str:
        if place.slot is not None:
            row, digest = self._slots[place.slot], self._digests[place.slot]
        else:
            assert self._files is not None
            row = self._scratch[0]
            self._end_copies()  # the last one may still be read from there
            try:
                digest = self._files.read(place.block_hash, row.numpy().data)
            except OSError as error:
                self._tell(error)
                return UNREADABLE
            except BadBlockFile as error:
                _LOG.warning("block %s on disk is of no use: %s", place.block_hash.hex(), error)
                return DAMAGED
        if digest_tensor(row[None], _DIGESTS)[0] != digest:
            _LOG.warning("block %s in a tier has changed", place.block_hash.hex())
            return DAMAGED
        self._copy(self._pool[block_id], row)
        return OK

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On a GPU by a stream of its own: the engine's steps wait for no copy."""
        if self._stream is None:
            target.copy_(source)
        else:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)

    def _end_copies(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _tell(self, error: OSError) -> None:
        """Once, until it is another one: a disk that is full stays so."""
        if str(error.strerror) != self._told:
            self._told = str(error.strerror)
            _LOG.warning("the prefix cache's disk: %s", error)
