"""Writes dashboard.json, rules.yaml and rules_test.yaml beside this file: `python -m deploy.observability`.

These files for Grafana and Prometheus are made from the alerts (`alerts.py`) and from the panels of the dashboard, row
by row: where a request's time goes, the workers, the hand-offs, the routers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.observability.alerts import ALERTS, Alert

FOLDER = Path(__file__).parent
_RUNBOOKS = "docs/runbooks.md"
_WIDTH, _HEIGHT, _PER_LINE = 6, 7, 4
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_TEST_MINUTES = 25  # after which each example has raised its alert


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
            Panel(
                "Reads of KV as a multiple of what is usual",
                "short",
                (
                    (
                        "max by (importer, exporter, transport) (tandem_link_slowdown_ratio)",
                        "{{importer}} from {{exporter}} {{transport}}",
                    ),
                ),
            ),
            Panel("Fallbacks", "reqps", _rate("tandem_transport_fallbacks_total", "broken", "taken", "reason")),
            Panel("Open breakers", "short", _gauge("tandem_pair_breaker_state", "exporter", "importer")),
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


def files() -> dict[str, str]:
    """Return the text of each file by name."""
    head = "# Written by python -m deploy.observability\n"
    return {
        "dashboard.json": json.dumps(_dashboard(), indent=1) + "\n",
        "rules.yaml": head + yaml.safe_dump(_rules(), sort_keys=False, width=120),
        "rules_test.yaml": head + yaml.safe_dump(_tests(), sort_keys=False, width=120),
    }


def expressions() -> list[str]:
    """Return every PromQL expression of the dashboard and the alerts."""
    queries = [query for _, panels in ROWS for panel in panels for query, _ in panel.queries]
    return queries + [alert.expr for alert in ALERTS]


def _rules() -> dict[str, Any]:
    return {"groups": [{"name": "tandem", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": f"{alert.for_minutes}m",
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook": f"{_RUNBOOKS}#{alert.name.lower()}"},
    }


def _tests() -> dict[str, Any]:
    return {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series, "values": values} for series, values in alert.series],
                "promql_expr_test": [
                    # Exactly one alert fires, and it is this one.
                    {"expr": expr, "eval_time": f"{_TEST_MINUTES}m", "exp_samples": [{"labels": "{}", "value": 1}]}
                    for expr in (f"count(ALERTS{{{_labels(alert)}}})", 'count(ALERTS{alertstate="firing"})')
                ],
            }
            for alert in ALERTS
        ],
    }


def _labels(alert: Alert) -> str:
    labels = {"alertname": alert.name, "alertstate": "firing", "severity": alert.severity, **dict(alert.labels)}
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def _dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": _place(0, y, 24, 1)})
        y += 1
        for number, panel in enumerate(row):
            x = number % _PER_LINE * _WIDTH
            panels.append(_panel(panel, len(panels) + 1, _place(x, y + number // _PER_LINE * _HEIGHT, _WIDTH, _HEIGHT)))
        y += -(-len(row) // _PER_LINE) * _HEIGHT
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": "tandem",
        "title": "Tandem",
        "tags": ["tandem"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def main() -> None:
    for name, text in files().items():
        (FOLDER / name).write_text(text)
        print(f"wrote deploy/observability/{name}")


if __name__ == "__main__":
    main()
