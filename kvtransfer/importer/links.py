"""The measured speed, latency and recent failures of this worker's links to exporters. Pure.

A link is one transport to one exporter. The table is bounded; the link unused for longest is dropped first. It never
chooses a transport: the importer asks it when it attaches.

Speed comes from a weighted least-squares fit of the line `seconds = latency + bytes / bandwidth` over recent reads.
Weights fall with the square of the size, so that the error of a small read counts as much as that of a large one. A
read that took much longer than the line predicts changes it by a bounded amount; a link that became slower is followed
within a few reads.

Whether a link has become slower is found without the line, which is a bad guess for sizes that were not read: recent
reads are compared with the fastest earlier ones of similar size.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from cluster.messages import LinkSpeed, MemberId
from cluster.service_times import HandOffTimes

FORGETTING = 0.9  # per read: about the last ten count
MIN_READS = 3
_OUTLIER = 3.0  # a read counts as at most this many times its prediction
_WEIGHT_FLOOR_BYTES = 256 * 1024  # below it, reads differ by latency only
_MIN_SPREAD = 0.05  # of sizes, relative: with less, latency and bandwidth cannot be separated
_MIN_SECONDS = 1e-7
_NUM_HAND_OFFS = 31
_COMPARED_READS = 15  # their median counts, so that a few reads that stalled change nothing
_PAUSE_S = 0.01  # added to both sides of a comparison: on a busy machine any read may wait as long
MAX_LINKS = 256
DOES_NOT_REACH = "does not connect the two: they share no host, or no such device"
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0


@dataclass(frozen=True, slots=True)
class Estimate:
    bytes_per_s: float
    latency_s: float


class LinkSpeedFit:
    """A fit of latency and bandwidth, stored as five weighted sums. Their weights shrink with every read."""

    def __init__(self) -> None:
        self._num_reads = 0
        self._w = self._wx = self._wxx = self._wt = self._wxt = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Add one read. A read without bytes is ignored."""
        if num_bytes <= 0:
            return
        seconds = max(seconds, _MIN_SECONDS)
        known = self.estimate()
        if known is not None:
            seconds = min(seconds, _OUTLIER * (known.latency_s + num_bytes / known.bytes_per_s))
        weight = (_WEIGHT_FLOOR_BYTES + num_bytes) ** -2.0
        self._w = self._w * FORGETTING + weight
        self._wx = self._wx * FORGETTING + weight * num_bytes
        self._wxx = self._wxx * FORGETTING + weight * num_bytes**2
        self._wt = self._wt * FORGETTING + weight * seconds
        self._wxt = self._wxt * FORGETTING + weight * num_bytes * seconds
        self._num_reads += 1

    def estimate(self) -> Estimate | None:
        """Return the estimate, or None before MIN_READS reads. Latency is at least 0; bandwidth is positive and
        finite."""
        if self._num_reads < MIN_READS:
            return None
        determinant = self._w * self._wxx - self._wx**2
        if determinant > _MIN_SPREAD**2 * self._w * self._wxx:
            seconds_per_byte = (self._w * self._wxt - self._wx * self._wt) / determinant
            latency_s = (self._wt - seconds_per_byte * self._wx) / self._w
            if seconds_per_byte > 0 and latency_s >= 0:
                return Estimate(1 / seconds_per_byte, latency_s)
        # The line through the origin: reads of one size, or sizes too noisy to compare, give no more.
        return Estimate(self._wxx / self._wxt, 0.0)


@dataclass(slots=True)
class _ReadTimes:
    """The times of a link's reads of similar size: from a power of four up to the next one."""

    best_s: float = float("inf")  # the least median so far
    latest_s: list[float] = field(default_factory=list)  # since the last median


class ReadSlowdown:
    """How many times as long a link's reads take now as they took when the link was at its fastest."""

    def __init__(self) -> None:
        self._sizes: dict[int, _ReadTimes] = {}  # by the base-4 logarithm of their bytes
        self.times = 1.0  # remains 1 until two medians of reads of one size are known

    def add(self, num_bytes: int, seconds: float) -> None:
        """Add one read. A read without bytes is ignored."""
        if num_bytes <= 0:
            return
        known = self._sizes.setdefault((num_bytes.bit_length() - 1) // 2, _ReadTimes())
        known.latest_s.append(seconds)
        if len(known.latest_s) < _COMPARED_READS:
            return
        typical_s = median(known.latest_s)
        known.latest_s.clear()
        if known.best_s < float("inf"):
            self.times = max(1.0, (typical_s + _PAUSE_S) / (known.best_s + _PAUSE_S))
        known.best_s = min(known.best_s, typical_s)


@dataclass(slots=True)
class _Link:
    fit: LinkSpeedFit = field(default_factory=LinkSpeedFit)
    slowdown: ReadSlowdown = field(default_factory=ReadSlowdown)
    failures: int = 0  # since the last read that completed
    unusable_until_s: float = float("-inf")


class LinkTable:
    """The links of one worker. A link is (exporter, transport). A restarted exporter has new links."""

    def __init__(self, transports: Sequence[str]) -> None:
        """`transports` are ordered best first, as hand-offs use them."""
        self._transports = tuple(transports)
        self._links: OrderedDict[tuple[MemberId, str], _Link] = OrderedDict()
        self._fixed_s: deque[float] = deque(maxlen=_NUM_HAND_OFFS)  # of recent hand-offs over any link
        self._errors: deque[float] = deque(maxlen=_NUM_HAND_OFFS)

    def is_usable(self, exporter: MemberId, transport: str, now_s: float) -> bool:
        """Return False during the backoff after a failure. The backoff doubles with each failure in a row."""
        link = self._links.get((exporter, transport))
        return link is None or now_s >= link.unusable_until_s

    def record_read(self, exporter: MemberId, transport: str, num_bytes: int, seconds: float, now_s: float) -> None:
        """Record a read. `seconds` counts from its start to the arrival of the blocks, without waits for other
        reads."""
        link = self._link(exporter, transport)
        link.fit.add(num_bytes, seconds)
        link.slowdown.add(num_bytes, seconds)
        link.failures = 0
        link.unusable_until_s = now_s

    def record_failure(self, exporter: MemberId, transport: str, now_s: float) -> None:
        """Record that a channel could not be opened or that a read failed."""
        link = self._link(exporter, transport)
        backoff_s = min(FIRST_BACKOFF_S * 2.0 ** min(link.failures, 30), MAX_BACKOFF_S)
        link.failures += 1
        link.unusable_until_s = now_s + backoff_s

    def record_hand_off(self, exporter: MemberId, transport: str, num_bytes: int, exposed_s: float) -> None:
        """Record a completed hand-off: the time from the end of the prefill to its end, and the bytes that were read in
        that time. It is ignored before the link's speed is known."""
        moving_s = 0.0
        if num_bytes:
            link = self._links.get((exporter, transport))
            estimate = link.fit.estimate() if link is not None else None
            if estimate is None:
                return
            moving_s = estimate.latency_s + num_bytes / estimate.bytes_per_s
        known = self.hand_off
        if known is not None:
            self._errors.append(abs(known.fixed_s + moving_s - exposed_s) / max(exposed_s, _MIN_SECONDS))
        self._fixed_s.append(max(0.0, exposed_s - moving_s))

    @property
    def hand_off(self) -> HandOffTimes | None:
        """The time that recent hand-offs took in addition to moving bytes: messages, reservation, digests and
        settlement. None before the first one."""
        if not self._fixed_s:
            return None
        return HandOffTimes(median(self._fixed_s), median(self._errors) if self._errors else 0.0)

    def speeds(self) -> tuple[LinkSpeed, ...]:
        """Return the speed of each link, sorted by exporter and then as hand-offs prefer them: links that last failed
        come last."""
        ranked = sorted(self._links.items(), key=lambda item: (item[0][0], *self._rank(item[0][1], item[1])))
        return tuple(
            LinkSpeed(exporter, transport, estimate.bytes_per_s, estimate.latency_s, link.slowdown.times)
            for (exporter, transport), link in ranked
            if (estimate := link.fit.estimate()) is not None
        )

    def best(self, exporter: MemberId) -> LinkSpeed | None:
        """Return the speed of the link to the exporter that hand-offs use, or None before enough was read."""
        return next((speed for speed in self.speeds() if speed.exporter == exporter), None)

    def _rank(self, transport: str, link: _Link) -> tuple[bool, int]:
        known = transport in self._transports
        return link.failures > 0, self._transports.index(transport) if known else len(self._transports)

    def _link(self, exporter: MemberId, transport: str) -> _Link:
        for known in [key for key in self._links if key[0].id == exporter.id and key[0] != exporter]:
            del self._links[known]  # its process is gone
        link = self._links.setdefault((exporter, transport), _Link())
        self._links.move_to_end((exporter, transport))
        while len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)
        return link
