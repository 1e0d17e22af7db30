"""The metrics of one process, rendered for Prometheus. An undeclared name or label raises: metrics.py has the table.

Each Telemetry object owns a registry and never uses the library's global one, so two workers in one process share no
metric. It is safe to call from any thread.

`MetricsPort` serves the metrics over HTTP: `GET /metrics`. Threads of its own answer, so neither a busy event loop nor
a long step delays a scrape. Like the health port it has no TLS. It requires the same keys as the process; metrics
contain no prompt, token or key.
"""

import platform
import socket
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, TypeAlias, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from cluster.accounts.keys import Access, Gate
from cluster.errors import PermissionDenied, Unauthenticated, http_status
from cluster.observe.metrics import EVERY_PROCESS, METRICS, ROUTER, WORKER, Kind
from cluster.process import installed_version
from cluster.serving.listening import cannot_listen

CONTENT_TYPE = CONTENT_TYPE_LATEST
_MAX_LABEL_SETS = 200
_OVERFLOW = "other"
_MAX_CONNECTIONS = 16  # a further one takes the place of the oldest: a scrape takes milliseconds
_TIMEOUT_S = 5.0  # of each read and write


class _Histogram(Histogram):
    def observe_all(self, amounts: Sequence[float]) -> None:
        """Add observations. Takes the lock of each bucket at most once."""
        self._sum.inc(sum(amounts))
        ascending, below = sorted(amounts), 0
        for bucket, bound in zip(self._buckets, self._upper_bounds, strict=True):
            up_to = bisect_right(ascending, bound, below)
            if up_to > below:
                bucket.inc(up_to - below)
                below = up_to
                if below == len(ascending):
                    break


Figure = TypeVar("Figure", Counter, Gauge, _Histogram)


class Telemetry:
    def __init__(self, published: Iterable[str] = ()) -> None:
        """`published`: metrics that are published before their first use, so that a scrape has all metrics of its
        process and a counter begins at 0. Those with labels have no series until they are used."""
        disable_created_metrics()  # type: ignore[no-untyped-call] # times of creation would double a scrape
        self._registry = CollectorRegistry(auto_describe=False)
        self._label_sets: dict[str, set[tuple[str, ...]]] = {name: set() for name in METRICS}
        self._lock = Lock()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, _Histogram] = {}
        self._series: dict[tuple[Any, ...], Any] = {}  # the series in use, by kind, name and labels
        for name in published:
            self._publish(name)

    @staticmethod
    def of_router() -> "Telemetry":
        return Telemetry((*EVERY_PROCESS, *ROUTER))

    @staticmethod
    def of_worker() -> "Telemetry":
        return Telemetry((*EVERY_PROCESS, *WORKER))

    def describe(self, *, role: str, member: str, model: str) -> None:
        """Publish the present identity of this process in place of the former one, after a change of its role."""
        installed = (installed_version(), platform.python_version())
        self.gauge_all("tandem_build_info", {(*installed, role, member, model): 1})

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        self._one_series(name, Kind.COUNTER, self._counters, Counter, labels).inc(value)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._one_series(name, Kind.GAUGE, self._gauges, Gauge, labels).set(value)

    def gauge_all(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        """Set a gauge for these values of its labels, in the order of METRICS, and remove its other series. One thread
        may call it for each gauge."""
        labels = METRICS[name].labels
        for gone in self._label_sets[name] - values.keys():
            self._gauges[name].remove(*gone)
            self._series.pop((Gauge, name, *zip(labels, gone, strict=True)), None)
            self._label_sets[name].discard(gone)
        for each, value in values.items():
            self.gauge(name, value, **dict(zip(labels, each, strict=True)))

    def shift(self, name: str, change: float, **labels: str) -> None:
        """Change a gauge by `change`."""
        self._one_series(name, Kind.GAUGE, self._gauges, Gauge, labels).inc(change)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        self._one_series(name, Kind.HISTOGRAM, self._histograms, _Histogram, labels).observe(value)

    def observe_all(self, name: str, values: Sequence[float], **labels: str) -> None:
        """Add several observations to a histogram, which is cheaper than one by one."""
        if values:
            self._one_series(name, Kind.HISTOGRAM, self._histograms, _Histogram, labels).observe_all(values)

    def add_process_metrics(self) -> None:
        """Publish this process's CPU time, memory and descriptors too, under the names that Prometheus' own libraries
        use: process_cpu_seconds_total, process_resident_memory_bytes, process_open_fds and others."""
        ProcessCollector(registry=self._registry)

    def value(self, name: str, **labels: str) -> float:
        """The value of a counter or gauge; the number of observations of a histogram. 0 before the first use."""
        suffix = "_count" if METRICS[name].kind is Kind.HISTOGRAM else ""
        self._check_labels(name, labels)
        return self._registry.get_sample_value(name + suffix, labels) or 0.0

    def by_labels(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of a counter or gauge by the values of its labels, in the order of METRICS; empty before the first
        use."""
        found, labels = self._counters.get(name) or self._gauges.get(name), METRICS[name].labels
        samples = [sample for metric in found.collect() for sample in metric.samples] if found is not None else []
        return {tuple(s.labels[label] for label in labels): s.value for s in samples if s.name == name}

    def observations(self, name: str) -> tuple[int, ...]:
        """The number of observations of a histogram without labels in each of its ranges; the last one has no bound."""
        histogram = self._histograms.get(name)
        if histogram is None:
            return (0,) * (len(METRICS[name].buckets) + 1)
        samples = [sample for metric in histogram.collect() for sample in metric.samples]
        up_to = [int(sample.value) for sample in samples if sample.name == f"{name}_bucket"]
        return tuple(count - below for below, count in zip([0, *up_to], up_to, strict=False))

    def render(self) -> bytes:
        """The metrics in Prometheus' text format, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _publish(self, name: str) -> None:
        match METRICS[name].kind:
            case Kind.COUNTER:
                self._make(name, Kind.COUNTER, self._counters, Counter)
            case Kind.GAUGE:
                self._make(name, Kind.GAUGE, self._gauges, Gauge)
            case Kind.HISTOGRAM:
                self._make(name, Kind.HISTOGRAM, self._histograms, _Histogram)

    def _one_series(
        self, name: str, kind: Kind, made: dict[str, Figure], figure: type[Figure], labels: dict[str, str]
    ) -> Figure:
        """Return the metric with these labels. It is looked up once, because the checks take longer than to count."""
        key = (figure, name, *labels.items())
        found: Figure | None = self._series.get(key)
        if found is not None:
            return found
        metric = made.get(name) or self._make(name, kind, made, figure)
        values = self._label_values(name, labels)
        found = metric.labels(*values) if values else metric
        if values == tuple(map(labels.get, METRICS[name].labels)):  # those counted as "other" have no bound
            self._series[key] = found
        return found

    def _make(self, name: str, kind: Kind, made: dict[str, Figure], figure: type[Figure]) -> Figure:
        """Create a metric, so that a process does not publish zeros for other roles' metrics."""
        metric = METRICS[name]
        if metric.kind is not kind:
            raise KeyError(f"{name} is a {metric.kind.value}, not a {kind.value}")
        more: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
        with self._lock:
            if name not in made:
                made[name] = figure(name, metric.help, metric.labels, registry=self._registry, **more)
            return made[name]

    def _check_labels(self, name: str, labels: dict[str, str]) -> None:
        if labels.keys() != set(METRICS[name].labels):
            raise ValueError(f"{name} has the labels {METRICS[name].labels}, not {tuple(labels)}")

    def _label_values(self, name: str, labels: dict[str, str]) -> tuple[str, ...]:
        """Beyond 200 label sets, new ones count as "other", so that a bug cannot exhaust the memory of the
        monitoring."""
        if not labels and not METRICS[name].labels:
            return ()
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


class MetricsPort:
    """The metrics port. It is bound when created and answers from `start` to `stop`."""

    def __init__(self, telemetry: Telemetry, gate: Gate, *, host: str, port: int) -> None:
        """`gate`: admits callers that may read metrics. `port` 0: a free port. Adds the process's metrics to
        `telemetry`. Raises ConfigError if the port cannot be bound."""
        telemetry.add_process_metrics()
        handler = type("MetricsHandler", (_Handler,), {"telemetry": telemetry, "gate": gate})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise cannot_listen(error, host, port, "--metrics-port") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop answering; does not wait."""
        threading.Thread(target=self._stop, name="stop metrics", daemon=True).start()

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()  # waits for the serving thread, which looks twice a second
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    telemetry: Telemetry
    gate: Gate
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "only /metrics is served here")
            return
        try:
            self.gate.admit(self.headers.get("Authorization", ""), Access.METRICS)
        except (Unauthenticated, PermissionDenied) as refusal:
            self.send_error(http_status(refusal), refusal.message)
            return
        metrics = self.telemetry.render()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(metrics)))
        self.end_headers()
        self.wfile.write(metrics)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: scrapes are frequent."""


_Connection: TypeAlias = socket.socket | tuple[bytes, socket.socket]  # as the standard library types it


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that reads nothing does not delay the end of the process
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._lock = Lock()
        self._connections: dict[_Connection, None] = {}  # the oldest first
        super().__init__(address, handler)

    def process_request(self, request: _Connection, client_address: object) -> None:
        with self._lock:
            oldest = next(iter(self._connections)) if len(self._connections) >= _MAX_CONNECTIONS else None
            if oldest is not None:
                del self._connections[oldest]
            self._connections[request] = None
            if isinstance(oldest, socket.socket):
                with suppress(OSError):  # its client has closed it
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: _Connection) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error: a client that disconnects is no error of this process."""
