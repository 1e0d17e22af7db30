"""Which blocks lie in the tiers under the pool, in host memory and on disk: what is copied where, moved down, given up.

Pure. Owned by the tiers' event loop; the bytes are tier_copies.py's. Host memory is a number of slots. A block that
is stored takes a free one, or that of the least recently used block, whose bytes go to disk first. A block on disk
stays there when it is read; where it is used again, it is stored in host memory again, as any other. Blocks that are
being copied are pinned. A chain's end is given up before its beginning.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Store:
    """Copy a block into this slot. First remove files that are in the way, and write the slot's own block to disk."""

    block_hash: bytes
    slot: int
    demoted: bytes | None = None
    given_up: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where to read a block from; without a slot: from disk."""

    block_hash: bytes
    slot: int | None


@dataclass(slots=True)
class _Held:
    slot: int
    pins: int = 0
    is_whole: bool = False  # else it is being copied in


class TierIndex:
    """Every operation costs O(1) per block, on average."""

    def __init__(self, num_slots: int, max_files: int) -> None:
        self._num_slots = num_slots
        self._max_files = max_files
        self._free = list(range(num_slots - 1, -1, -1))
        self._host: OrderedDict[bytes, _Held] = OrderedDict()  # the least recently used first
        self._disk: OrderedDict[bytes, None] = OrderedDict()
        self._moving: set[bytes] = set()  # on their way from host memory to disk
        self._num_filling = 0  # of host memory: slots whose blocks are being copied in

    @property
    def num_in_host(self) -> int:
        """Blocks that can be read from there: those that are still being copied in do not count."""
        return len(self._host) - self._num_filling

    @property
    def num_on_disk(self) -> int:
        return len(self._disk)

    def found(self, block_hashes: Iterable[bytes]) -> tuple[bytes, ...]:
        """Files of an earlier run, the least recently used first. Answers those that are too many."""
        self._disk.update(dict.fromkeys(block_hashes))
        return tuple(self._disk.popitem(last=False)[0] for _ in range(len(self._disk) - self._max_files))

    def num_held(self, block_hashes: Sequence[bytes]) -> int:
        """Of these, how many from the first on can be read without a hole."""
        return next((n for n, h in enumerate(block_hashes) if not self._is_held(h)), len(block_hashes))

    def begin_read(self, block_hashes: Sequence[bytes]) -> tuple[Place, ...]:
        """Where they lie, as far as there is no hole. They stay there until `end_read`."""
        places = []
        for block_hash in block_hashes[: self.num_held(block_hashes)]:
            held = self._host.get(block_hash)
            if held is not None and held.is_whole:
                held.pins += 1
                places.append(Place(block_hash, held.slot))
            else:
                places.append(Place(block_hash, None))
        self._touch(block_hashes)
        return tuple(places)

    def end_read(self, places: Sequence[Place], lost: bytes | None = None) -> None:
        """`lost`: a block that could not be read. It is not held any more."""
        for place in places:
            if place.slot is not None:
                self._host[place.block_hash].pins -= 1
        if lost is None:
            return
        self._disk.pop(lost, None)
        held = self._host.get(lost)
        if held is not None and held.is_whole and not held.pins:
            self._free.append(self._host.pop(lost).slot)

    def first_missing(self, block_hashes: Sequence[bytes]) -> int:
        """The index of the first that is not in host memory; as many as there are, where all are."""
        return next((n for n, h in enumerate(block_hashes) if h not in self._host), len(block_hashes))

    def begin_store(self, block_hashes: Sequence[bytes]) -> tuple[Store, ...]:
        """What to copy of these into host memory, as far as there is room: all but what is there."""
        self._touch(block_hashes)
        stores = []
        for block_hash in block_hashes:
            if block_hash in self._host:
                continue
            store = self._slot_for(block_hash)
            if store is None:
                break
            stores.append(store)
        for store in reversed(stores):
            self._host[store.block_hash] = _Held(store.slot)
        self._num_filling += len(stores)
        return tuple(stores)

    def end_store(self, store: Store, *, is_stored: bool, is_demoted: bool) -> None:
        """How it went. What was to go to disk and did not is gone."""
        self._num_filling -= 1
        if is_stored:
            self._host[store.block_hash].is_whole = True
        else:
            self._free.append(self._host.pop(store.block_hash).slot)
        if store.demoted is not None:
            self._moving.discard(store.demoted)
            if is_demoted:
                self._disk[store.demoted] = None

    def only_in_host(self) -> tuple[Place, ...]:
        """The most recently used first, as many as disk has room for."""
        places = [Place(h, held.slot) for h, held in self._host.items() if held.is_whole and h not in self._disk]
        return tuple(reversed(places))[: max(0, self._max_files - len(self._disk) - len(self._moving))]

    def check(self) -> None:
        """Raises AssertionError when slots are lost or used twice, or there are too many files."""
        slots = [*self._free, *(held.slot for held in self._host.values())]
        assert sorted(slots) == list(range(self._num_slots)), f"slots lost or used twice: {sorted(slots)}"
        assert len(self._disk) + len(self._moving) <= self._max_files, "more files than there is room for"
        filling = sum(not held.is_whole for held in self._host.values())
        assert filling == self._num_filling, f"{filling} slots are being filled, {self._num_filling} are counted"

    def _is_held(self, block_hash: bytes) -> bool:
        held = self._host.get(block_hash)
        return (held is not None and held.is_whole) or block_hash in self._disk

    def _touch(self, block_hashes: Sequence[bytes]) -> None:
        for block_hash in reversed(block_hashes):
            for tier in (self._host, self._disk):
                if block_hash in tier:
                    tier.move_to_end(block_hash)

    def _slot_for(self, block_hash: bytes) -> Store | None:
        if self._free:
            return Store(block_hash, self._free.pop())
        victim = next((h for h, held in self._host.items() if held.is_whole and not held.pins), None)
        if victim is None:
            return None
        slot = self._host.pop(victim).slot
        if victim in self._disk or victim in self._moving or not self._max_files:
            return Store(block_hash, slot)
        given_up = []
        while len(self._disk) + len(self._moving) >= self._max_files:
            if not self._disk:
                return Store(block_hash, slot)
            given_up.append(self._disk.popitem(last=False)[0])
        self._moving.add(victim)
        return Store(block_hash, slot, victim, tuple(given_up))
