"""Writes dashboard.json, rules.yaml and rules_test.yaml beside this file: `python -m deploy.observability`.

These files for Grafana and Prometheus are made from the lists of panels and alerts.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from deploy.observability.alerts import ALERTS, Alert
from deploy.observability.panels import ROWS, Panel

FOLDER = Path(__file__).parent
_RUNBOOKS = "docs/runbooks.md"
_WIDTH, _HEIGHT, _PER_LINE = 6, 7, 4
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_TEST_MINUTES = 25  # after which each example has raised its alert


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
