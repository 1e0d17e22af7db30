"""Which prefill worker has which block in its prefix cache, as the workers' own numbered events tell it. Pure.

It is right as of each worker's last news. Of a worker whose events have a gap nothing is known until its next snapshot;
an incarnation counts for itself, and ends the one before it. Bounded by what the workers say that they have room for.
"""

from collections.abc import Sequence

from cluster.messages import MemberId, PrefixNews


class PrefixIndex:
    def __init__(self) -> None:
        self._workers: dict[bytes, set[MemberId]] = {}
        self._blocks: dict[MemberId, set[bytes]] = {}
        self._next_number: dict[MemberId, int] = {}

    def __len__(self) -> int:
        """Blocks of all workers."""
        return sum(map(len, self._blocks.values()))

    def next_number(self, worker: MemberId) -> int | None:
        """The first event of it that is not known yet; None: a snapshot is needed."""
        return self._next_number.get(worker)

    def apply(self, worker: MemberId, news: PrefixNews, *, max_blocks: int) -> bool:
        """False: events are missing, or it claims more than it has room for; nothing of it is known any more. News that
        is known already changes nothing."""
        known = self._next_number.get(worker)
        if news.is_snapshot:
            self._begin(worker)
        elif known is None or news.first_number != known:
            if known is not None and news.next_number <= known:
                return True
            self.forget(worker)
            return False
        self._add(worker, news.added)
        self._remove(worker, news.evicted)
        self._next_number[worker] = news.next_number
        if len(self._blocks[worker]) > max_blocks:
            self.forget(worker)
            return False
        return True

    def forget(self, worker: MemberId) -> None:
        """It is gone, or what is known of it is not to be trusted."""
        self._remove(worker, tuple(self._blocks.get(worker, ())))
        self._blocks.pop(worker, None)
        self._next_number.pop(worker, None)

    def holders(self, block_hashes: Sequence[bytes]) -> dict[MemberId, int]:
        """Of each worker that has the beginning of this chain: how many leading blocks."""
        lengths: dict[MemberId, int] = {}
        holding = set(self._blocks)
        for length, block_hash in enumerate(block_hashes, start=1):
            holding &= self._workers.get(block_hash, set())
            if not holding:
                break
            lengths |= dict.fromkeys(holding, length)
        return lengths

    def check(self) -> None:
        """Raises AssertionError when the two sides of the index disagree."""
        forward = {(block_hash, worker) for block_hash, workers in self._workers.items() for worker in workers}
        backward = {(block_hash, worker) for worker, hashes in self._blocks.items() for block_hash in hashes}
        assert forward == backward and all(self._workers.values()), "the index disagrees with itself"
        assert self._blocks.keys() == self._next_number.keys(), "blocks of a worker that is not followed"

    def _begin(self, worker: MemberId) -> None:
        for known in [known for known in self._blocks if known.id == worker.id]:
            self.forget(known)
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
