"""The one table of every figure that a Tandem process publishes: name, kind, meaning, labels. Nothing else is.

Names follow Prometheus: base units, `_total` for what only grows. Labels are bounded: reasons come from
cluster/errors.py, roles, phases and transports from the words of the design; never a request, a client or a prompt.
"""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram


# Latencies from a memory copy on one host to a long generation.
_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def _counter(text: str, *labels: str) -> Metric:
    return Metric(Kind.COUNTER, text, labels)


def _gauge(text: str, *labels: str) -> Metric:
    return Metric(Kind.GAUGE, text, labels)


def _seconds(text: str, *labels: str) -> Metric:
    return Metric(Kind.HISTOGRAM, text, labels, _SECONDS)


def _tokens(text: str, *labels: str) -> Metric:
    return Metric(Kind.HISTOGRAM, text, labels, tuple(float(bound) for bound in _TOKENS))


METRICS: dict[str, Metric] = {
    # router
    "tandem_requests_total": _counter("requests that ended, by outcome: ok, or an error's reason", "outcome"),
    "tandem_requests_live": _gauge("requests being served now"),
    "tandem_requests_waiting_for_large_worker": _gauge("requests that no present worker is large enough to hold"),
    "tandem_requests_refused_total": _counter("requests refused before any work", "reason"),
    "tandem_prompt_tokens_total": _counter("prompt tokens of admitted requests"),
    "tandem_generated_tokens_total": _counter("tokens handed to clients"),
    "tandem_prompt_length_tokens": _tokens("prompt tokens per request"),
    "tandem_output_length_tokens": _tokens("generated tokens per choice"),
    "tandem_ttft_seconds": _seconds("from a request's arrival to its first token handed to the client"),
    "tandem_inter_token_seconds": _seconds("between two tokens of one choice, as handed to the client"),
    "tandem_request_seconds": _seconds("from a request's arrival to its last token"),
    "tandem_phase_seconds": _seconds("parts of a request's life; they sum to its wall time", "phase"),
    "tandem_retries_total": _counter("legs of a request that were tried again", "leg", "reason"),
    "tandem_false_suspicions_total": _counter(
        "workers that did not answer in time, and did before they were lost", "role"
    ),
    "tandem_hedges_total": _counter("second attempts beside that of a worker that did not answer", "leg", "outcome"),
    "tandem_tickets_reissued_total": _counter(
        "prefills whose ticket went to another decode worker, by what became of the one before", "leg", "reason"
    ),
    "tandem_local_prefills_total": _counter("prompts that were prefilled on a decode worker", "reason"),
    "tandem_pair_breaker_state": _gauge(
        "pairs of workers that are not used, or on trial, for failed hand-offs", "state"
    ),
    "tandem_pair_breaker_openings_total": _counter("times that a pair of workers was left alone for a while", "reason"),
    "tandem_migrations_total": _counter("sequences that were to move to another decode worker", "outcome", "reason"),
    "tandem_malformed_messages_total": _counter(
        "messages of workers that were refused: a field was out of its bounds", "message"
    ),
    "tandem_stale_messages_total": _counter("messages of an attempt that is no longer current; dropped"),
    "tandem_buffered_tokens": _gauge("tokens waiting for clients to read them"),
    "tandem_members": _gauge("members of the cluster, as this router sees it", "role", "state"),
    "tandem_prefix_index_blocks": _gauge("blocks that prefill workers say they have cached"),
    "tandem_registry_age_seconds": _gauge("since the registry was last read"),
    "tandem_stalled_clients_total": _counter("clients given up that took nothing of their answer", "surface"),
    "tandem_http_connections_refused_total": _counter("HTTP connections past the bound, closed at once"),
    "tandem_http_connections_closed_total": _counter(
        "HTTP connections closed by the router before a whole request: replaced by others, or without a handshake",
        "reason",
    ),
    "tandem_http_responses_total": _counter("HTTP answers", "route", "status"),
    "tandem_canaries_total": _counter(
        "generations of an idle worker's own; in no other figure but its steps and computed tokens", "outcome"
    ),
    "tandem_unhealthy_total": _counter("times that a worker became unhealthy, by what found it", "finder"),
    "tandem_rpc_errors_total": _counter("gRPC calls that this process ended with an error", "reason"),
    # prefill worker
    "tandem_prefill_refused_total": _counter("prefills refused by the worker", "reason"),
    "tandem_prefill_failed_total": _counter("prefills that failed after they were accepted", "reason"),
    "tandem_prefill_queue_seconds": _seconds("from acceptance of a prefill to its first chunk"),
    "tandem_prefill_seconds": _seconds("from a prefill's first chunk to its first token"),
    "tandem_prefix_cached_tokens_total": _counter("tokens whose KV was found here, not computed or moved; decode too"),
    "tandem_prefix_pulls_total": _counter("prefixes asked of other workers: ok, or why they were computed", "outcome"),
    "tandem_prefix_tier_blocks_total": _counter(
        "blocks copied to, between and from the tiers under the pool, or why not", "action", "outcome"
    ),
    # decode worker
    "tandem_decode_starts_total": _counter("decode attempts taken in, by where their KV comes from", "source"),
    "tandem_decode_import_failed_total": _counter("hand-offs that left a decode attempt without its KV", "reason"),
    "tandem_decode_router_gone_total": _counter("routers whose stream broke and did not come back"),
    "tandem_decode_tokens_total": _counter("tokens made by this worker"),
    "tandem_decode_queue_seconds": _seconds("from verified KV to the first step that holds the sequence"),
    # hand-off
    "tandem_handoffs_total": _counter("hand-offs that ended", "side", "transport", "outcome", "reason"),
    "tandem_kv_bytes_total": _counter("KV bytes that were read for hand-offs that ended well", "transport"),
    "tandem_kv_verify_mode": _gauge("1 for the --kv-verify of this worker", "mode"),
    "tandem_kv_blocks_verified_total": _counter("blocks read whose digest was compared"),
    "tandem_kv_blocks_unverified_total": _counter("blocks read and taken as they came, because of --kv-verify"),
    "tandem_digest_failures_total": _counter("blocks whose digest did not match", "transport"),
    "tandem_transport_fallbacks_total": _counter(
        "hand-offs that left a transport for another", "broken", "taken", "reason"
    ),
    "tandem_lease_lapses_total": _counter("leases that ran out before they were settled"),
    "tandem_quarantined_blocks": _gauge("blocks that a dead read might still write to"),
}
