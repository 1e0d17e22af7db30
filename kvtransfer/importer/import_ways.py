"""The ways from one hand-off's importer to its exporter's blocks: which are worth offering, which one is in use.

Owns their order for one attempt, and tells the worker's PairBook what each did. Never reads anything itself.
"""

import logging
import struct
from collections.abc import Mapping, Sequence

from cluster.clock import Clock
from cluster.messages import Epoch
from kvtransfer.counters import TransferCounters
from kvtransfer.importer.pairs import PairBook
from kvtransfer.protocol.import_events import FallBackReason
from kvtransfer.transports.base import Channel, ImporterTransport, TransportError

_LOG = logging.getLogger(__name__)


class ImportWays:
    def __init__(
        self,
        *,
        epoch: Epoch,
        transports: Mapping[str, ImporterTransport],  # best first
        pairs: PairBook,
        clock: Clock,
        counters: TransferCounters,
    ) -> None:
        self._epoch, self._transports = epoch, transports
        self._pairs, self._clock, self._counters = pairs, clock, counters
        self._accepted: list[tuple[str, bytes]] = []  # (transport, the exporter's endpoint), the present one first

    def offered(self) -> dict[str, bytes]:
        """Endpoints by transport, best first, without those that lately failed with this exporter; if all did, all."""
        now_s = self._clock.now_s()
        usable = [name for name in self._transports if self._pairs.usable(self._epoch.exporter, name, now_s)]
        return {name: self._transports[name].endpoint() for name in usable or self._transports}

    def take(self, accepted: Sequence[tuple[str, bytes]]) -> int:
        """What the exporter accepted, best first; the first time counts. Answers how many there are beside one."""
        if not self._accepted:
            self._accepted = [*accepted[:1], *(way for way in accepted[1:] if way[0] in self._transports)]
        return len(self._accepted) - 1

    @property
    def transport(self) -> str:
        """The one in use; empty before the exporter accepted."""
        return self._accepted[0][0] if self._accepted else ""

    async def open(self) -> Channel:
        """A channel by the present way. Raises TransportError, OSError, RuntimeError."""
        name, endpoint = self._accepted[0]
        transport = self._transports.get(name)
        if transport is None:
            raise TransportError(f"the exporter chose {name!r}, which was not offered")
        try:
            return await transport.open(self._epoch, endpoint)
        except (ValueError, OverflowError, struct.error) as error:  # what no address, path or number can be
            raise TransportError(f"not an endpoint of {name}: {error}") from error

    def was_read(self, num_bytes: int, seconds: float) -> None:
        self._pairs.read_completed(self._epoch.exporter, self.transport, num_bytes, seconds, self._clock.now_s())

    def failed(self) -> None:
        """The present way could not be opened, or broke."""
        self._pairs.open_failed(self._epoch.exporter, self.transport, self._clock.now_s())

    def fall_back(self, reason: FallBackReason, detail: str) -> None:
        """On to the next one."""
        broken, _ = self._accepted.pop(0)
        self._counters.fallback(broken=broken, taken=self.transport, reason=reason)
        _LOG.warning("KV of %s by %s after %s: %s %s", self._epoch.exporter, self.transport, broken, reason, detail)
