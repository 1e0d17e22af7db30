"""The index of the blocks in the tiers below the pool. It decides which blocks are copied, demoted or dropped to make
room. Pure.

Owned by `PrefixTiers`; the bytes are in tier_storage.py. The host tier has a fixed number of slots. A block that is
stored takes a free slot, or the slot of the least recently used block, which is demoted (written to disk) first. A
block on disk stays there when it is read. Blocks that are being copied are pinned. The end of a chain is dropped before
its beginning, because later blocks cannot be used without earlier ones.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Store:
    """Copy a block into this slot. Before that, delete the files of the dropped blocks and write the slot's present
    block to disk."""

    block_hash: bytes
    slot: int
    demoted: bytes | None = None
    dropped: tuple[bytes, ...] = ()  # blocks on disk that make room for `demoted`


@dataclass(frozen=True, slots=True)
class Place:
    """The place to read a block from: a slot of host memory, or disk if there is no slot."""

    block_hash: bytes
    slot: int | None


@dataclass(slots=True)
class _Held:
    slot: int
    pins: int = 0
    is_whole: bool = False  # False: it is being copied in


class TierIndex:
    """The index of the tiers. Every operation costs O(1) per block, on average."""

    def __init__(self, num_slots: int, max_files: int) -> None:
        self._num_slots = num_slots
        self._max_files = max_files
        self._free = list(range(num_slots - 1, -1, -1))
        self._host: OrderedDict[bytes, _Held] = OrderedDict()  # the least recently used first
        self._disk: OrderedDict[bytes, None] = OrderedDict()
        self._moving: set[bytes] = set()  # being written from host memory to disk
        self._num_filling = 0  # slots whose blocks are being copied in

    @property
    def num_in_host(self) -> int:
        """Return the number of readable blocks: those that are still being copied in do not count."""
        return len(self._host) - self._num_filling

    @property
    def num_on_disk(self) -> int:
        return len(self._disk)

    def add_files(self, block_hashes: Iterable[bytes]) -> tuple[bytes, ...]:
        """Add the files of an earlier run, the least recently used first. Return those that exceed `max_files`."""
        self._disk.update(dict.fromkeys(block_hashes))
        return tuple(self._disk.popitem(last=False)[0] for _ in range(len(self._disk) - self._max_files))

    def num_held(self, block_hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks of this chain that the tiers can read without a gap."""
        return next((n for n, h in enumerate(block_hashes) if not self._is_held(h)), len(block_hashes))

    def begin_read(self, block_hashes: Sequence[bytes]) -> tuple[Place, ...]:
        """Return the places of the leading blocks up to the first gap, and pin them until `end_read`."""
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
        """Unpin these places. `lost`: a block that could not be read; it leaves the tiers."""
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
        """Return the index of the first block that is not in host memory; the length of the chain if all are."""
        return next((n for n, h in enumerate(block_hashes) if h not in self._host), len(block_hashes))

    def begin_store(self, block_hashes: Sequence[bytes]) -> tuple[Store, ...]:
        """Choose slots for the blocks of this chain that host memory lacks, as far as there is room."""
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
        """Record the result of a store. A block whose demotion failed is lost."""
        self._num_filling -= 1
        if is_stored:
            self._host[store.block_hash].is_whole = True
        else:
            self._free.append(self._host.pop(store.block_hash).slot)
        if store.demoted is not None:
            self._moving.discard(store.demoted)
            if is_demoted:
                self._disk[store.demoted] = None

    def uncounted(self, stores: Iterable[Store]) -> tuple[bytes, ...]:
        """Return the blocks that these ended stores were to write to disk or to delete there, except for those that are
        counted on disk again."""
        meant = (h for store in stores for h in (store.demoted, *store.dropped) if h is not None)
        return tuple(h for h in meant if h not in self._disk and h not in self._moving)

    def only_in_host(self) -> tuple[Place, ...]:
        """Return the blocks that are not on disk, the most recently used first, as many as disk has room for."""
        places = [Place(h, held.slot) for h, held in self._host.items() if held.is_whole and h not in self._disk]
        return tuple(reversed(places))[: max(0, self._max_files - len(self._disk) - len(self._moving))]

    def check(self) -> None:
        """Raise AssertionError if slots are lost or used twice, or there are too many files."""
        slots = [*self._free, *(held.slot for held in self._host.values())]
        assert sorted(slots) == list(range(self._num_slots)), f"slots lost or used twice: {sorted(slots)}"
        assert len(self._disk) + len(self._moving) <= self._max_files, "more files than allowed"
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
        dropped = []
        while len(self._disk) + len(self._moving) >= self._max_files:
            if not self._disk:
                return Store(block_hash, slot)
            dropped.append(self._disk.popitem(last=False)[0])
        self._moving.add(victim)
        return Store(block_hash, slot, victim, tuple(dropped))
