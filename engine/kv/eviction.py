"""The order in which idle cached blocks are evicted. Pure. Owned by the prefix cache.

`LeastRecentlyUsed` evicts the least recently used block. `LeastValuable` estimates from this worker's requests how
often, and after how long, blocks are used again, and evicts the block with the lowest expected use. In conversations
the next turn comes after the user has read the answer, so a block used some time ago may be worth more than one used
just now, and a block used twice more than one used once. Without observations it evicts the least recently used block.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

_MOST_USES = 2  # blocks that were used once and those used more often are two classes
_GENERATIONS_PER_POOL = 16
_NUM_AGES = 64  # older generations count as one: four pools of blocks have come since
_GHOSTS_PER_BLOCK = 2  # evicted blocks that are remembered by their hash
_ANCIENT = -1  # the generation of all that are older
_PRIOR = 50.0  # blocks of every age that were never used again: a prior against few observations
_KEPT_PER_GENERATION = 1 - 1 / 256  # decay of counts: they halve while the pool is replaced eleven times


class Eviction(Protocol):
    """An order of eviction. Every call costs O(1) per block, on average."""

    def park(self, block_id: int, block_hash: bytes) -> None:
        """Record that the last user released this block."""
        ...

    def unpark(self, block_id: int) -> None:
        """Exclude this block from eviction."""
        ...

    def used(self, block_id: int) -> None:
        """Record, after `unpark`, that the block has a user again."""
        ...

    def bar(self, block_id: int) -> None:
        """Record that an idle block has cached children: it need not be a candidate until they are evicted."""
        ...

    def unbar(self, block_id: int) -> None:
        """Record that the cached children of this block were evicted: it is a candidate again."""
        ...

    def candidates(self) -> Iterator[int]:
        """Yield idle blocks in order of eviction, at least those that are not barred. The iterator is invalid after any
        other call."""
        ...

    def forget(self, block_id: int) -> None:
        """Record that this idle block was evicted."""
        ...


def eviction_of(name: str, num_blocks: int) -> Eviction:
    """Return the order that `--prefix-eviction` names, for a pool of this size."""
    if name == "lru":
        return LeastRecentlyUsed()
    assert name == "value", f"unknown eviction order {name}"
    return LeastValuable(num_blocks)


class LeastRecentlyUsed:
    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()

    def park(self, block_id: int, block_hash: bytes) -> None:
        self._idle[block_id] = None

    def unpark(self, block_id: int) -> None:
        del self._idle[block_id]

    def used(self, block_id: int) -> None:
        pass

    def bar(self, block_id: int) -> None:
        pass

    def unbar(self, block_id: int) -> None:
        pass

    def candidates(self) -> Iterator[int]:
        return iter(self._idle)

    def forget(self, block_id: int) -> None:
        del self._idle[block_id]


@dataclass(slots=True)
class _Use:
    """The last use of one block."""

    block_hash: bytes
    num_uses: int  # 1 to _MOST_USES
    generation: int
    is_over: bool = False  # and no use has come since: parking it again is not a use
    is_listed: bool = False  # among the candidates


class LeastValuable:
    """Evicts the block with the lowest expected use.

    Time is counted in blocks that became idle; a generation is one sixteenth of a pool of them. For each class and age
    it counts the blocks that reached that age and those that were used again at it. Evicted blocks are remembered as
    ghosts, so that it also learns what it should have kept.

    The value of a block is the highest rate of expected uses per generation over any time that it could be kept from
    now on: Gittins' index (J. R. Stat. Soc. B 41, 1979), as the hit density of Beckmann, Chen and Cidon (NSDI 2018).
    Only ends of chains are compared, because keeping a block means keeping all blocks before it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._generation_blocks = max(16, num_blocks // _GENERATIONS_PER_POOL)
        self._max_ghosts = _GHOSTS_PER_BLOCK * num_blocks
        self._classes = tuple(_Class() for _ in range(_MOST_USES))
        self._last_use: dict[int, _Use] = {}  # of each block that was ever idle, until it is evicted
        self._ghosts: OrderedDict[bytes, _Use] = OrderedDict()
        self._generation = 0
        self._num_parked = 0  # in this generation
        self._going: OrderedDict[int, None] | None = None  # the generation evicted next, while it is known

    def park(self, block_id: int, block_hash: bytes) -> None:
        use = self._last_use.get(block_id)
        if use is None:
            use = self._last_use[block_id] = self._first_use(block_hash)
        if not use.is_over:
            use.generation = self._generation
            self._class(use).parked(self._generation)
            self._num_parked += 1
        self._list(block_id, use)
        if self._num_parked >= self._generation_blocks:
            self._next_generation()

    def unpark(self, block_id: int) -> None:
        self.bar(block_id)
        self._last_use[block_id].is_over = True

    def used(self, block_id: int) -> None:
        use = self._last_use[block_id]
        self._used_again(use)
        use.num_uses = min(use.num_uses + 1, _MOST_USES)
        use.is_over = False

    def bar(self, block_id: int) -> None:
        use = self._last_use[block_id]
        if use.is_listed:
            self._class(use).unlist(block_id, use.generation)
            use.is_listed = False

    def unbar(self, block_id: int) -> None:
        """Make the block the next of its generation to be evicted, because the rest of a broken chain is of little
        use."""
        use = self._last_use[block_id]
        self._list(block_id, use).move_to_end(block_id, last=False)

    def candidates(self) -> Iterator[int]:
        if not self._going:
            self._going = self._least_valuable()
        yield from self._going
        for _, _, blocks in sorted(self._generations(), key=lambda item: item[:2]):
            if blocks is not self._going:
                yield from blocks

    def forget(self, block_id: int) -> None:
        self.bar(block_id)
        use = self._last_use.pop(block_id)
        self._ghosts[use.block_hash] = use
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def _list(self, block_id: int, use: _Use) -> OrderedDict[int, None]:
        use.is_listed = True
        return self._class(use).list(block_id, use.generation, self._generation)

    def _class(self, use: _Use) -> "_Class":
        return self._classes[use.num_uses - 1]

    def _first_use(self, block_hash: bytes) -> _Use:
        """Record the first use since the block came; an earlier copy may have been evicted."""
        ghost = self._ghosts.pop(block_hash, None)
        if ghost is None:
            return _Use(block_hash, 1, self._generation)
        self._used_again(ghost)
        return _Use(block_hash, min(ghost.num_uses + 1, _MOST_USES), self._generation)

    def _used_again(self, use: _Use) -> None:
        self._class(use).used_again(self._generation - use.generation)

    def _next_generation(self) -> None:
        self._generation += 1
        self._num_parked = 0
        self._going = None
        for each in self._classes:
            each.learn(self._generation)

    def _least_valuable(self) -> OrderedDict[int, None]:
        return min(self._generations(), key=lambda item: item[:2], default=(0.0, 0, OrderedDict[int, None]()))[2]

    def _generations(self) -> Iterator[tuple[float, int, OrderedDict[int, None]]]:
        """Yield (value, number, blocks) per generation; among equal values the oldest first."""
        for each in self._classes:
            yield from each.generations(self._generation)


class _Class:
    """Blocks that were used equally often, by generation, and statistics of the generations before."""

    def __init__(self) -> None:
        # Candidates by generation; _ANCIENT holds all that are too old to be distinguished.
        self._listed: dict[int, OrderedDict[int, None]] = {}
        self._num_parked: OrderedDict[int, int] = OrderedDict()  # of each generation that is not too old
        self._num_reached = [0.0] * _NUM_AGES  # blocks whose generation has come to this age, used again or not
        self._num_reused = [0.0] * _NUM_AGES
        self._values = [0.0] * (_NUM_AGES + 1)

    def parked(self, generation: int) -> None:
        self._num_parked[generation] = self._num_parked.get(generation, 0) + 1

    def list(self, block_id: int, generation: int, now: int) -> OrderedDict[int, None]:
        """Add the block to its generation and return that generation's blocks."""
        generation = generation if now - generation < _NUM_AGES else _ANCIENT
        blocks = self._listed.setdefault(generation, OrderedDict())
        blocks[block_id] = None
        return blocks

    def unlist(self, block_id: int, generation: int) -> None:
        if block_id not in self._listed.get(generation, ()):
            generation = _ANCIENT
        blocks = self._listed[generation]
        del blocks[block_id]
        if not blocks:
            del self._listed[generation]

    def used_again(self, age: int) -> None:
        if age < _NUM_AGES:
            self._num_reused[age] += 1

    def generations(self, now: int) -> Iterator[tuple[float, int, OrderedDict[int, None]]]:
        for generation, blocks in self._listed.items():
            yield self._values[min(now - generation, _NUM_AGES)], generation, blocks

    def learn(self, now: int) -> None:
        """Record that a generation has ended: all earlier ones are one generation older."""
        for age in range(_NUM_AGES):
            self._num_reached[age] *= _KEPT_PER_GENERATION
            self._num_reused[age] *= _KEPT_PER_GENERATION
        for generation, number in self._num_parked.items():
            self._num_reached[now - generation - 1] += number
        oldest = now - _NUM_AGES
        self._num_parked.pop(oldest, None)
        if oldest in self._listed:
            self._listed.setdefault(_ANCIENT, OrderedDict()).update(self._listed.pop(oldest))
        self._values = values(
            [reused / (reached + _PRIOR) for reused, reached in zip(self._num_reused, self._num_reached, strict=True)]
        )


def values(chances: list[float]) -> list[float]:
    """Return for every age the value of keeping a block of that age: the highest expected uses per age over any number
    of ages, and 0 for blocks older than all. `chances` are the probabilities that a newly idle block is used again at
    each age."""
    uses, ages = [0.0], [0.0]  # of one block, up to each age: blocks that were used again leave their class
    for chance in chances:
        ages.append(ages[-1] + max(1 - uses[-1] - chance / 2, 0.01))
        uses.append(min(uses[-1] + chance, 0.99))
    best = [0.0] * len(uses)
    hull = [len(uses) - 1]  # the upper hull of the later points, the nearest last: its first slope is the steepest
    for age in reversed(range(len(chances))):
        best[age] = _slope(uses, ages, age, hull[-1])
        while len(hull) > 1 and best[age] <= (further := _slope(uses, ages, age, hull[-2])):
            hull.pop()
            best[age] = further
        hull.append(age)
    return best


def _slope(uses: list[float], ages: list[float], start: int, end: int) -> float:
    return (uses[end] - uses[start]) / (ages[end] - ages[start])
