"""Which blocks hold the KV of which prefix, and which of them goes first. Pure. Owned by the BlockPool.

A block is found by its hash (cluster.protocol.hashing), which covers everything before it, so content that a hash leads
to is right wherever it lies. Blocks that nobody uses are idle, and wait here to be evicted in the order that
engine/kv/eviction.py knows. A block is evicted before the one that it continues: without that one it could not be
found.

Every change has a number, so that whoever follows the changes sees a gap, and asks for a snapshot.
"""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass

from cluster.messages import PrefixNews
from engine.kv.eviction import Eviction

_NUM_REMEMBERED = 4096  # events, for those who follow


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One block came or went. `number` counts the events of this cache from 0."""

    number: int
    block_hash: bytes
    is_added: bool  # else evicted


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    next_number: int  # of the first event that is not in it
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    block_hash: bytes
    parent: bytes  # of the block that this one continues, or the root


class PrefixCache:
    """Every operation costs O(1) per block, on average."""

    def __init__(self, eviction: Eviction) -> None:
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._children: dict[bytes, dict[int, None]] = {}  # cached blocks that continue this one
        self._idle: set[int] = set()
        self._eviction = eviction
        self._doomed: list[int] = []  # a chain of idle blocks of which the last goes next, then the one before it
        self._events: deque[CacheEvent] = deque(maxlen=_NUM_REMEMBERED)
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
        """The blocks of the longest beginning of the chain that is here. Uses nothing."""
        found = []
        for block_hash in block_hashes:
            block_id = self._blocks.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return tuple(found)

    def add(self, block_id: int, block_hash: bytes, parent: bytes) -> None:
        """A block that is in use has this content, for ever. Of two with the same content the first is kept."""
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
        self._tell(block_hash, is_added=True)

    def park(self, block_id: int) -> None:
        """Nobody uses it any more: it may be evicted."""
        assert block_id in self._entries and block_id not in self._idle, f"block {block_id} cannot become idle"
        self._idle.add(block_id)
        block_hash = self._entries[block_id].block_hash
        self._eviction.park(block_id, block_hash)
        if block_hash in self._children:
            self._eviction.bar(block_id)

    def unpark(self, block_id: int) -> None:
        """It may not be evicted for now."""
        self._idle.remove(block_id)
        self._eviction.unpark(block_id)

    def use_again(self, block_id: int) -> None:
        """Somebody uses an idle block again."""
        self.unpark(block_id)
        self._eviction.used(block_id)

    def evict(self) -> int:
        """Forgets one idle block; there must be one."""
        block_id = self._next_doomed()
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
        self._tell(entry.block_hash, is_added=False)
        return block_id

    def events_since(self, number: int) -> tuple[CacheEvent, ...] | None:
        """From this number on; None when some of them are forgotten, or never were: take a snapshot."""
        first = self._next_number - len(self._events)
        if not first <= number <= self._next_number:
            return None
        return tuple(self._events)[number - first :]

    @property
    def next_number(self) -> int:
        """Of the next event."""
        return self._next_number

    def news_since(self, number: int | None) -> PrefixNews:
        """What differs from how it was before this event; everything, where that is not known any more."""
        events = self.events_since(number) if number is not None else None
        if events is None or number is None:
            snapshot = self.snapshot()
            return PrefixNews(0, snapshot.next_number, snapshot.block_hashes, is_snapshot=True)
        last = {event.block_hash: event.is_added for event in events}
        first = {event.block_hash: event.is_added for event in reversed(events)}
        changed = [block_hash for block_hash in last if last[block_hash] == first[block_hash]]  # else: as it was
        return PrefixNews(
            first_number=number,
            next_number=self._next_number,
            added=tuple(block_hash for block_hash in changed if last[block_hash]),
            evicted=tuple(block_hash for block_hash in changed if not last[block_hash]),
        )

    def snapshot(self) -> CacheSnapshot:
        return CacheSnapshot(self._next_number, tuple(self._blocks))

    def check(self, in_use: Set[int]) -> None:
        """Raises AssertionError when the tables disagree with each other, or with who uses which block."""
        assert {entry.block_hash: block_id for block_id, entry in self._entries.items()} == self._blocks
        assert self._idle == self._entries.keys() - in_use, "idle are those that nobody uses"
        children = {(e.parent, block_id) for block_id, e in self._entries.items()}
        known = {(parent, block_id) for parent, blocks in self._children.items() for block_id in blocks}
        assert children == known, "children miscounted"

    def _next_doomed(self) -> int:
        """Of the chain that goes first, the last block."""
        if not (self._doomed and self._may_go(self._doomed[-1])):
            self._doomed = next(filter(None, map(self._chain_down, self._eviction.candidates())), [])
        if not self._doomed:  # every idle block is continued by one in use, whose user has a copy of his own of it
            self._doomed = [next(block_id for block_id in self._idle if self._idle_child(block_id) is None)]
        return self._doomed.pop()

    def _may_go(self, block_id: int) -> bool:
        return block_id in self._idle and self._entries[block_id].block_hash not in self._children

    def _chain_down(self, block_id: int) -> list[int]:
        """Idle blocks from here to one that nothing continues; none: all that continue it are in use."""
        chain = [block_id]
        while self._entries[chain[-1]].block_hash in self._children:
            child = self._idle_child(chain[-1])
            if child is None:
                return []
            chain.append(child)
        return chain

    def _idle_child(self, block_id: int) -> int | None:
        """One of the idle blocks that continue it."""
        children = self._children.get(self._entries[block_id].block_hash, {})
        return next((child for child in children if child in self._idle), None)

    def _tell(self, block_hash: bytes, *, is_added: bool) -> None:
        self._events.append(CacheEvent(self._next_number, block_hash, is_added))
        self._next_number += 1
