"""The panels of the dashboard, row by row: where a request's time goes, the workers, the hand-offs, the routers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # of Grafana: s, short, percentunit, Bps, bytes
    queries: tuple[tuple[str, str], ...]  # PromQL, and the legend


def _quantiles(metric: str, *by: str) -> tuple[tuple[str, str], ...]:
    legend = "".join(f" {{{{{label}}}}}" for label in by)
    group = ", ".join(("le", *by))
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({group}) (rate({metric}_bucket[$__rate_interval])))",
            f"p{q * 100:g}{legend}",
        )
        for q in (0.5, 0.95, 0.99)
    )


def _rate(metric: str, *by: str) -> tuple[tuple[str, str], ...]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return ((f"sum by ({', '.join(by)}) (rate({metric}[$__rate_interval]))", legend),)


def _gauge(metric: str, *by: str) -> tuple[tuple[str, str], ...]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return ((f"sum by ({', '.join(by)}) ({metric})", legend),)


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests",
        (
            Panel("Requests by outcome", "reqps", _rate("tandem_requests_total", "outcome")),
            Panel("Time to first token", "s", _quantiles("tandem_ttft_seconds")),
            Panel("Time between tokens", "s", _quantiles("tandem_inter_token_seconds")),
            Panel("Mean time by phase", "s", _rate("tandem_phase_seconds_sum", "phase")),
            Panel("Missed targets by latency and phase", "reqps", _rate("tandem_slo_misses_total", "latency", "phase")),
            Panel("Refusals", "reqps", _rate("tandem_requests_refused_total", "reason", "service_class")),
            Panel("Retries", "reqps", _rate("tandem_retries_total", "leg", "reason")),
            Panel("Prefills on decode workers", "reqps", _rate("tandem_local_prefills_total", "reason")),
        ),
    ),
    (
        "Workers",
        (
            Panel("Sequences", "short", _gauge("tandem_sequences", "instance", "state")),
            Panel("KV pool in use", "percentunit", _gauge("tandem_kv_cache_usage_ratio", "instance")),
            Panel("KV blocks by state", "short", _gauge("tandem_kv_blocks", "state")),
            Panel("Decode and prefill steps", "s", _quantiles("tandem_step_seconds", "instance", "work")),
            Panel("Time of steps by part", "percentunit", _rate("tandem_step_part_seconds_total", "instance", "part")),
            Panel(
                "Steps as a multiple of other workers'",
                "short",
                (("max by (worker, leg) (tandem_worker_slowdown_ratio)", "{{worker}} {{leg}}"),),
            ),
            Panel("Prefill queue", "s", _quantiles("tandem_prefill_queue_seconds")),
            Panel("Decode queue", "s", _quantiles("tandem_decode_queue_seconds")),
            Panel("Computed tokens", "short", _rate("tandem_computed_tokens_total", "instance")),
            Panel("Preempted sequences", "short", _rate("tandem_preemptions_total", "instance")),
            Panel("Cached prompt tokens", "short", _rate("tandem_prefix_cached_tokens_total", "instance")),
        ),
    ),
    (
        "Hand-offs",
        (
            Panel("Outcomes", "reqps", _rate("tandem_handoffs_total", "side", "transport", "outcome", "reason")),
            Panel("Exposed time", "s", _quantiles("tandem_handoff_exposed_seconds", "transport")),
            Panel("Bytes", "Bps", _rate("tandem_kv_bytes_total", "transport")),
            Panel(
                "Bandwidth",
                "Bps",
                (
                    (
                        "sum by (instance, transport) (rate(tandem_kv_bytes_total[$__rate_interval])) / sum by"
                        " (instance, transport) (rate(tandem_kv_read_seconds_total[$__rate_interval]))",
                        "{{instance}} {{transport}}",
                    ),
                ),
            ),
            Panel("Fallbacks", "reqps", _rate("tandem_transport_fallbacks_total", "broken", "taken", "reason")),
            Panel("Open breakers", "short", _gauge("tandem_pair_breaker_state", "instance", "state")),
        ),
    ),
    (
        "Processes",
        (
            Panel("Members", "short", _gauge("tandem_members", "role", "state")),
            Panel("Age of the membership", "s", _gauge("tandem_registry_age_seconds", "instance")),
            Panel(
                "Router CPU per request",
                "s",
                (
                    (
                        "sum by (instance) (rate(process_cpu_seconds_total[$__rate_interval])) / sum by (instance)"
                        " (rate(tandem_requests_total[$__rate_interval]))",
                        "{{instance}}",
                    ),
                ),
            ),
            Panel("Event-loop lag", "s", _quantiles("tandem_event_loop_lag_seconds", "instance")),
            Panel("Memory", "bytes", _gauge("process_resident_memory_bytes", "instance")),
            Panel("Clock skew", "s", _gauge("tandem_clock_skew_seconds", "instance")),
        ),
    ),
)
