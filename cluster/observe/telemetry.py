"""The metrics of one process, rendered for Prometheus. Safe to call from any thread.

Each Telemetry object owns a registry and never uses the library's global one, so two workers in one process stay apart.
All metrics are declared in cluster/observe/metrics.py; an undeclared name or label raises. Engine and kvtransfer use
this class through small Protocols of their own.
"""

from threading import Lock
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from cluster.observe.metrics import METRICS, Kind

CONTENT_TYPE = CONTENT_TYPE_LATEST
_MAX_LABEL_SETS = 200
_OVERFLOW = "other"
Figure = TypeVar("Figure", Counter, Gauge, Histogram)


class Telemetry:
    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._label_sets: dict[str, set[tuple[str, ...]]] = {name: set() for name in METRICS}
        self._lock = Lock()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        counter = self._counters.get(name) or self._make(name, Kind.COUNTER, self._counters, Counter)
        values = self._label_values(name, labels)
        (counter.labels(*values) if values else counter).inc(value)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        gauge = self._gauges.get(name) or self._make(name, Kind.GAUGE, self._gauges, Gauge)
        values = self._label_values(name, labels)
        (gauge.labels(*values) if values else gauge).set(value)

    def shift(self, name: str, change: float, **labels: str) -> None:
        """Change a gauge by `change`."""
        gauge = self._gauges.get(name) or self._make(name, Kind.GAUGE, self._gauges, Gauge)
        values = self._label_values(name, labels)
        (gauge.labels(*values) if values else gauge).inc(change)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        histogram = self._histograms.get(name) or self._make(name, Kind.HISTOGRAM, self._histograms, Histogram)
        values = self._label_values(name, labels)
        (histogram.labels(*values) if values else histogram).observe(value)

    def value(self, name: str, **labels: str) -> float:
        """The value of a counter or gauge; the number of observations of a histogram. 0 before the first use."""
        suffix = "_count" if METRICS[name].kind is Kind.HISTOGRAM else ""
        self._check_labels(name, labels)
        return self._registry.get_sample_value(name + suffix, labels) or 0.0

    def render(self) -> bytes:
        """The metrics in Prometheus' text format, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _make(self, name: str, kind: Kind, made: dict[str, Figure], figure: type[Figure]) -> Figure:
        """Create a metric at its first use, so that a process does not publish zeros for other roles' metrics."""
        metric = METRICS[name]
        if metric.kind is not kind:
            raise KeyError(f"{name} is a {metric.kind.value}, not a {kind.value}")
        more: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
        with self._lock:
            if name not in made:
                made[name] = figure(name, metric.help, metric.labels, registry=self._registry, **more)
            return made[name]

    def _check_labels(self, name: str, labels: dict[str, str]) -> None:
        if set(labels) != set(METRICS[name].labels):
            raise ValueError(f"{name} has the labels {METRICS[name].labels}, not {tuple(labels)}")

    def _label_values(self, name: str, labels: dict[str, str]) -> tuple[str, ...]:
        """Beyond 200 label sets, new ones count as "other", so that a bug cannot exhaust the memory of the
        monitoring."""
        self._check_labels(name, labels)
        values = tuple(labels[label] for label in METRICS[name].labels)
        known = self._label_sets[name]
        with self._lock:
            if values in known:
                return values
            if len(known) >= _MAX_LABEL_SETS:
                return (_OVERFLOW,) * len(values)
            known.add(values)
        return values
