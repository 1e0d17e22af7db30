"""Samples of the requests that one arm served at one point, and the figures computed from them. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.placement.figures.intervals import Share
from cli.load import Record, percentile

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request, in seconds. TTFT counts from the planned arrival."""

    ttft_s: float
    tpot_s: float  # mean time per token after the first one
    second_s: float  # from the first to the second token
    longest_gap_s: float


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits of a good request, in seconds."""

    ttft_s: float
    tpot_s: float

    def is_met(self, sample: Sample) -> bool:
        return sample.ttft_s <= self.ttft_s and sample.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm's requests at one point."""

    samples: tuple[Sample, ...]  # of answered requests
    errors: dict[str, int]  # failed requests by reason
    itl_s: dict[str, float]  # percentiles of all gaps between tokens
    arrivals_s: float  # time over which the requests were planned to arrive
    others_cpu: float  # cores that everything but this arm and its load used, in the mean
    generator_cpu: float  # cores that the load generator used
    late_s: float  # p99 of the time by which the load generator sent requests too late
    # Relative errors of predicted times by name, of an arm that predicts.
    prediction_errors: dict[str, list[float]] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return len(self.samples) + sum(self.errors.values())

    def attainment(self, slo: Slo) -> Share:
        """Return the share of requests within the SLO. A failed request is not."""
        return Share(sum(slo.is_met(sample) for sample in self.samples), self.num_requests)

    def goodput_rps(self, slo: Slo) -> float:
        """Return the requests within the SLO per second of planned arrivals: a time that is the same for all arms."""
        return self.attainment(slo).met / self.arrivals_s

    def percentiles_s(self, name: str) -> dict[str, float]:
        """Return the percentiles of one field of the samples; empty if no request was answered."""
        return percentiles_s([getattr(sample, name) for sample in self.samples])


def sample_of(record: Record) -> Sample:
    """Return the sample of a record. Raises ValueError for a failed record or one of less than two tokens."""
    gaps = record.inter_token_s
    if record.error or not gaps:
        raise ValueError("a sample needs an answered request of two tokens")
    tpot_s = (record.token_times_s[-1] - record.token_times_s[0]) / len(gaps)
    return Sample(record.ttft_s, tpot_s, gaps[0], max(gaps))


def percentiles_s(values: Sequence[float]) -> dict[str, float]:
    return {name: percentile(values, share) for name, share in PERCENTILES.items()} if values else {}


def samples_of(records: Iterable[Record]) -> tuple[tuple[Sample, ...], dict[str, int]]:
    """Return the samples of answered requests and the numbers of failed ones by reason."""
    samples, errors = [], dict[str, int]()
    for record in records:
        if record.error:
            errors[record.error] = errors.get(record.error, 0) + 1
        else:
            samples.append(sample_of(record))
    return tuple(samples), errors
