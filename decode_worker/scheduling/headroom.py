"""How many blocks stay available when somebody is given his, for those that will grow. Pure. Owned by the batch.

At least the watermark, which is kept for sequences that ran before; more where the outputs of those that go before are
predicted. Nothing is kept where nobody has blocks: so whoever wants them gets them in the end.
"""

from collections.abc import Iterable

from decode_worker.scheduling.block_tables import BlockTables
from decode_worker.scheduling.growth import Future, most_growth
from decode_worker.scheduling.limits import DecodeLimits
from decode_worker.scheduling.places import Places
from decode_worker.scheduling.reservations import Claim
from decode_worker.scheduling.sequences import Sequence
from engine.scheduling.policies import Rank


class Headroom:
    def __init__(self, limits: DecodeLimits, places: Places, tables: BlockTables) -> None:
        self._limits = limits
        self._places = places
        self._tables = tables

    def beside_start(self, sequence: Sequence) -> int:
        """Of a waiting sequence."""
        if sequence.has_run or self._places.last_holder is None:
            return 0
        return max(self._limits.num_watermark_blocks, self._growth(sequence.rank, self._future_of(sequence)))

    def beside_grant(self, claim: Claim) -> int:
        """Of a hand-off's blocks: also what waiting sequences before it need to start."""
        before = [sequence for sequence in self._places.waiting if sequence.rank < claim.rank]
        num_needed = self._limits.num_watermark_blocks
        if before or self._places.last_holder is not None:
            futures = [future for sequence in before for future in self._future_of(sequence)]
            # Nobody knows when its sequences will join: what they will grow by counts in full.
            num_needed = max(num_needed, self._growth(claim.rank, futures) + claim.num_to_grow)
        return num_needed + sum(map(self._tables.num_needed, before))

    def _growth(self, rank: Rank, newcomers: Iterable[Future]) -> int:
        """Of those that hold blocks and go before, and of newcomers. What is not predicted does not grow."""
        holders = [holder for holder in self._places.holders if holder.rank < rank]
        futures = [future for holder in holders for future in _future(holder, len(holder.block_ids))]
        return most_growth([*futures, *newcomers], self._limits.block_size)

    def _future_of(self, waiting: Sequence) -> list[Future]:
        return _future(waiting, self._tables.num_needed(waiting))


def _future(sequence: Sequence, num_blocks: int) -> list[Future]:
    num_to_come = sequence.predicted_tokens - sequence.num_output
    return [Future(len(sequence.token_ids), num_to_come, num_blocks)] if num_to_come > 0 else []
