"""What questions to the step thread are, and the commands and answers that both roles' schedulers share. Pure values.

Commands go to the step thread and events come back; these two directions are the only meeting place of asyncio and the
thread that owns the device and the block pool. Each role's `scheduling/commands.py` declares its own commands.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from cluster.errors import TandemError

AnswerT = TypeVar("AnswerT")
Key: TypeAlias = tuple[Hashable, ...]


class Question(Generic[AnswerT]):
    """A command that the scheduler answers with one event: an AnswerT or a Refusal with the same key."""

    __slots__ = ()

    @property
    def key(self) -> Key:
        """Unique among the questions that wait for an answer."""
        raise NotImplementedError


class Answer:
    """An event that answers a question."""

    __slots__ = ()

    @property
    def key(self) -> Key:
        """The key of the question."""
        raise NotImplementedError


class Refusal(Answer):
    """An answer that raises its error at the caller who asked."""

    __slots__ = ()
    error: TandemError


@dataclass(frozen=True, slots=True)
class Release:
    """The ticket's blocks have no lease left and get no new one: free them. Does nothing for an unknown ticket."""

    ticket_id: bytes


@dataclass(frozen=True, slots=True)
class Quiet:
    """No transport can write to these quarantined blocks any more: free them."""

    block_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Tail:
    """The last, partly filled block: unused positions are zeroed, and it does not change while it is leased."""

    block_id: int
    num_valid: int


@dataclass(frozen=True, slots=True)
class PrefixLeased(Answer):
    """Holds no blocks when fewer than `min_blocks` are cached."""

    ticket_id: bytes
    block_ids: tuple[int, ...]
    unverified: frozenset[int] = frozenset()  # of these, the blocks that came from another worker and were not verified

    @property
    def key(self) -> Key:
        return LeasePrefix, self.ticket_id


@dataclass(frozen=True, slots=True)
class LeasePrefix(Question[PrefixLeased]):
    """Lease the cached leading blocks of this chain to a ticket until Release."""

    ticket_id: bytes
    block_hashes: tuple[bytes, ...]
    min_blocks: int

    @property
    def key(self) -> Key:
        return LeasePrefix, self.ticket_id


@dataclass(frozen=True, slots=True)
class Inspected(Answer):
    inspection_id: int
    blocks: dict[str, int]  # by state; they sum to the pool
    figures: dict[str, float]  # running, waiting, steps, ...
    violation: str  # what check() found broken; empty if nothing
    holders: frozenset[str] = frozenset()  # everything that holds blocks or waits for them, named by cluster/holders.py

    @property
    def key(self) -> Key:
        return Inspect, self.inspection_id


@dataclass(frozen=True, slots=True)
class Inspect(Question[Inspected]):
    """Run check() and report the blocks, the figures and who holds blocks."""

    inspection_id: int

    @property
    def key(self) -> Key:
        return Inspect, self.inspection_id
