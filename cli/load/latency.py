"""What a benchmark measured, as figures. Pure.

Every latency counts from when the request was *scheduled* to be sent. A driver that falls behind, or a server that
makes it, shows in the figures instead of hiding in them (coordinated omission).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Record:
    """One request, in seconds on the run's own clock. `error` empty: it ended as it should."""

    scheduled_s: float
    token_times_s: tuple[float, ...]  # when each generated token arrived
    ended_s: float
    prompt_tokens: int
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.scheduled_s

    @property
    def inter_token_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]


@dataclass(frozen=True, slots=True)
class Objective:
    """What a good answer keeps to; None: no demand."""

    ttft_s: float | None = None
    itl_s: float | None = None  # the mean over the request

    def is_met(self, record: Record) -> bool:
        if record.error or not record.token_times_s:
            return False
        if self.ttft_s is not None and record.ttft_s > self.ttft_s:
            return False
        gaps = record.inter_token_s
        return self.itl_s is None or not gaps or fmean(gaps) <= self.itl_s


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation between the nearest ranks, as numpy's default. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def report(records: Sequence[Record], objective: Objective) -> dict[str, object]:
    """The run's figures, ready for JSON. Latencies are of the requests that ended as they should; their number and the
    others' stand beside them."""
    good = [record for record in records if not record.error and record.token_times_s]
    errors: dict[str, int] = {}
    for record in records:
        if record.error:
            errors[record.error] = errors.get(record.error, 0) + 1
    duration_s = max((record.ended_s for record in records), default=0.0) - min(
        (record.scheduled_s for record in records), default=0.0
    )
    met = sum(objective.is_met(record) for record in records)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return {
        "requests": {"sent": len(records), "ok": len(good), "failed": len(records) - len(good), "errors": errors},
        "duration_s": duration_s,
        "throughput": {
            "requests_per_s": len(good) * per_s,
            "prompt_tokens_per_s": sum(record.prompt_tokens for record in good) * per_s,
            "output_tokens_per_s": sum(len(record.token_times_s) for record in good) * per_s,
        },
        "ttft_s": summary([record.ttft_s for record in good]),
        "itl_s": summary([gap for record in good for gap in record.inter_token_s]),
        "e2e_s": summary([record.e2e_s for record in good]),
        "goodput": {
            "slo_ttft_s": objective.ttft_s,
            "slo_itl_s": objective.itl_s,
            "requests_per_s": met * per_s,
            "share": met / len(records) if records else 0.0,
        },
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "mean": fmean(values),
        "p50": percentile(values, 0.50),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }
