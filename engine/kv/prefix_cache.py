"""The prefix cache: which block holds the KV of which prefix, and which block is evicted next. Pure. Owned by
BlockPool.

A block is found by its hash (cluster/protocol/hashing.py), which covers all tokens before it, so two blocks of equal
hash are interchangeable. A cached block that no sequence refers to and no ticket leases is *idle*: it may be evicted,
in the order of engine/kv/eviction.py. A block is evicted before its parent, the block that it continues, because
without the parent it could not be found.

Every change is a cache event with a number. A subscriber that sees a gap in the numbers asks for a snapshot.
"""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass

from cluster.messages import CacheEvents
from engine.kv.eviction import Eviction

_MAX_EVENTS = 4096  # events kept for subscribers; a subscriber further behind gets a snapshot


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One block was stored or removed. The events of one cache are numbered from 0."""

    number: int
    block_hash: bytes
    is_stored: bool  # else removed


@dataclass(frozen=True, slots=True)
class _Entry:
    block_hash: bytes
    parent: bytes  # hash of the block that this one continues, or the root


class PrefixCache:
    """Finds sealed blocks by their hashes and evicts idle ones. Every operation costs O(1) per block, on average."""

    def __init__(self, eviction: Eviction) -> None:
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._children: dict[bytes, dict[int, None]] = {}  # by hash: the cached blocks that continue this block
        self._idle: set[int] = set()
        self._eviction = eviction
        self._victims: list[int] = []  # a chain of idle blocks, evicted from its end
        self._events: deque[CacheEvent] = deque(maxlen=_MAX_EVENTS)
        self._next_number = 0
        self.num_evicted = 0

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entries

    def is_idle(self, block_id: int) -> bool:
        return block_id in self._idle

    def match(self, block_hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Return the blocks of the longest cached prefix of this chain. Does not count as a use."""
        found = []
        for block_hash in block_hashes:
            block_id = self._blocks.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return tuple(found)

    def add(self, block_id: int, block_hash: bytes, parent: bytes) -> None:
        """Record the content of a block in use; it never changes again. Of two blocks with equal content, only the
        first is cached."""
        entry = self._entries.get(block_id)
        assert entry is None or entry.block_hash == block_hash, f"block {block_id} has two contents"
        if entry is not None or block_hash in self._blocks:
            return
        self._blocks[block_hash] = block_id
        self._entries[block_id] = _Entry(block_hash, parent)
        self._children.setdefault(parent, {})[block_id] = None
        parent_id = self._blocks.get(parent)
        if parent_id in self._idle:
            self._eviction.bar(parent_id)
        self._record(block_hash, is_stored=True)

    def park(self, block_id: int) -> None:
        """Record that the last user released this block: it may be evicted."""
        assert block_id in self._entries and block_id not in self._idle, f"block {block_id} cannot become idle"
        self._idle.add(block_id)
        block_hash = self._entries[block_id].block_hash
        self._eviction.park(block_id, block_hash)
        if block_hash in self._children:
            self._eviction.bar(block_id)

    def unpark(self, block_id: int) -> None:
        """Exclude an idle block from eviction, without counting a use."""
        self._idle.remove(block_id)
        self._eviction.unpark(block_id)

    def use_again(self, block_id: int) -> None:
        """Record that an idle block has a user again."""
        self.unpark(block_id)
        self._eviction.used(block_id)

    def evict(self) -> int:
        """Remove one idle block from the cache and return it. At least one block must be idle."""
        block_id = self._next_victim()
        self._idle.remove(block_id)
        self._eviction.forget(block_id)
        entry = self._entries.pop(block_id)
        del self._blocks[entry.block_hash]
        siblings = self._children[entry.parent]
        del siblings[block_id]
        if not siblings:
            del self._children[entry.parent]
            parent_id = self._blocks.get(entry.parent)
            if parent_id in self._idle:
                self._eviction.unbar(parent_id)
        self.num_evicted += 1
        self._record(entry.block_hash, is_stored=False)
        return block_id

    def events_since(self, number: int) -> tuple[CacheEvent, ...] | None:
        """Return all events from this number on, or None if some of them are no longer kept or the number is not
        reached yet."""
        first = self._next_number - len(self._events)
        if not first <= number <= self._next_number:
            return None
        return tuple(self._events)[number - first :]

    @property
    def next_number(self) -> int:
        """The number that the next event will have."""
        return self._next_number

    def changes_since(self, number: int | None) -> CacheEvents:
        """Return the net changes since this event, or the whole content if `number` is None or too old."""
        events = self.events_since(number) if number is not None else None
        if events is None or number is None:
            return CacheEvents(0, self._next_number, tuple(self._blocks), cleared=True)
        last = {event.block_hash: event.is_stored for event in events}
        first = {event.block_hash: event.is_stored for event in reversed(events)}
        changed = [block_hash for block_hash in last if last[block_hash] == first[block_hash]]  # else: no net change
        return CacheEvents(
            first_number=number,
            next_number=self._next_number,
            stored=tuple(block_hash for block_hash in changed if last[block_hash]),
            removed=tuple(block_hash for block_hash in changed if not last[block_hash]),
        )

    def check(self, in_use: Set[int]) -> None:
        """Raise AssertionError if the tables contradict each other or `in_use`, the set of all blocks that have
        users."""
        assert {entry.block_hash: block_id for block_id, entry in self._entries.items()} == self._blocks
        assert self._idle == self._entries.keys() - in_use, "a block is idle exactly while it has no user"
        children = {(e.parent, block_id) for block_id, e in self._entries.items()}
        known = {(parent, block_id) for parent, blocks in self._children.items() for block_id in blocks}
        assert children == known, "children miscounted"

    def _next_victim(self) -> int:
        """Return the last block of the chain that eviction chooses first."""
        if not (self._victims and self._is_evictable(self._victims[-1])):
            self._victims = next(filter(None, map(self._chain_down, self._eviction.candidates())), [])
        if not self._victims:  # every idle block is continued by a block in use, whose user holds its own copy of it
            self._victims = [next(block_id for block_id in self._idle if self._idle_child(block_id) is None)]
        return self._victims.pop()

    def _is_evictable(self, block_id: int) -> bool:
        return block_id in self._idle and self._entries[block_id].block_hash not in self._children

    def _chain_down(self, block_id: int) -> list[int]:
        """Return the idle blocks from this one down to one without children, or none if all children of some block are
        in use."""
        chain = [block_id]
        while self._entries[chain[-1]].block_hash in self._children:
            child = self._idle_child(chain[-1])
            if child is None:
                return []
            chain.append(child)
        return chain

    def _idle_child(self, block_id: int) -> int | None:
        """Return an idle block that continues this block."""
        children = self._children.get(self._entries[block_id].block_hash, {})
        return next((child for child in children if child in self._idle), None)

    def _record(self, block_hash: bytes, *, is_stored: bool) -> None:
        self._events.append(CacheEvent(self._next_number, block_hash, is_stored))
        self._next_number += 1
