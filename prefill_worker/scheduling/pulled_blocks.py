"""Blocks that prefixes are pulled into, until they are in the cache or forgotten. Pure. Owned by the prefill scheduler.

A pull is given all its blocks at once and now, or none: it may help a prompt, it may never keep one waiting.
"""

from collections.abc import Iterable, Sequence

from engine.kv.block_pool import BlockPool
from prefill_worker.scheduling.commands import AdmitPull


class PulledBlocks:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pulls: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def pull_ids(self) -> Iterable[int]:
        return self._pulls.keys()

    @property
    def block_ids(self) -> list[int]:
        return [block_id for block_ids in self._pulls.values() for block_id in block_ids]

    def reserve(
        self, pull_id: int, block_hashes: Sequence[bytes], *, num_to_leave: int
    ) -> tuple[tuple[int, ...], int] | None:
        """(blocks, how many of the first hold their content already). None: so many others would not stay available."""
        assert pull_id not in self._pulls, f"pull {pull_id} reserves twice"
        found = self._pool.find(block_hashes)
        num_fresh = len(block_hashes) - len(found)
        if self._pool.num_available_beside(found) - num_fresh < num_to_leave:
            return None
        block_ids = self._pool.reserve_beside(found, num_fresh)
        assert block_ids is not None
        self._pulls[pull_id] = block_ids
        return block_ids, len(found)

    def admit(self, command: AdmitPull) -> None:
        """They are settled: whoever begins like this finds them from now on."""
        block_ids = self._pulls.pop(command.pull_id)
        self._pool.mark_unverified(command.unverified)
        self._pool.keep(block_ids, command.block_hashes, command.root)
        self._pool.release(block_ids)

    def discard(self, pull_id: int, quarantined: frozenset[int]) -> None:
        """It failed. Unknown: it was admitted, or never had blocks."""
        block_ids = self._pulls.pop(pull_id, ())
        foreign = quarantined - set(block_ids)
        assert not foreign, f"pull {pull_id} quarantines {sorted(foreign)}, which it does not hold"
        self._pool.quarantine(sorted(quarantined), pull_id)
        self._pool.release([block_id for block_id in block_ids if block_id not in quarantined])
