"""Evaluates the alerts on the metrics of a cluster, by Prometheus' own rule engine. Two scrapes become series: the
increase of a counter between them counts as a minute's increase, and gauges keep the values of the second scrape.
`promtool test rules` then lets enough minutes pass.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.observability.__main__ import FOLDER
from deploy.observability.alerts import ALERTS
from tests.system.local_cluster import LocalCluster

_MINUTES = 25
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")

Scrapes = Mapping[str, str]  # text by member


async def scrapes_of(cluster: LocalCluster) -> dict[str, str]:
    async with httpx.AsyncClient(timeout=60) as http:
        return {
            name: (await http.get(f"http://{member.ready['metrics']}/metrics")).text
            for name, member in cluster.members.items()
        }


def fires(alert: str, before: Scrapes, now: Scrapes, folder: Path, **labels: str) -> bool:
    """Return whether exactly one alert with this name and these labels fires. The instance is the member's name."""
    [expr] = [each.expr for each in ALERTS if each.name == alert]
    names = set(re.findall(r"\btandem_\w+", expr))
    labels = {"alertname": alert, "alertstate": "firing"} | labels
    chosen = ",".join(f'{name}="{value}"' for name, value in labels.items())
    test = {
        "rule_files": [str(FOLDER / "rules.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": _series(names, before, now),
                "promql_expr_test": [
                    {
                        "expr": f"count(ALERTS{{{chosen}}})",
                        "eval_time": f"{_MINUTES}m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                ],
            }
        ],
    }
    file = folder / "alert.yaml"
    file.write_text(yaml.safe_dump(test))
    return subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, check=False).returncode == 0


def _series(names: set[str], before: Scrapes, now: Scrapes) -> list[dict[str, str]]:
    found = []
    for member, text in now.items():
        earlier = _samples(names, before.get(member, ""))
        for (name, labels), (value, grows) in _samples(names, text).items():
            shown = ",".join(f'{label}="{of}"' for label, of in (*labels, ("instance", member)))
            gained = value - earlier.get((name, labels), (0.0, True))[0]
            values = f"0+{gained:g}x{_MINUTES + 5}" if grows else f"{value:g}x{_MINUTES + 5}"
            found.append({"series": f"{name}{{{shown}}}", "values": values})
    return found


def _samples(names: set[str], text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], tuple[float, bool]]:
    """Return the values of these series, and whether they are those of a counter."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): (sample.value, family.type != "gauge")
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in names
    }
