"""The state and the users of every block of the pool. Pure; owned by one scheduler, never by two threads.

A block is counted in exactly one state, the first that applies:

    quarantined   an abandoned read may still write into it; it may not be used
    leased        pinned for readers of other workers; its content does not change
    held          sequences or reservations refer to it
    cached        unused, kept for its content: reused when its hash is found, or evicted when no block is free
    free          may be reserved

References are counted separately: a leased block may also be referred to by the sequence that computed it, and becomes
free, or cached, only when both have gone. Blocks are freed between steps only, so no step that was launched before can
still be writing to a block that is reserved again.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from cluster.messages import CacheEvents
from engine.kv.eviction import eviction_of
from engine.kv.prefix_cache import PrefixCache

_NUM_REMEMBERED = 256  # operations, for the history in an error message


class BlockState(StrEnum):
    QUARANTINED = "quarantined"
    LEASED = "leased"
    HELD = "held"
    CACHED = "cached"
    FREE = "free"


class BlockPool:
    """The accounting of all blocks. Every operation costs O(1) per block. An illegal operation raises AssertionError
    with the block's recent history."""

    def __init__(self, num_blocks: int, eviction: str = "value") -> None:
        """`eviction` names the order in which cached blocks are evicted: `value` or `lru`."""
        assert num_blocks >= 1, f"a pool needs blocks, not {num_blocks}"
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._leases: dict[int, int] = {}  # number of leases of each leased block
        self._quarantined: dict[int, int] = {}  # by quarantined block: the hand-off that may still write to it
        self._num_held = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the warmest block first
        self._cache = PrefixCache(eviction_of(eviction, num_blocks))
        # Blocks that came from another worker unverified, or were computed from such, until they are reserved again.
        self._unverified: set[int] = set()
        self._history: deque[tuple[str, tuple[int, ...]]] = deque(maxlen=_NUM_REMEMBERED)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """The number of blocks that could be reserved."""
        return len(self._free) + self._cache.num_idle

    def num_available_beside(self, block_ids: Iterable[int]) -> int:
        """The number of blocks that could be reserved if these were shared first."""
        return self.num_available - sum(map(self._cache.is_idle, block_ids))

    @property
    def num_leased(self) -> int:
        return len(self._leases)

    @property
    def num_evicted(self) -> int:
        """The number of cached blocks that were evicted since the start."""
        return self._cache.num_evicted

    @property
    def next_cache_event(self) -> int:
        """The number of the next event of the prefix cache."""
        return self._cache.next_number

    def cache_events(self, since: int | None) -> CacheEvents:
        """Return the changes of the prefix cache since this event, or its whole content if `since` is None."""
        return self._cache.changes_since(since)

    def reserve(self, num_blocks: int) -> tuple[int, ...] | None:
        """Reserve `num_blocks` blocks, each with one reference: free ones first, then evicted ones. Returns None, and
        reserves none, if there are fewer."""
        assert num_blocks >= 0, f"cannot reserve {num_blocks} blocks"
        if num_blocks > self.num_available:
            return None
        block_ids = tuple(self._free.pop() if self._free else self._cache.evict() for _ in range(num_blocks))
        for block_id in block_ids:
            self._references[block_id] = 1
        self._num_held += num_blocks
        self._unverified.difference_update(block_ids)
        self._history.append(("reserve", block_ids))
        return block_ids

    def num_users(self, block_id: int) -> int:
        """The number of references and leases of a block."""
        return self._references[block_id] + self._leases.get(block_id, 0)

    def find(self, block_hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Return the cached blocks of the longest prefix of this chain; share or lease them before any other call."""
        return self._cache.match(block_hashes)

    def reserve_beside(self, found: Sequence[int], num_blocks: int) -> tuple[int, ...] | None:
        """Share the found blocks and reserve `num_blocks` more after them; return None, and do neither, if there are
        fewer."""
        if num_blocks > self.num_available_beside(found):
            return None
        self.add_references(found)
        fresh = self.reserve(num_blocks)
        assert fresh is not None
        return (*found, *fresh)

    def keep(self, block_ids: Sequence[int], block_hashes: Sequence[bytes], parent: bytes) -> None:
        """Cache consecutive sealed blocks in use, the first of which continues `parent`. From now on, `find` returns
        these blocks, and they stay cached while unused until they are evicted. Of blocks with equal content, only the
        first is cached."""
        for block_id, block_hash in zip(block_ids, block_hashes, strict=False):
            self._require(self._references[block_id] > 0, "keep", block_id)
            self._cache.add(block_id, block_hash, parent)
            parent = block_hash

    def mark_unverified(self, block_ids: Iterable[int]) -> None:
        """Mark blocks whose content came from another worker without verification, or was computed from such content;
        the mark follows every use and copy."""
        for block_id in block_ids:
            self._require(self._references[block_id] > 0, "mark_unverified", block_id)
            self._unverified.add(block_id)

    def unverified_among(self, block_ids: Iterable[int]) -> frozenset[int]:
        return frozenset(self._unverified.intersection(block_ids)) if self._unverified else frozenset()

    def add_references(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, all of which must be in use or cached."""
        for block_id in block_ids:
            is_idle = self._cache.is_idle(block_id)
            self._require(
                self._references[block_id] > 0 or block_id in self._leases or is_idle, "add_references", block_id
            )
            if is_idle:
                self._cache.use_again(block_id)
            if self._references[block_id] == 0 and block_id not in self._leases:
                self._num_held += 1
            self._references[block_id] += 1
        self._history.append(("add_references", tuple(block_ids)))

    def drop_references(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block, given in the sequence's order. The last reference frees a block unless it
        is leased."""
        for block_id in reversed(block_ids):
            self._require(self._references[block_id] > 0, "drop_references", block_id)
            self._references[block_id] -= 1
            if self._references[block_id] == 0 and block_id not in self._leases:
                self._num_held -= 1
                self._free_or_park(block_id)
        self._history.append(("drop_references", tuple(block_ids)))

    def begin_lease(self, block_ids: Sequence[int]) -> None:
        """Lease blocks in use. They stay leased after their references are dropped."""
        for block_id in block_ids:
            self._require(self._references[block_id] > 0, "begin_lease", block_id)
            if block_id not in self._leases:
                self._num_held -= 1
            self._leases[block_id] = self._leases.get(block_id, 0) + 1
        self._history.append(("begin_lease", tuple(block_ids)))

    def lease_found(self, block_ids: Sequence[int]) -> None:
        """Lease blocks that `find` returned, whether or not they are referred to."""
        self.add_references(block_ids)
        self.begin_lease(block_ids)
        self.drop_references(block_ids)

    def lease_copied(self, block_ids: Sequence[int]) -> None:
        """Lease found blocks while they are copied, without counting a use for eviction."""
        for block_id in block_ids:
            is_idle = self._cache.is_idle(block_id)
            self._require(self._references[block_id] > 0 or block_id in self._leases or is_idle, "copy", block_id)
            if is_idle:
                self._cache.unpark(block_id)
            elif block_id not in self._leases:
                self._num_held -= 1
            self._leases[block_id] = self._leases.get(block_id, 0) + 1
        self._history.append(("copy", tuple(block_ids)))

    def end_lease(self, block_ids: Sequence[int]) -> None:
        """End one lease of each block, given in the sequence's order. A block without leases and references becomes
        free."""
        for block_id in reversed(block_ids):
            self._require(block_id in self._leases, "end_lease", block_id)
            self._leases[block_id] -= 1
            if self._leases[block_id] == 0:
                del self._leases[block_id]
                if self._references[block_id] > 0:
                    self._num_held += 1
                else:
                    self._free_or_park(block_id)
        self._history.append(("end_lease", tuple(block_ids)))

    @property
    def quarantined_for(self) -> frozenset[int]:
        """Return the hand-offs that may still write to quarantined blocks."""
        return frozenset(self._quarantined.values())

    def quarantine(self, block_ids: Iterable[int], handoff_id: int) -> None:
        """Turn the only reference of each block into quarantine, until this hand-off cannot write to it any more."""
        block_ids = tuple(block_ids)
        for block_id in block_ids:
            is_alone = self._references[block_id] == 1 and block_id not in self._leases
            self._require(is_alone and block_id not in self._cache, "quarantine", block_id)
            self._references[block_id] = 0
            self._num_held -= 1
            self._quarantined[block_id] = handoff_id
        self._history.append(("quarantine", block_ids))

    def end_quarantine(self, block_ids: Iterable[int]) -> None:
        """Free these blocks, to which no transport can write any more."""
        block_ids = tuple(block_ids)
        for block_id in block_ids:
            self._require(block_id in self._quarantined, "end_quarantine", block_id)
            del self._quarantined[block_id]
            self._free.append(block_id)
        self._history.append(("end_quarantine", block_ids))

    def state(self, block_id: int) -> BlockState:
        if block_id in self._quarantined:
            return BlockState.QUARANTINED
        if block_id in self._leases:
            return BlockState.LEASED
        if self._references[block_id] > 0:
            return BlockState.HELD
        return BlockState.CACHED if block_id in self._cache else BlockState.FREE

    def check_references(self, expected: Sequence[int]) -> None:
        """Raises AssertionError unless every block has as many references as its users account for."""
        if self._references != list(expected):
            wrong = next(b for b in range(self.num_blocks) if self._references[b] != expected[b])
            raise AssertionError(f"users account for {expected[wrong]} references to {self._describe(wrong)}")

    def check_leases(self, expected: Mapping[int, int]) -> None:
        """Raises AssertionError unless every block has as many leases as its tickets account for."""
        if self._leases != expected:
            wrong = min(b for b in {*self._leases, *expected} if self._leases.get(b, 0) != expected.get(b, 0))
            raise AssertionError(f"tickets account for {expected.get(wrong, 0)} leases on {self._describe(wrong)}")

    def counts(self) -> dict[str, int]:
        """Blocks by state; they sum to `num_blocks`."""
        return {
            BlockState.QUARANTINED.value: len(self._quarantined),
            BlockState.LEASED.value: len(self._leases),
            BlockState.HELD.value: self._num_held,
            BlockState.CACHED.value: self._cache.num_idle,
            BlockState.FREE.value: len(self._free),
        }

    def check(self) -> None:
        """Recount everything. Raises AssertionError with the broken invariant. Fast enough for a heartbeat: about three
        milliseconds for 10,000 blocks."""
        counts = self.counts()
        assert sum(counts.values()) == self.num_blocks, f"states sum to {counts}, the pool has {self.num_blocks}"
        free = set(self._free)
        assert len(free) == len(self._free), f"free twice: {sorted(self._free)}"
        referenced = {block_id for block_id, references in enumerate(self._references) if references}
        leased = set(self._leases)
        assert len(referenced - leased) == self._num_held, f"{counts}, but {len(referenced)} are referred to"
        quarantined = set(self._quarantined)
        for users in (referenced, leased, quarantined):
            assert not free & users, f"free and in use: {self._describe(min(free & users))}"
        for users in (referenced, leased):
            assert not users & quarantined, f"quarantined and in use: {self._describe(min(users & quarantined))}"
        for unusable in (free, quarantined):
            assert not any(block_id in self._cache for block_id in unusable), (
                f"cached, but free or quarantined: {unusable}"
            )
        self._cache.check(in_use=referenced | leased)

    def _free_or_park(self, block_id: int) -> None:
        if block_id in self._cache:
            self._cache.park(block_id)
        else:
            self._free.append(block_id)

    def _require(self, legal: bool, operation: str, block_id: int) -> None:
        if not legal:
            raise AssertionError(f"illegal {operation} of {self._describe(block_id)}")

    def _describe(self, block_id: int) -> str:
        history = " ".join(operation for operation, block_ids in self._history if block_id in block_ids)
        return f"block {block_id} ({self.state(block_id)}, {self._references[block_id]} references): ...{history}"
