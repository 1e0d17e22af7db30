"""The number of blocks that must remain available, for growth, when a sequence or a hand-off gets blocks. Pure.

It is at least the configured watermark, and more if the predicted outputs of sequences that rank before need more. It
is 0 for a sequence that was preempted, and for any sequence while none that may grow has blocks, so every sequence
starts.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.scheduling.batching.block_tables import BlockTables
from engine.scheduling.batching.reservations import BlockRequest
from engine.scheduling.batching.sequence_queues import SequenceQueues
from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import Rank
from engine.scheduling.schedule import blocks_for


@dataclass(frozen=True, slots=True)
class PredictedGrowth:
    """The predicted growth of one sequence: its known tokens, how many more are predicted (at least one), and the
    blocks that it holds now and frees at its end."""

    num_tokens: int
    num_to_come: int
    num_blocks: int


def peak_growth(growths: Iterable[PredictedGrowth], block_size: int) -> int:
    """Return the peak number of blocks beyond those held now, if every sequence grows by a token a step until it ends.
    The KV of a sequence's last token is never needed."""
    ends = sorted(growths, key=lambda growth: growth.num_to_come)
    full = sum(growth.num_tokens // block_size for growth in ends)
    tails = Counter(growth.num_tokens % block_size for growth in ends)  # few lengths, however many sequences
    num_held = sum(growth.num_blocks for growth in ends)
    most = 0
    for growth in ends:
        # The peak is at the last step of one of the sequences.
        grown = sum(count * blocks_for(tail + growth.num_to_come - 1, block_size) for tail, count in tails.items())
        most = max(most, full + grown - num_held)
        full -= growth.num_tokens // block_size
        tails[growth.num_tokens % block_size] -= 1
    return most


class Watermark:
    def __init__(self, limits: SchedulerLimits, queues: SequenceQueues, tables: BlockTables) -> None:
        self._limits = limits
        self._queues = queues
        self._tables = tables

    def for_sequence(self, sequence: Sequence) -> int:
        """Return the number of blocks that must remain when this waiting sequence starts."""
        if sequence.has_run or self._queues.last_preemptible is None:
            return 0
        return max(self._limits.num_watermark_blocks, self._peak_growth(sequence.rank, self._growth_of(sequence)))

    def for_handoff(self, request: BlockRequest) -> int:
        """Return the number of blocks that must remain when this hand-off gets its blocks. They include the blocks with
        which waiting sequences that rank before it start."""
        before = [sequence for sequence in self._queues.waiting if sequence.rank < request.rank]
        num_needed = self._limits.num_watermark_blocks
        if before or self._queues.last_preemptible is not None:
            growths = [growth for sequence in before for growth in self._growth_of(sequence)]
            # It is unknown when the imported sequences will join, so their whole predicted growth counts.
            num_needed = max(num_needed, self._peak_growth(request.rank, growths) + request.num_to_grow)
        return num_needed + sum(map(self._tables.num_needed, before))

    def _peak_growth(self, rank: Rank, newcomers: Iterable[PredictedGrowth]) -> int:
        """Return the peak growth of `newcomers` and of the sequences with blocks that rank before `rank`. A sequence
        without a prediction counts as not growing."""
        holders = [holder for holder in self._queues.holders if holder.rank < rank]
        growths = [growth for holder in holders for growth in _predicted_growth(holder, len(holder.block_ids))]
        return peak_growth([*growths, *newcomers], self._limits.block_size)

    def _growth_of(self, waiting: Sequence) -> list[PredictedGrowth]:
        return _predicted_growth(waiting, self._tables.num_needed(waiting))


def _predicted_growth(sequence: Sequence, num_blocks: int) -> list[PredictedGrowth]:
    num_to_come = sequence.predicted_tokens - sequence.num_output
    return [PredictedGrowth(len(sequence.token_ids), num_to_come, num_blocks)] if num_to_come > 0 else []
