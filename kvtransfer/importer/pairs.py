"""What this worker knows of each way to each exporter: how fast it was, and whether it is worth trying now.

Pure: it is told of reads and failures together with the time. Owns a bounded number of pairs, the longest unused is
forgotten first. Never decides which transport is used; whoever attaches asks.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.messages import MemberId, PairFigure
from kvtransfer.importer.read_fit import ReadFit

MAX_PAIRS = 256
DOES_NOT_REACH = "does not reach from one to the other: they share no host, or no such device"
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0


@dataclass(slots=True)
class _Pair:
    fit: ReadFit = field(default_factory=ReadFit)
    failures: int = 0  # since the last read that completed
    unusable_until_s: float = float("-inf")


class PairBook:
    """One worker's. A pair is (exporter, transport); an exporter that starts again is another one."""

    def __init__(self, transports: Sequence[str]) -> None:
        """`transports`: best first; what comes earlier is what hand-offs use."""
        self._transports = tuple(transports)
        self._pairs: OrderedDict[tuple[MemberId, str], _Pair] = OrderedDict()

    def usable(self, exporter: MemberId, transport: str, now_s: float) -> bool:
        """False for a while after it could not be opened; the while doubles with each failure in a row."""
        pair = self._pairs.get((exporter, transport))
        return pair is None or now_s >= pair.unusable_until_s

    def read_completed(self, exporter: MemberId, transport: str, num_bytes: int, seconds: float, now_s: float) -> None:
        """`seconds` from the request for the blocks to their arrival, without any wait for other reads."""
        pair = self._pair(exporter, transport)
        pair.fit.add(num_bytes, seconds)
        pair.failures = 0
        pair.unusable_until_s = now_s

    def open_failed(self, exporter: MemberId, transport: str, now_s: float) -> None:
        """It could not be opened, or broke in use."""
        pair = self._pair(exporter, transport)
        backoff_s = min(FIRST_BACKOFF_S * 2.0 ** min(pair.failures, 30), MAX_BACKOFF_S)
        pair.failures += 1
        pair.unusable_until_s = now_s + backoff_s

    def figures(self) -> tuple[PairFigure, ...]:
        """By exporter; of each, what hand-offs use first. What failed last time comes after what did not."""
        ranked = sorted(self._pairs.items(), key=lambda item: (item[0][0], *self._rank(item[0][1], item[1])))
        return tuple(
            PairFigure(exporter, transport, estimate.bytes_per_s, estimate.latency_s)
            for (exporter, transport), pair in ranked
            if (estimate := pair.fit.estimate()) is not None
        )

    def best(self, exporter: MemberId) -> PairFigure | None:
        """Of the transport that hand-offs with it use; None before enough was read."""
        return next((figure for figure in self.figures() if figure.exporter == exporter), None)

    def _rank(self, transport: str, pair: _Pair) -> tuple[bool, int]:
        known = transport in self._transports
        return pair.failures > 0, self._transports.index(transport) if known else len(self._transports)

    def _pair(self, exporter: MemberId, transport: str) -> _Pair:
        for known in [key for key in self._pairs if key[0].id == exporter.id and key[0] != exporter]:
            del self._pairs[known]  # its process is gone
        pair = self._pairs.setdefault((exporter, transport), _Pair())
        self._pairs.move_to_end((exporter, transport))
        while len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return pair
