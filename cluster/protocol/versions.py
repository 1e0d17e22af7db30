"""The versions of the protocol between members that a member supports, and the version that two members use. Pure.

One number covers everything that members exchange: the messages of proto/tandem/internal/v1 and their meaning, tickets,
keyed hashes, digests, and the records in Redis. CONTRIBUTING.md says when it changes and how a version is retired.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The oldest and the newest version that a member supports. Raises ValueError unless 1 <= oldest <= newest."""

    oldest: int
    newest: int

    def __post_init__(self) -> None:
        if not 1 <= self.oldest <= self.newest:
            raise ValueError(f"{self} is not a range of protocol versions")

    def __contains__(self, version: int) -> bool:
        return self.oldest <= version <= self.newest

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"

    def common(self, other: "ProtocolRange") -> int | None:
        """Return the newest version that both support, which they use with each other; None if there is none."""
        version = min(self.newest, other.newest)
        return version if version in self and version in other else None


OURS = ProtocolRange(oldest=1, newest=1)
