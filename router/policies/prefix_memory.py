"""Which worker was given which beginning of a prompt, by the hashes of its blocks. Pure.

What it says is a belief: the worker may have evicted it since, or be gone. Bounded: the blocks that were longest not
asked or told about are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from cluster.messages import MemberId

_MAX_WORKERS = 4  # remembered per block, the latest


class PrefixMemory:
    def __init__(self, max_blocks: int = 131_072) -> None:
        self._max_blocks = max_blocks
        self._workers: OrderedDict[bytes, tuple[MemberId, ...]] = OrderedDict()  # the latest first

    def __len__(self) -> int:
        return len(self._workers)

    def remember(self, block_hashes: Sequence[bytes], worker: MemberId) -> None:
        """It has, or is about to have, all of these."""
        for block_hash in reversed(block_hashes):  # a chain's beginning is forgotten last: without it nothing is found
            others = [other for other in self._workers.get(block_hash, ()) if other.id != worker.id]
            self._workers[block_hash] = (worker, *others[: _MAX_WORKERS - 1])
            self._workers.move_to_end(block_hash)
        while len(self._workers) > self._max_blocks:
            self._workers.popitem(last=False)

    def forget(self, block_hashes: Sequence[bytes], worker: MemberId) -> None:
        """It has evicted these."""
        for block_hash in block_hashes:
            if others := tuple(other for other in self._workers.get(block_hash, ()) if other.id != worker.id):
                self._workers[block_hash] = others
            else:
                self._workers.pop(block_hash, None)

    def holders(self, block_hashes: Sequence[bytes]) -> list[tuple[MemberId, int]]:
        """(worker, leading blocks that it has), the longest first."""
        lengths: dict[MemberId, int] = {}
        for length, block_hash in enumerate(block_hashes, start=1):
            continuing = [w for w in self._workers.get(block_hash, ()) if lengths.get(w, 0) == length - 1]
            if not continuing:
                break
            lengths |= dict.fromkeys(continuing, length)
        for block_hash in reversed(block_hashes[: max(lengths.values(), default=0)]):
            self._workers.move_to_end(block_hash)
        return sorted(lengths.items(), key=lambda item: -item[1])
