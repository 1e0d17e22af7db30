"""KV of preempted sequences in host memory. Pure. Owned by the batch.

Owns the slots, and the moves of the step that is being planned; blocks stay the pool's. Slots that a step reads are
given back with its outcome: a step swaps out before it swaps in. A block that is swapped out may be reserved anew in
the same plan, as the step copies it before it writes anything, and no plan tells the outside of a block.
"""

from collections.abc import Sequence as SequenceOf

from decode_worker.scheduling.preemption_cost import PreemptionCost
from decode_worker.scheduling.sequences import Sequence, Swapped
from engine.scheduling.step import BlockSwap

_COUNTED = ("swapped_out", "swapped_in", "recomputed", "recompute_cheaper", "swap_full", "swap_lost")


class SwapSpace:
    """A slot holds one block."""

    def __init__(self, num_slots: int, cost: PreemptionCost) -> None:
        self.num_slots = num_slots
        self.cost = cost
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: pages that were touched are used again
        self._leaving: list[Sequence] = []  # swapped out by the plan that is being made or computed
        self._outward: list[BlockSwap] = []
        self._inward: list[BlockSwap] = []
        self._read_slots: list[int] = []  # by the plan's swaps inwards, and of what became of no use with them
        self._num = dict.fromkeys(_COUNTED, 0)

    @property
    def figures(self) -> dict[str, int]:
        """Preempted sequences: swapped or recomputed, and the reasons for the latter where there is swap space."""
        return {**self._num, "swap_slots_used": self.num_slots - len(self._free)}

    @property
    def outward(self) -> tuple[BlockSwap, ...]:
        return tuple(self._outward)

    @property
    def inward(self) -> tuple[BlockSwap, ...]:
        return tuple(self._inward)

    @property
    def is_idle(self) -> bool:
        """It holds nothing, and the plan moves nothing."""
        return len(self._free) == self.num_slots and not self._leaving

    def is_leaving(self, sequence: Sequence) -> bool:
        """Its copy is not there before the step that is being planned."""
        return sequence in self._leaving

    def take_out(self, sequence: Sequence, first: int, block_ids: tuple[int, ...], num_tokens: int) -> None:
        """Of a sequence that is being preempted, these blocks, its own from `first` on, which hold `num_tokens`, go to
        slots; or they do not, and what they hold will be computed again."""
        if not self.num_slots or not self._is_worth(len(block_ids), num_tokens):
            self._num["recomputed"] += 1
            return
        slots = tuple(self._free.pop() for _ in block_ids)
        sequence.swapped = Swapped(first, slots)
        self._leaving.append(sequence)
        self._outward += map(BlockSwap, block_ids, slots)
        self._num["swapped_out"] += 1

    def bring_in(self, sequence: Sequence, num_found: int) -> None:
        """Into its new blocks, of which the first `num_found` have their content already."""
        assert sequence.swapped is not None and num_found >= sequence.swapped.first
        first, slots = sequence.swapped.first, sequence.swapped.slots
        moves = zip(sequence.block_ids[first:], slots, strict=False)
        self._inward += [BlockSwap(*move) for move in list(moves)[num_found - first :]]
        self._read_slots += slots
        sequence.swapped = None
        self._num["swapped_in"] += 1

    def lose(self, sequence: Sequence) -> None:
        """What stood before its slots is gone."""
        self._num["swap_lost"] += 1
        self._num["recomputed"] += 1
        self.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Between steps, or of one that is not leaving."""
        if sequence.swapped is not None:
            self._free += sequence.swapped.slots
            sequence.swapped = None

    def end_step(self) -> list[Sequence]:
        """The plan has been computed, or has failed: then what it should have swapped out, which is returned, may not
        be in its slots."""
        leaving = self._leaving
        self._free += self._read_slots
        self._leaving, self._outward, self._inward, self._read_slots = [], [], [], []
        return leaving

    def check(self, waiting: SequenceOf[Sequence]) -> None:
        """Raises AssertionError unless each slot is free, or used once, by one that waits or by the plan."""
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
