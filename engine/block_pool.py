"""Which block of the pool belongs to whom. Pure; owned by one scheduler, never by two threads.

A block is counted in exactly one state, the first that applies:

    quarantined   a dead read may still write into it; nobody may use it
    leased        pinned for a reader of another worker; its content does not change
    held          sequences or reservations refer to it
    cached        kept for its content alone; always 0 here: nothing is cached yet
    free          may be reserved

References are apart from that: a leased block may also be referred to by the sequence that computed it, and becomes
free only when both have gone. Blocks are freed between steps only, so no step that was launched before can still be
writing to a block that is reserved anew.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum

_NUM_REMEMBERED = 256  # operations, for the story of an illegal one


class BlockState(StrEnum):
    QUARANTINED = "quarantined"
    LEASED = "leased"
    HELD = "held"
    CACHED = "cached"
    FREE = "free"


class BlockPool:
    """Every operation costs O(1) per block. An illegal one raises AssertionError with the block's recent story."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"a pool needs blocks, not {num_blocks}"
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._leased: set[int] = set()
        self._quarantined: set[int] = set()
        self._num_held = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the warmest block first
        self._story: deque[tuple[str, tuple[int, ...]]] = deque(maxlen=_NUM_REMEMBERED)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, num_blocks: int) -> tuple[int, ...] | None:
        """Takes so many free blocks, each with one reference; None, and nothing taken, when there are fewer."""
        assert num_blocks >= 0, f"cannot reserve {num_blocks} blocks"
        if num_blocks > len(self._free):
            return None
        block_ids = tuple(self._free.pop() for _ in range(num_blocks))
        for block_id in block_ids:
            self._references[block_id] = 1
        self._num_held += num_blocks
        self._story.append(("reserve", block_ids))
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """One more reference to each; they must have one."""
        for block_id in block_ids:
            self._require(self._references[block_id] > 0, "share", block_id)
            self._references[block_id] += 1
        self._story.append(("share", tuple(block_ids)))

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference to each less. The last one frees the block, unless it is leased."""
        for block_id in block_ids:
            self._require(self._references[block_id] > 0, "release", block_id)
            self._references[block_id] -= 1
            if self._references[block_id] == 0 and block_id not in self._leased:
                self._num_held -= 1
                self._free.append(block_id)
        self._story.append(("release", tuple(block_ids)))

    def lease(self, block_ids: Sequence[int]) -> None:
        """Pins blocks that somebody refers to. The references stay; when they go, the block stays leased."""
        for block_id in block_ids:
            self._require(self._references[block_id] > 0 and block_id not in self._leased, "lease", block_id)
            self._leased.add(block_id)
            self._num_held -= 1
        self._story.append(("lease", tuple(block_ids)))

    def end_lease(self, block_ids: Sequence[int]) -> None:
        """Unpins. What nobody refers to any more becomes free."""
        for block_id in block_ids:
            self._require(block_id in self._leased, "end_lease", block_id)
            self._leased.remove(block_id)
            if self._references[block_id] > 0:
                self._num_held += 1
            else:
                self._free.append(block_id)
        self._story.append(("end_lease", tuple(block_ids)))

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Turns the only reference to each into quarantine."""
        block_ids = tuple(block_ids)
        for block_id in block_ids:
            self._require(self._references[block_id] == 1 and block_id not in self._leased, "quarantine", block_id)
            self._references[block_id] = 0
            self._num_held -= 1
            self._quarantined.add(block_id)
        self._story.append(("quarantine", block_ids))

    def end_quarantine(self, block_ids: Iterable[int]) -> None:
        """Nobody can write to them any more: they become free."""
        block_ids = tuple(block_ids)
        for block_id in block_ids:
            self._require(block_id in self._quarantined, "end_quarantine", block_id)
            self._quarantined.remove(block_id)
            self._free.append(block_id)
        self._story.append(("end_quarantine", block_ids))

    def state(self, block_id: int) -> BlockState:
        if block_id in self._quarantined:
            return BlockState.QUARANTINED
        if block_id in self._leased:
            return BlockState.LEASED
        return BlockState.HELD if self._references[block_id] > 0 else BlockState.FREE

    def check_references(self, expected: Sequence[int]) -> None:
        """Raises AssertionError unless every block has as many references as its users account for."""
        if self._references != list(expected):
            wrong = next(b for b in range(self.num_blocks) if self._references[b] != expected[b])
            raise AssertionError(f"users account for {expected[wrong]} references to {self._tell(wrong)}")

    def counts(self) -> dict[str, int]:
        """Blocks by state; they sum to `num_blocks`."""
        return {
            BlockState.QUARANTINED.value: len(self._quarantined),
            BlockState.LEASED.value: len(self._leased),
            BlockState.HELD.value: self._num_held,
            BlockState.CACHED.value: 0,
            BlockState.FREE.value: len(self._free),
        }

    def check(self) -> None:
        """Recounts everything. Raises AssertionError with what is broken. Quick enough for a heartbeat: about a
        millisecond for 10,000 blocks."""
        counts = self.counts()
        assert sum(counts.values()) == self.num_blocks, f"states sum to {counts}, the pool has {self.num_blocks}"
        free = set(self._free)
        assert len(free) == len(self._free), f"free twice: {sorted(self._free)}"
        referenced = {block_id for block_id, references in enumerate(self._references) if references}
        assert len(referenced - self._leased) == self._num_held, f"{counts}, but {len(referenced)} are referred to"
        for one, other in ((free, referenced), (free, self._leased), (free, self._quarantined)):
            assert not one & other, f"free and in use: {self._tell(min(one & other))}"
        for users in (referenced, self._leased):
            assert not users & self._quarantined, (
                f"quarantined and in use: {self._tell(min(users & self._quarantined))}"
            )

    def _require(self, legal: bool, operation: str, block_id: int) -> None:
        if not legal:
            raise AssertionError(f"illegal {operation} of {self._tell(block_id)}")

    def _tell(self, block_id: int) -> str:
        story = " ".join(operation for operation, block_ids in self._story if block_id in block_ids)
        return f"block {block_id} ({self.state(block_id)}, {self._references[block_id]} references): ...{story}"
