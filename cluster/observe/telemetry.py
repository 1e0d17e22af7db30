"""The metrics of one process, rendered for Prometheus, and the table of all metrics: name, kind, help text, labels.

Names follow Prometheus: base units, and `_total` for counters. Labels are bounded: reasons come from cluster/errors.py;
roles, phases and transports are fixed sets. A request, a client or a prompt is never a label. An undeclared name or
label raises.

Each Telemetry object owns a registry and never uses the library's global one, so two workers in one process stay apart.
It is safe to call from any thread.
"""

from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
_MAX_LABEL_SETS = 200
_OVERFLOW = "other"
Figure = TypeVar("Figure", Counter, Gauge, Histogram)


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram


# Latencies from a memory copy on one host to a long generation.
_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_ERRORS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def _counter(text: str, *labels: str) -> Metric:
    return Metric(Kind.COUNTER, text, labels)


def _gauge(text: str, *labels: str) -> Metric:
    return Metric(Kind.GAUGE, text, labels)


def _seconds(text: str, *labels: str) -> Metric:
    return Metric(Kind.HISTOGRAM, text, labels, _SECONDS)


def _error(text: str) -> Metric:
    return Metric(Kind.HISTOGRAM, text, (), _ERRORS)


def _tokens(text: str, *labels: str) -> Metric:
    return Metric(Kind.HISTOGRAM, text, labels, tuple(float(bound) for bound in _TOKENS))


METRICS: dict[str, Metric] = {
    # router
    "tandem_requests_total": _counter("requests that ended, by outcome: ok, or an error's reason", "outcome"),
    "tandem_requests_live": _gauge("requests in progress"),
    "tandem_requests_waiting_for_large_worker": _gauge("requests waiting because no present worker is large enough"),
    "tandem_requests_refused_total": _counter("requests refused before any work", "reason"),
    "tandem_prompt_tokens_total": _counter("prompt tokens of admitted requests"),
    "tandem_generated_tokens_total": _counter("tokens delivered to clients"),
    "tandem_prompt_length_tokens": _tokens("prompt tokens per request"),
    "tandem_output_length_tokens": _tokens("generated tokens per choice"),
    "tandem_ttft_seconds": _seconds("time from a request's arrival until its first token is delivered"),
    "tandem_inter_token_seconds": _seconds("time between the deliveries of two tokens of one choice"),
    "tandem_request_seconds": _seconds("time from a request's arrival to its last token"),
    "tandem_phase_seconds": _seconds("time in each phase of a request; the phases sum to its wall time", "phase"),
    "tandem_retries_total": _counter("retried legs of a request", "leg", "reason"),
    "tandem_false_suspicions_total": _counter("suspected workers that answered before they were declared lost", "role"),
    "tandem_hedges_total": _counter(
        "second attempts started beside the attempt of a suspected worker", "leg", "outcome"
    ),
    "tandem_tickets_reissued_total": _counter(
        "tickets reissued to another decode worker, by the failure of the previous one", "leg", "reason"
    ),
    "tandem_ttft_prediction_error_ratio": _error(
        "difference between predicted and real time to first token, as a share of the real one"
    ),
    "tandem_itl_prediction_error_ratio": _error(
        "the same for the mean time between a request's tokens, of requests with at least 8 tokens"
    ),
    "tandem_placement_decisions_total": _counter("choices of workers, by the criterion that decided", "reason"),
    "tandem_disaggregation_ttft_effect_seconds": _gauge(
        "time to first token at pairs of workers minus the same at workers alone; basis: measured from explored"
        " requests, or predicted; bound: mean, low or high (tandem status explains them)",
        "basis",
        "bound",
    ),
    "tandem_disaggregation_trials": _gauge("requests from which that effect is measured or predicted", "basis"),
    "tandem_local_prefills_total": _counter("prompts prefilled on a decode worker", "reason"),
    "tandem_pair_breaker_state": _gauge(
        "pairs of workers whose circuit breaker is open or half open, after failed hand-offs", "state"
    ),
    "tandem_pair_breaker_openings_total": _counter(
        "times that the circuit breaker of a pair of workers opened", "reason"
    ),
    "tandem_migrations_total": _counter(
        "attempted migrations of sequences to another decode worker", "outcome", "reason"
    ),
    "tandem_malformed_messages_total": _counter(
        "messages of workers refused because a field was out of bounds", "message"
    ),
    "tandem_stale_messages_total": _counter("dropped messages of attempts that are no longer current"),
    "tandem_buffered_tokens": _gauge("tokens waiting for clients to read them"),
    "tandem_members": _gauge("members of the cluster, as this router sees it", "role", "state"),
    "tandem_prefix_index_blocks": _gauge("cached blocks that prefill workers have reported to this router"),
    "tandem_registry_age_seconds": _gauge("seconds since the registry was last read"),
    "tandem_stalled_clients_total": _counter(
        "clients disconnected because they read nothing of their response", "surface"
    ),
    "tandem_http_connections_refused_total": _counter("HTTP connections closed at once because there were too many"),
    "tandem_http_connections_closed_total": _counter(
        "HTTP connections closed before a complete request: replaced by newer ones, or without a handshake",
        "reason",
    ),
    "tandem_http_responses_total": _counter("HTTP responses", "route", "status"),
    "tandem_service_time_relative_error": _gauge(
        "median error of the predicted seconds of this worker's recent steps, in parts of the measured ones", "model"
    ),
    "tandem_canaries_total": _counter(
        "test generations of idle workers; counted elsewhere only as steps and computed tokens", "outcome"
    ),
    "tandem_unhealthy_total": _counter("times that a worker became unhealthy, by the check that found it", "finder"),
    "tandem_rpc_errors_total": _counter("gRPC calls that this process ended with an error", "reason"),
    "tandem_event_loop_lag_seconds": _seconds("how late a timer of this process's event loop ran, about once a second"),
    # worker
    "tandem_kv_blocks": _gauge("blocks of the KV pool by state, about once a second", "state"),
    "tandem_kv_cache_usage_ratio": _gauge("blocks of the KV pool in use; neither free nor cached"),
    "tandem_sequences": _gauge(
        "sequences of this worker: running, waiting for room, or frozen until their KV was handed over", "state"
    ),
    "tandem_step_seconds": _seconds("time of a step, by its work: prefill, decode, or mixed", "work"),
    "tandem_computed_tokens_total": _counter("tokens computed in steps, those of prompts included"),
    "tandem_preemptions_total": _counter("sequences that lost their place to others and continued later"),
    "tandem_evicted_blocks_total": _counter("cached blocks that were given to other sequences"),
    "tandem_swaps_total": _counter("preempted sequences by what became of their KV", "action"),
    "tandem_draft_tokens_total": _counter("draft tokens of speculation by outcome: all, or accepted", "outcome"),
    # Aliases for dashboards and gateways that know vLLM's names (--metric-aliases vllm).
    "vllm:num_requests_running": _gauge("the same as tandem_sequences, running", "model_name"),
    "vllm:num_requests_waiting": _gauge("the same as tandem_sequences, waiting", "model_name"),
    "vllm:kv_cache_usage_perc": _gauge("the same as tandem_kv_cache_usage_ratio", "model_name"),
    # prefill worker
    "tandem_prefill_refused_total": _counter("prefills refused by the worker", "reason"),
    "tandem_prefill_failed_total": _counter("prefills that failed after they were accepted", "reason"),
    "tandem_prefill_queue_seconds": _seconds("time from acceptance of a prefill to its first chunk"),
    "tandem_prefill_seconds": _seconds("time from a prefill's first chunk to its first token"),
    "tandem_prefix_cached_tokens_total": _counter(
        "tokens whose KV was found in the worker's own prefix cache (prefill and decode workers)"
    ),
    "tandem_prefix_pulls_total": _counter(
        "pulls of prefixes from other workers: ok, or the reason why the prefix was computed", "outcome"
    ),
    "tandem_prefix_tier_blocks_total": _counter(
        "blocks stored in, demoted between and fetched from tiers: ok, or the reason why not", "action", "outcome"
    ),
    # decode worker
    "tandem_decode_starts_total": _counter("accepted decode attempts, by the source of their KV", "source"),
    "tandem_decode_import_failed_total": _counter("decode attempts whose KV import failed", "reason"),
    "tandem_decode_router_gone_total": _counter(
        "routers that were lost, so that their sequences were cancelled", "reason"
    ),
    "tandem_decode_tokens_total": _counter("tokens generated by this worker"),
    "tandem_decode_queue_seconds": _seconds(
        "time that a sequence waits for room for its KV, and then for its first step"
    ),
    # hand-off
    "tandem_handoffs_total": _counter("hand-offs that ended", "side", "transport", "outcome", "reason"),
    "tandem_kv_bytes_total": _counter("KV bytes read by successful hand-offs", "transport"),
    "tandem_kv_verify_mode": _gauge("1 for the --kv-verify of this worker", "mode"),
    "tandem_kv_blocks_verified_total": _counter("blocks read and compared with their digest"),
    "tandem_kv_blocks_unverified_total": _counter(
        "blocks read and not compared with their digest, because of --kv-verify"
    ),
    "tandem_digest_failures_total": _counter("blocks whose digest did not match", "transport"),
    "tandem_transport_fallbacks_total": _counter(
        "hand-offs that fell back from one transport to another", "broken", "taken", "reason"
    ),
    "tandem_lease_lapses_total": _counter("leases that expired before they were settled"),
    "tandem_quarantined_blocks": _gauge("blocks to which a timed-out read may still write"),
}


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
        """The values of a counter by the values of its labels, in the order of METRICS; empty before the first use."""
        counter, labels = self._counters.get(name), METRICS[name].labels
        samples = [sample for metric in counter.collect() for sample in metric.samples] if counter is not None else []
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
