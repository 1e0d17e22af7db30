"""Which versions of the protocol between members one of them understands, and which one two of them speak. Pure.

One number counts for all that members say to each other: the messages of proto/tandem/v1 and what they mean, tickets,
keyed hashes, digests, and what lies in Redis. What changes it, and how a version is retired: docs/upgrade.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The oldest and the newest version that somebody understands. Raises ValueError where that is no range."""

    oldest: int
    newest: int

    def __post_init__(self) -> None:
        if not 1 <= self.oldest <= self.newest:
            raise ValueError(f"{self} is no range of protocol versions")

    def __contains__(self, version: int) -> bool:
        return self.oldest <= version <= self.newest

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"

    def common(self, other: "ProtocolRange") -> int | None:
        """What the two speak: the newest version that both understand. None: there is none."""
        version = min(self.newest, other.newest)
        return version if version in self and version in other else None


OURS = ProtocolRange(oldest=1, newest=1)
