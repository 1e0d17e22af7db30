"""What this package counts. Telemetry implements it; nothing here knows how figures leave the process."""

from typing import Protocol


class TransferCounters(Protocol):
    def handoff(self, *, side: str, transport: str, outcome: str, reason: str) -> None:
        """A hand-off ended. `side`: exporter or importer; `transport` empty when none was agreed; `outcome`: ok,
        unneeded, failed or refused; `reason`: empty, or a HandOffReason."""
        ...

    def moved(self, *, transport: str, num_bytes: int) -> None:
        """Bytes that an importer read for a hand-off that was settled as good."""
        ...

    def checked(self, *, num_verified: int, num_unverified: int) -> None:
        """Blocks that were read: so many compared with their digests, so many taken as they came."""
        ...

    def digest_failure(self, *, transport: str) -> None: ...

    def fallback(self, *, broken: str, taken: str, reason: str) -> None:
        """A hand-off left one transport for another. `reason`: a FallBackReason."""
        ...

    def quarantined(self, change: int) -> None:
        """More (or fewer) blocks are in quarantine than before."""
        ...

    def lease_lapse(self) -> None: ...
