"""The worker's block pool as an importer sees it: requests to the thread that owns it."""

from typing import Protocol


class BlockSource(Protocol):
    async def reserve(self, handoff_id: int, num_blocks: int) -> tuple[int, ...]:
        """Waits until they can be set aside all at once. Raises a TandemError when they never can. When it is
        cancelled, `discard` follows and makes the pool forget the reservation, whether it was made or not."""
        ...

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        """The hand-off is over without its sequences joining; these of its blocks may still be written to."""
        ...

    def quiet(self, block_ids: frozenset[int]) -> None:
        """Nobody can write to these quarantined blocks any more."""
        ...
