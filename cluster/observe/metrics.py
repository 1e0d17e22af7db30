"""The table of all metrics: name, kind, help text, labels and bounds, by the processes that publish them.

Names follow Prometheus: base units, and `_total` for counters. Labels are bounded: reasons come from cluster/errors.py;
roles, phases and transports are fixed sets; tenants are those of the API keys. A request, a client or a prompt is never
a label. docs/observe.md lists every metric; tests compare the page, this table and the scrape of a cluster. The process
metrics of Prometheus' own library (process_cpu_seconds_total and others) come in addition.
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


EVERY_PROCESS: dict[str, Metric] = {
    "tandem_build_info": _gauge("1; the labels describe the process", "version", "python", "role", "member", "model"),
    "tandem_clock_skew_seconds": _gauge("this machine's wall clock minus that of Redis, at the last renewal"),
    "tandem_refused_members_total": _counter(
        "callers, registrations and reports refused because no member of this cluster proved or signed them", "reason"
    ),
    "tandem_insecure_ports": _gauge("1: --insecure lets other hosts reach ports of this process without a key"),
    "tandem_rpc_errors_total": _counter("gRPC calls that this process ended with an error", "reason"),
    "tandem_event_loop_lag_seconds": _seconds(
        "delay of a timer of this process's event loop, measured about once a second"
    ),
}

ROUTER: dict[str, Metric] = {
    "tandem_requests_total": _counter("requests that ended, by outcome: ok, or an error's reason", "outcome"),
    "tandem_tenant_usage_total": _counter(
        "usage of tenants, by kind: requests, prompt_tokens, cached_tokens, output_tokens", "tenant", "kind"
    ),
    "tandem_limits_reached_total": _counter("requests refused by a limit of their API key", "tenant", "limit"),
    "tandem_requests_live": _gauge("requests in progress"),
    "tandem_requests_waiting_for_large_worker": _gauge("requests waiting because no present worker is large enough"),
    "tandem_requests_refused_total": _counter("requests refused before any work", "reason", "service_class"),
    "tandem_prompt_tokens_total": _counter("prompt tokens of admitted requests"),
    "tandem_generated_tokens_total": _counter("tokens delivered to clients"),
    "tandem_prompt_length_tokens": _tokens("prompt tokens per request"),
    "tandem_output_length_tokens": _tokens("generated tokens per choice"),
    "tandem_ttft_seconds": _seconds(
        "time from a request's arrival until its first token is delivered; none if it is resumed with tokens"
    ),
    "tandem_inter_token_seconds": _seconds("time between the deliveries of two tokens of one choice"),
    "tandem_request_seconds": _seconds("time from a request's arrival to its last token"),
    "tandem_phase_seconds": _seconds("time in each phase of a request; the phases sum to its wall time", "phase"),
    "tandem_slo_seconds": _gauge("latency target of this router; 0: none", "latency"),
    "tandem_slo_misses_total": _counter(
        "requests that missed a latency target, their own or the router's, by the phase that took longest: before the"
        " first token for ttft, after it for itl",
        "latency",
        "phase",
    ),
    "tandem_cached_prompt_tokens_total": _counter("prompt tokens of ended requests whose KV was in a prefix cache"),
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
        "difference between predicted and real mean time between the tokens of a request with at least 8, as a "
        "share of the real one"
    ),
    "tandem_placement_decisions_total": _counter("choices of workers, by the criterion that decided", "reason"),
    "tandem_disaggregation_ttft_effect_seconds": _gauge(
        "time to first token at pairs of workers minus the same at workers alone; basis: measured from explored"
        " requests, or predicted; bound: mean, low or high (tandem status explains them)",
        "basis",
        "bound",
    ),
    "tandem_disaggregation_trials": _gauge(
        "requests from which the effect of disaggregation on the time to first token is measured or predicted", "basis"
    ),
    "tandem_local_prefills_total": _counter("prompts prefilled on a decode worker", "reason"),
    "tandem_pair_breaker_state": _gauge(
        "1 for each of at most 64 pairs of workers whose circuit breaker is open or half open, after failed hand-offs",
        "exporter",
        "importer",
        "state",
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
    "tandem_worker_slowdown_ratio": _gauge(
        "measured steps of a worker, corrected for their work, as a multiple of those of the other workers; it has no"
        " series before both have measured enough",
        "worker",
        "leg",
    ),
    "tandem_link_slowdown_ratio": _gauge(
        "time of recent KV reads of one worker from another as a multiple of that of other links by this transport, or,"
        " with fewer than two others, of the link's own fastest reads; of at most 64 links, the slowest ones",
        "importer",
        "exporter",
        "transport",
    ),
    "tandem_members": _gauge("members of the cluster, as this router sees it", "role", "state"),
    "tandem_member_changes_total": _counter(
        "workers that joined, came back as a new process, or left, as this router saw it", "role", "change"
    ),
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
}

WORKER: dict[str, Metric] = {
    "tandem_service_time_relative_error": _gauge(
        "median error of the predicted seconds of this worker's recent steps, as a share of the measured ones", "model"
    ),
    "tandem_canaries_total": _counter(
        "test generations of idle workers; counted elsewhere only as steps and computed tokens", "outcome"
    ),
    "tandem_unhealthy_total": _counter("times that a worker became unhealthy, by the check that found it", "finder"),
    "tandem_closed_member_connections_total": _counter(
        "connections of members that this worker closed, because they sent malformed frames or read no answers",
        "reason",
    ),
    "tandem_kv_blocks": _gauge("blocks of the KV pool by state, about once a second", "state"),
    "tandem_kv_cache_usage_ratio": _gauge("share of the KV pool's blocks that are neither free nor cached"),
    "tandem_queued_prompt_seconds": _gauge(
        "predicted seconds to compute the prompts that routers have sent to this worker"
    ),
    "tandem_predicted_itl_seconds": _gauge("predicted seconds of a step that decodes all sequences of this worker"),
    "tandem_sequences": _gauge(
        "sequences of this worker: running, waiting for free blocks, or frozen while they migrate", "state"
    ),
    "tandem_step_seconds": _seconds("time of a step, by its work: prefill, decode, or mixed", "work"),
    "tandem_step_part_seconds_total": _counter(
        "time of steps by part: plan, run (pack, forward and draw), and complete; the parts sum to the steps", "part"
    ),
    "tandem_handoffs_waiting": _gauge("hand-offs that wait for room for their KV"),
    "tandem_swap_slots_used": _gauge("blocks of preempted sequences in the swap space of the host"),
    "tandem_computed_tokens_total": _counter("tokens computed in steps, those of prompts included"),
    "tandem_preemptions_total": _counter("sequences that were preempted by others and continued later"),
    "tandem_evicted_blocks_total": _counter("cached blocks that were given to other sequences"),
    "tandem_swaps_total": _counter("preempted sequences by the fate of their KV", "action"),
    "tandem_draft_tokens_total": _counter("draft tokens of speculation by outcome: all, or accepted", "outcome"),
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
    "tandem_prefix_tier_used_blocks": _gauge("cached blocks in a tier: host or disk", "tier"),
    "tandem_decode_starts_total": _counter("accepted decode attempts, by the source of their KV", "source"),
    "tandem_decode_import_failed_total": _counter("decode attempts whose KV import failed", "reason"),
    "tandem_decode_router_gone_total": _counter(
        "routers that were lost, so that their sequences were cancelled", "reason"
    ),
    "tandem_decode_tokens_total": _counter("tokens generated by this worker"),
    "tandem_decode_queue_seconds": _seconds(
        "time that a sequence waits for room for its KV, and then for its first step"
    ),
    "tandem_handoffs_total": _counter("hand-offs that ended", "side", "transport", "outcome", "reason"),
    "tandem_kv_bytes_total": _counter("KV bytes read by successful hand-offs", "transport"),
    "tandem_kv_read_seconds_total": _counter(
        "time of the reads of hand-offs; with tandem_kv_bytes_total it gives the bandwidth", "transport"
    ),
    "tandem_handoff_seconds": _seconds("time from the start of a successful hand-off to its end", "transport"),
    "tandem_handoff_exposed_seconds": _seconds(
        "the part of a hand-off after the end of the prefill, for which the client waits", "transport"
    ),
    "tandem_kv_verify_mode": _gauge("1 for the mode that --kv-verify sets on this worker", "mode"),
    "tandem_kv_blocks_verified_total": _counter("blocks read and compared with their digest"),
    "tandem_kv_blocks_unverified_total": _counter(
        "blocks read and not compared with their digest, because of --kv-verify"
    ),
    "tandem_digest_failures_total": _counter("blocks whose digest did not match", "transport"),
    "tandem_transport_fallbacks_total": _counter(
        "hand-offs that fell back from one transport to another", "broken", "taken", "reason"
    ),
    "tandem_refused_kv_connections_total": _counter(
        "KV connections refused because the peer did not prove that it is the expected member of this cluster",
        "transport",
        "reason",
    ),
    "tandem_lease_lapses_total": _counter("leases that expired before they were settled"),
    "tandem_quarantined_blocks": _gauge("blocks to which a timed-out read may still write"),
}

# Aliases for dashboards and gateways that know vLLM's names (--metric-aliases vllm).
VLLM_NAMES: dict[str, Metric] = {
    "vllm:num_requests_running": _gauge("the same as tandem_sequences, running", "model_name"),
    "vllm:num_requests_waiting": _gauge("the same as tandem_sequences, waiting", "model_name"),
    "vllm:kv_cache_usage_perc": _gauge("the same as tandem_kv_cache_usage_ratio", "model_name"),
}

METRICS: dict[str, Metric] = EVERY_PROCESS | ROUTER | WORKER | VLLM_NAMES
