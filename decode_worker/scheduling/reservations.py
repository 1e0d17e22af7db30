"""Blocks that hand-offs wait for or have been given. Pure. Owned by the decode scheduler.

A hand-off is given all its blocks at once or none, in the policy's order; nobody holds half and waits for more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from engine.kv.block_pool import BlockPool
from engine.scheduling.policies import Rank, Work


@dataclass(frozen=True, slots=True)
class Claim:
    number: int  # arrival, comparable with `Group.number`
    handoff_id: int
    num_blocks: int
    block_hashes: tuple[bytes, ...]  # of the first of them, by which they may be found
    work: Work
    since_s: float
    num_to_grow: int  # blocks that its sequences are predicted to need beyond these
    rank: Rank = ()  # as it stands among the others; less goes first


@dataclass(frozen=True, slots=True)
class Grant:
    claim: Claim
    block_ids: tuple[int, ...]
    num_cached: int  # of the first of them, which were found


class Reservations:
    """Claims wait in the order of their ranks; grants are held until their hand-off is admitted or discarded."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._claims: dict[int, Claim] = {}  # by hand-off, in the order of their ranks
        self._grants: dict[int, Grant] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._claims)

    @property
    def handoff_ids(self) -> Iterator[int]:
        """Of those that wait, and of those that hold blocks."""
        return chain(self._claims, self._grants)

    @property
    def granted_block_ids(self) -> list[int]:
        return [block_id for grant in self._grants.values() for block_id in grant.block_ids]

    @property
    def first(self) -> Claim | None:
        return next(iter(self._claims.values()), None)

    def claim(self, claim: Claim) -> None:
        assert claim.handoff_id not in self._claims and claim.handoff_id not in self._grants, f"{claim} reserves twice"
        self._claims[claim.handoff_id] = claim

    def sort(self, rank: Callable[[Claim], Rank]) -> None:
        ranked = sorted((replace(claim, rank=rank(claim)) for claim in self._claims.values()), key=lambda c: c.rank)
        self._claims = {claim.handoff_id: claim for claim in ranked}

    def num_taken(self, claim: Claim) -> int:
        """Of the available blocks, by this claim."""
        found = self._pool.find(claim.block_hashes)
        num_idle = self._pool.num_available - self._pool.num_available_beside(found)
        return claim.num_blocks - len(found) + num_idle

    def grant(self, blocks_to_leave: Callable[[Claim], int]) -> list[Grant]:
        """Gives the first claims their blocks while enough others stay available."""
        granted = []
        while (claim := self.first) is not None:
            if self._pool.num_available - self.num_taken(claim) < blocks_to_leave(claim):
                break
            cached = self._pool.find(claim.block_hashes)
            block_ids = self._pool.reserve_beside(cached, claim.num_blocks - len(cached))
            assert block_ids is not None
            del self._claims[claim.handoff_id]
            grant = self._grants[claim.handoff_id] = Grant(claim, block_ids, len(cached))
            granted.append(grant)
        return granted

    def take(self, handoff_id: int) -> Grant | None:
        """Hands the blocks, and the references to them, over to the caller. None: nothing was granted."""
        return self._grants.pop(handoff_id, None)

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        """Frees or quarantines what was granted, forgets what was not. Unknown: it was admitted or discarded before."""
        self._claims.pop(handoff_id, None)
        grant = self._grants.pop(handoff_id, None)
        if grant is None:
            return
        foreign = quarantined - set(grant.block_ids)
        assert not foreign, f"hand-off {handoff_id} quarantines {sorted(foreign)}, which it does not hold"
        self._pool.quarantine(sorted(quarantined), handoff_id)
        self._pool.release([block_id for block_id in grant.block_ids if block_id not in quarantined])
