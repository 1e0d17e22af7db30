"""The counters of a worker's hand-offs, over the process's Telemetry."""

import logging

from cluster.observe.telemetry import Telemetry
from kvtransfer.digests import VerifyMode

_LOG = logging.getLogger(__name__)


class TransferCounters:
    """Report counters to the process's Telemetry, and keep plain totals for Inspect."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._totals: dict[str, float] = {}

    @property
    def totals(self) -> dict[str, float]:
        return dict(self._totals)

    def verifies(self, mode: VerifyMode) -> None:
        """Report the mode at start. A mode that leaves blocks unverified logs a warning."""
        self._telemetry.gauge("tandem_kv_verify_mode", 1, mode=mode)
        if mode.warning:
            _LOG.warning(mode.warning)

    def handoff(self, *, side: str, transport: str, outcome: str, reason: str) -> None:
        """Count one hand-off that ended.

        `side` is exporter or importer. `transport` is empty if none was agreed. `outcome` is ok, unneeded, failed or
        refused. `reason` is empty or a HandOffReason."""
        self._telemetry.count("tandem_handoffs_total", side=side, transport=transport, outcome=outcome, reason=reason)
        self._add(f"handoffs_{outcome}")
        if transport:
            self._add(f"handoffs_{outcome}_{transport}")

    def moved(self, *, transport: str, num_bytes: int, exposed_s: float, total_s: float) -> None:
        """Count the bytes and the time of a hand-off that an importer settled as valid. `exposed_s`: the part after the
        end of the prefill."""
        self._telemetry.count("tandem_kv_bytes_total", num_bytes, transport=transport)
        self._telemetry.observe("tandem_handoff_seconds", total_s, transport=transport)
        self._telemetry.observe("tandem_handoff_exposed_seconds", exposed_s, transport=transport)
        self._add("kv_bytes", num_bytes)

    def read(self, *, transport: str, seconds: float) -> None:
        """Count the time of one read."""
        self._telemetry.count("tandem_kv_read_seconds_total", seconds, transport=transport)

    def checked(self, *, num_verified: int, num_unverified: int) -> None:
        """Count blocks that were read, by whether their digests were compared."""
        self._telemetry.count("tandem_kv_blocks_verified_total", num_verified)
        self._telemetry.count("tandem_kv_blocks_unverified_total", num_unverified)
        self._add("verified_blocks", num_verified)
        self._add("unverified_blocks", num_unverified)

    def digest_failure(self, *, transport: str) -> None:
        self._telemetry.count("tandem_digest_failures_total", transport=transport)
        self._add("digest_failures")

    def fallback(self, *, broken: str, taken: str, reason: str) -> None:
        """Count a hand-off that switched from one transport to another. `reason` is a FallBackReason."""
        self._telemetry.count("tandem_transport_fallbacks_total", broken=broken, taken=taken, reason=reason)
        self._add("transport_fallbacks")

    def quarantined(self, change: int) -> None:
        """Change the number of quarantined blocks by `change`, which may be negative."""
        self._telemetry.shift("tandem_quarantined_blocks", change)

    def lease_lapse(self) -> None:
        self._telemetry.count("tandem_lease_lapses_total")
        self._add("lease_lapses")

    def _add(self, name: str, amount: float = 1) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + amount
