"""The worker's block pool as an importer sees it: requests to the thread that owns it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reservation:
    """All blocks of one hand-off: the prompt's full blocks in order, then one tail per choice. The first `num_cached`
    of them hold their content already, shared and pinned for this hand-off; nothing is ever read into those."""

    block_ids: tuple[int, ...]
    num_cached: int = 0


class BlockSource(Protocol):
    async def reserve(self, handoff_id: int, num_blocks: int) -> Reservation:
        """Waits until they can be set aside all at once. Raises a TandemError when they never can. When it is
        cancelled, `discard` follows and makes the pool forget the reservation, whether it was made or not."""
        ...

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        """The hand-off is over without its sequences joining; these of its blocks may still be written to."""
        ...

    def quiet(self, block_ids: frozenset[int]) -> None:
        """Nobody can write to these quarantined blocks any more."""
        ...
