"""The KV of preempted sequences in host memory, and the choice between swapping and recomputing. Pure. Owned by the
batch.

The swap space owns the slots of host memory and the list of copies in the step that is being planned; blocks belong to
the pool. Slots that a step reads become free when the step ends, because a step copies out before it copies in. A block
that is copied out may be reserved again in the same plan, because the step copies it before it writes anything.

The copy rate is measured at start and in every step that copies, as a moving average. What computing costs is predicted
by the worker's service times.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from engine.scheduling.batching.sequences import Sequence, Swapped
from engine.scheduling.step import BlockSwap

_NEWEST_SHARE = 0.2  # of the newest measurement in a rate


class PreemptionCost:
    """The cost of swapping and of recomputing."""

    def __init__(self, copy_s_per_block: float | None = None, compute_s: Callable[[int], float] | None = None) -> None:
        """`compute_s` predicts the seconds to compute the first tokens of a sequence."""
        self.copy_s_per_block = copy_s_per_block  # one way; None until it is measured
        self.compute_s = compute_s

    def is_swap_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether copying `num_blocks` out and in is faster than computing `num_tokens`. Returns True while one
        of them is unknown, because the time of a copy is bounded by the size of memory."""
        if self.copy_s_per_block is None or self.compute_s is None:
            return True
        return 2 * num_blocks * self.copy_s_per_block < self.compute_s(num_tokens)

    def observe_copies(self, num_blocks: int, seconds: float) -> None:
        """Record the copies of one step, in both directions together."""
        if num_blocks and seconds > 0:
            newest, before = seconds / num_blocks, self.copy_s_per_block
            self.copy_s_per_block = newest if before is None else before + _NEWEST_SHARE * (newest - before)


_COUNTED = ("swapped_out", "swapped_in", "recomputed", "recompute_cheaper", "swap_full", "swap_lost")


class SwapSpace:
    """Slots of host memory, one block each."""

    def __init__(self, num_slots: int, cost: PreemptionCost) -> None:
        self.num_slots = num_slots
        self.cost = cost
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: pages that were touched are used again
        self._copying_out: list[Sequence] = []  # swapped out by the plan that is being made or computed
        self._swaps_out: list[BlockSwap] = []
        self._swaps_in: list[BlockSwap] = []
        self._read_slots: list[int] = []  # by the plan's swaps in, and unneeded slots of the same sequences
        self._num = dict.fromkeys(_COUNTED, 0)

    @property
    def figures(self) -> dict[str, int]:
        """Counts of preempted sequences that were swapped or recomputed, with the reasons for recomputing."""
        return {**self._num, "swap_slots_used": self.num_slots - len(self._free)}

    @property
    def swaps_out(self) -> tuple[BlockSwap, ...]:
        return tuple(self._swaps_out)

    @property
    def swaps_in(self) -> tuple[BlockSwap, ...]:
        return tuple(self._swaps_in)

    @property
    def is_idle(self) -> bool:
        """No slot is in use, and the plan swaps nothing out."""
        return len(self._free) == self.num_slots and not self._copying_out

    def is_copying_out(self, sequence: Sequence) -> bool:
        """Return whether the copy of this sequence is complete only after the step that is being planned."""
        return sequence in self._copying_out

    def swap_out(self, sequence: Sequence, first: int, block_ids: tuple[int, ...], num_tokens: int) -> None:
        """Swap out these blocks of a sequence that is being preempted, or leave `swapped` None if recomputing is
        cheaper. `block_ids`: its blocks from index `first` on, which hold the KV of `num_tokens` tokens."""
        if not self.num_slots or not self._is_worth(len(block_ids), num_tokens):
            self._num["recomputed"] += 1
            return
        slots = tuple(self._free.pop() for _ in block_ids)
        sequence.swapped = Swapped(first, slots)
        self._copying_out.append(sequence)
        self._swaps_out += map(BlockSwap, block_ids, slots)
        self._num["swapped_out"] += 1

    def swap_in(self, sequence: Sequence, num_found: int) -> None:
        """Swap a sequence into its new blocks, except the first `num_found`, which have their content already."""
        assert sequence.swapped is not None and num_found >= sequence.swapped.first
        first, slots = sequence.swapped.first, sequence.swapped.slots
        moves = zip(sequence.block_ids[first:], slots, strict=False)
        self._swaps_in += [BlockSwap(*move) for move in list(moves)[num_found - first :]]
        self._read_slots += slots
        sequence.swapped = None
        self._num["swapped_in"] += 1

    def abandon(self, sequence: Sequence) -> None:
        """Drop the copy of a sequence, which must be recomputed: its shared leading blocks are gone, or its step
        failed."""
        self._num["swap_lost"] += 1
        self._num["recomputed"] += 1
        self.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Free the slots of a sequence, which must not be in the copies of the plan."""
        if sequence.swapped is not None:
            self._free += sequence.swapped.slots
            sequence.swapped = None

    def end_step(self) -> list[Sequence]:
        """Free the slots that the step read. Return the sequences that it swapped out: if the step failed, their copies
        may be incomplete."""
        copying_out = self._copying_out
        self._free += self._read_slots
        self._copying_out, self._swaps_out, self._swaps_in, self._read_slots = [], [], [], []
        return copying_out

    def check(self, waiting: SequenceOf[Sequence]) -> None:
        """Raise AssertionError unless each slot is free or is used exactly once, by a waiting sequence or by the
        plan."""
        used = [slot for sequence in waiting if sequence.swapped is not None for slot in sequence.swapped.slots]
        slots = sorted([*self._free, *self._read_slots, *used])
        assert slots == list(range(self.num_slots)), f"of {self.num_slots} slots {slots} are accounted for"

    def _is_worth(self, num_blocks: int, num_tokens: int) -> bool:
        if num_blocks > len(self._free):
            self._num["swap_full"] += 1
            return False
        if not self.cost.is_swap_cheaper(num_blocks, num_tokens):
            self._num["recompute_cheaper"] += 1
            return False
        return True
