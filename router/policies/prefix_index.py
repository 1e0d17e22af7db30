"""An index of the workers that hold each block of a prompt, by block hash. Pure.

Two sources of different weight, both keyed by the hash of a block, which covers everything before it:

- `ReportedBlocks`: what prefill workers published as cache events. Exact as of the last event of each worker; bounded
  by the capacities that the workers registered.
- `RoutedBlocks`: prompts that this router sent to a worker lately. An estimate: the worker may not have computed them
  yet, or may have removed them since. Bounded; the least recently used blocks are dropped first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from cluster.messages import CacheEvents, MemberId

_MAX_WORKERS = 4  # per routed block, the latest ones
_NO_WORKERS: frozenset[MemberId] = frozenset()


class PrefixIndex:
    """The reported and the routed blocks together. `len` counts reported blocks."""

    def __init__(self, max_routed_blocks: int = 131_072) -> None:
        self._reported = ReportedBlocks()
        self._routed = RoutedBlocks(max_routed_blocks)

    def __len__(self) -> int:
        return len(self._reported)

    def next_number(self, worker: MemberId) -> int | None:
        """The number of the first event of this worker that is not applied yet. None: a snapshot is needed."""
        return self._reported.next_number(worker)

    def apply(self, worker: MemberId, events: CacheEvents, *, max_blocks: int) -> bool:
        """Apply the events as `ReportedBlocks.apply` does. Blocks that the worker removed do not count as
        routed to it either."""
        self._routed.remove(events.removed, worker)
        return self._reported.apply(worker, events, max_blocks=max_blocks)

    def note_routed(self, block_hashes: Sequence[bytes], *workers: MemberId) -> None:
        """Record that each of these workers has all of these blocks, or will have them soon."""
        self._routed.add(block_hashes, *workers)

    def forget(self, worker: MemberId) -> None:
        """Drop the blocks that this worker reported."""
        self._reported.forget(worker)

    def leading_blocks(self, block_hashes: Sequence[bytes]) -> dict[MemberId, int]:
        """Return the number of leading blocks of this chain per worker that has any, reported or routed."""
        reported = self._reported.leading_blocks(block_hashes)
        routed = self._routed.leading_blocks(block_hashes)
        return {worker: max(reported.get(worker, 0), routed.get(worker, 0)) for worker in {**routed, **reported}}


class ReportedBlocks:
    """The blocks that workers reported, by incarnation; a snapshot of a newer incarnation drops the blocks of the older
    one.
    """

    def __init__(self) -> None:
        self._workers: dict[bytes, set[MemberId]] = {}
        self._blocks: dict[MemberId, set[bytes]] = {}
        self._next_number: dict[MemberId, int] = {}

    def __len__(self) -> int:
        """Return the number of blocks of all workers."""
        return sum(map(len, self._blocks.values()))

    def next_number(self, worker: MemberId) -> int | None:
        """The number of the first event of this worker that is not applied yet. None: a snapshot is needed."""
        return self._next_number.get(worker)

    def apply(self, worker: MemberId, events: CacheEvents, *, max_blocks: int) -> bool:
        """Apply cache events. Return False, and drop all blocks of the worker, if events are missing or the worker
        reports more blocks than it can hold. Events that were applied before change nothing."""
        next_number = self._next_number.get(worker)
        if events.cleared:
            self._clear(worker)
        elif next_number is None or events.first_number != next_number:
            if next_number is not None and events.next_number <= next_number:
                return True
            self.forget(worker)
            return False
        self._add(worker, events.stored)
        self._remove(worker, events.removed)
        self._next_number[worker] = events.next_number
        if len(self._blocks[worker]) > max_blocks:
            self.forget(worker)
            return False
        return True

    def forget(self, worker: MemberId) -> None:
        """Drop the blocks of a worker that is lost, or whose events are inconsistent."""
        self._remove(worker, tuple(self._blocks.get(worker, ())))
        self._blocks.pop(worker, None)
        self._next_number.pop(worker, None)

    def leading_blocks(self, block_hashes: Sequence[bytes]) -> dict[MemberId, int]:
        """Return the number of leading blocks of this chain per worker that has any."""
        lengths: dict[MemberId, int] = {}
        holding = set(self._blocks)
        for num_before, block_hash in enumerate(block_hashes):
            left = holding & self._workers.get(block_hash, _NO_WORKERS)
            if len(left) < len(holding):
                lengths |= dict.fromkeys(holding - left, num_before)
                holding = left
            if not holding:
                break
        lengths |= dict.fromkeys(holding, len(block_hashes))
        return {worker: length for worker, length in lengths.items() if length}

    def check(self) -> None:
        """Raise AssertionError if the two directions of the index differ."""
        forward = {(block_hash, worker) for block_hash, workers in self._workers.items() for worker in workers}
        backward = {(block_hash, worker) for worker, hashes in self._blocks.items() for block_hash in hashes}
        assert forward == backward and all(self._workers.values()), "the two directions of the index differ"
        assert self._blocks.keys() == self._next_number.keys(), "blocks of a worker without a next event number"

    def _clear(self, worker: MemberId) -> None:
        for member in [member for member in self._blocks if member.id == worker.id]:
            self.forget(member)
        self._blocks[worker] = set()

    def _add(self, worker: MemberId, block_hashes: Sequence[bytes]) -> None:
        self._blocks[worker].update(block_hashes)
        for block_hash in block_hashes:
            self._workers.setdefault(block_hash, set()).add(worker)

    def _remove(self, worker: MemberId, block_hashes: Sequence[bytes]) -> None:
        for block_hash in block_hashes:
            self._blocks[worker].discard(block_hash)
            workers = self._workers.get(block_hash, set())
            workers.discard(worker)
            if not workers:
                self._workers.pop(block_hash, None)


class RoutedBlocks:
    def __init__(self, max_blocks: int = 131_072) -> None:
        self._max_blocks = max_blocks
        self._workers: OrderedDict[bytes, tuple[MemberId, ...]] = (
            OrderedDict()
        )  # of each block, the latest worker first

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, block_hashes: Sequence[bytes], *workers: MemberId) -> None:
        """Record cached blocks of workers, the last of which counts as the latest one. A restarted worker replaces its
        previous incarnation."""
        latest, names = workers[::-1], {worker.id for worker in workers}
        known: tuple[MemberId, ...] = ()  # of the previous block: usually the next one has the same workers
        added = latest
        for block_hash in reversed(block_hashes):  # the beginning is dropped last: without it nothing is found
            present = self._workers.get(block_hash, ())
            if present is not known and present != known:
                others = [other for other in present if other.id not in names]
                known, added = present, (*latest, *others)[:_MAX_WORKERS]
            self._workers[block_hash] = added
            self._workers.move_to_end(block_hash)
        while len(self._workers) > self._max_blocks:
            self._workers.popitem(last=False)

    def remove(self, block_hashes: Sequence[bytes], worker: MemberId) -> None:
        """Record that the worker has evicted these blocks."""
        for block_hash in block_hashes:
            if others := tuple(other for other in self._workers.get(block_hash, ()) if other.id != worker.id):
                self._workers[block_hash] = others
            else:
                self._workers.pop(block_hash, None)

    def leading_blocks(self, block_hashes: Sequence[bytes]) -> dict[MemberId, int]:
        """Return the number of leading blocks of this chain for each worker that was sent its beginning. It does not
        count as a use of them, because a request that is served then adds them again."""
        lengths: dict[MemberId, int] = {}
        continuing = known = self._workers.get(block_hashes[0], ()) if block_hashes else ()
        for num_before, block_hash in enumerate(block_hashes):
            workers = self._workers.get(block_hash, ())
            if workers is not known and workers != known:  # mostly a block has the same workers as the one before
                known = workers
                lengths |= dict.fromkeys(continuing, num_before)
                continuing = tuple(worker for worker in continuing if worker in workers)
            if not continuing:
                break
        return lengths | dict.fromkeys(continuing, len(block_hashes))
