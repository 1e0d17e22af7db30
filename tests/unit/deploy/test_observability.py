"""The dashboard and the alerts: their metrics exist, each alert has a runbook, and its example raises it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster.observe.metrics import METRICS, Kind
from deploy.observability.__main__ import FOLDER, expressions, files
from deploy.observability.alerts import ALERTS

_RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks.md"
_TARGET_LABELS = {"instance", "le"}  # of Prometheus itself


def test_the_committed_files_are_those_of_the_lists() -> None:
    assert {name: (FOLDER / name).read_text() for name in files()} == files()


def _base(name: str) -> str:
    base = re.sub(r"_(?:bucket|sum|count)$", "", name)
    return base if base in METRICS and METRICS[base].kind is Kind.HISTOGRAM else name


@pytest.mark.parametrize("expression", expressions())
def test_each_metric_and_label_of_an_expression_is_declared(expression: str) -> None:
    names = {_base(name) for name in re.findall(r"\b(?:tandem|process)_\w+", expression)}
    own = {name for name in names if not name.startswith("process_")}
    assert names and own <= set(METRICS)
    labels = {label for name in own for label in METRICS[name].labels} | _TARGET_LABELS
    grouped = [
        label.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in group.split(",")
    ]
    assert set(grouped) <= labels
    for name, chosen in re.findall(r"(tandem_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)[=!]", chosen)) <= set(METRICS[_base(name)].labels)


def test_each_alert_has_a_runbook_and_no_other_has_one() -> None:
    assert re.findall(r"^## (.*)$", _RUNBOOKS.read_text(), re.MULTILINE) == [alert.name for alert in ALERTS]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)")
def test_the_example_of_each_alert_raises_it_and_no_other_one() -> None:
    subprocess.run(["promtool", "check", "rules", "rules.yaml"], cwd=FOLDER, check=True)
    subprocess.run(["promtool", "test", "rules", "rules_test.yaml"], cwd=FOLDER, check=True)
