"""The compose file and what it mounts name what the code has; `make compose-test` runs it."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.settings.config import RouterConfig, WorkerConfig

_FOLDER = Path(__file__).parents[2] / "deploy" / "compose"
_OF_COMMANDS = {"TANDEM_ADDRESS", "TANDEM_CONFIG"}


def _services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((_FOLDER / "compose.yaml").read_text())["services"])


def _with_profile(profile: str) -> set[str]:
    return {name for name, service in _services().items() if profile in service.get("profiles", [profile])}


def test_each_profile_has_a_router_and_both_pools_or_the_dashboards() -> None:
    shared = {"secrets", "redis", "router"}
    assert _with_profile("cpu") == {*shared, "prefill", "decode"}
    assert _with_profile("gpu") == {*shared, "prefill-gpu", "decode-gpu"}
    assert _with_profile("observability") == {*shared, "prometheus", "grafana"}


def test_every_variable_of_a_member_is_a_setting_and_every_mounted_file_exists() -> None:
    for name, service in _services().items():
        config_type = RouterConfig if name == "router" else WorkerConfig
        known = {f"TANDEM_{field.upper()}" for field in config_type.__dataclass_fields__} | _OF_COMMANDS
        given = {variable for variable in service.get("environment", {}) if variable.startswith("TANDEM_")}
        assert given <= known, name
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).partition(":")[0]
            assert not source.startswith(".") or (_FOLDER / source).exists(), volume


def test_prometheus_scrapes_every_member_at_its_port_of_metrics() -> None:
    (job,) = yaml.safe_load((_FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    members = {name for name, each in _services().items() if "TANDEM_METRICS_PORT" in each.get("environment", {})}
    assert set(found["names"]) == members
    assert {_services()[name]["environment"]["TANDEM_METRICS_PORT"] for name in members} == {str(found["port"])}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_accepts_its_configuration_with_the_files_that_compose_mounts(tmp_path: Path) -> None:
    for volume in _services()["prometheus"]["volumes"]:
        source, target, _ = volume.split(":")
        if source.startswith("."):
            text = (_FOLDER / source).read_text().replace("/keys/metrics", str(tmp_path / "key"))
            (tmp_path / Path(target).name).write_text(text)
    (tmp_path / "key").write_text("k")
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0 and "1 rule files found" in checked.stdout, checked.stdout + checked.stderr
