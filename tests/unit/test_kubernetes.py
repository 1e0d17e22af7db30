"""The Kubernetes base uses the flags of the processes, and the committed render equals the output of kustomize."""

import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.observe.health import LIVENESS, READINESS
from cluster.settings.config import RouterConfig, WorkerConfig
from cluster.settings.config_sources import add_flags, load_config

_KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
_CONFIGS: dict[str, type[RouterConfig] | type[WorkerConfig]] = {
    "router": RouterConfig,
    "prefill_worker": WorkerConfig,
    "decode_worker": WorkerConfig,
}


def _rendered() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((_KUBERNETES / "rendered.yaml").read_text()))


def _deployments() -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in _rendered() if item["kind"] == "Deployment"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_committed_render_equals_the_output_of_kustomize() -> None:
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(_KUBERNETES / "base")], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert list(yaml.safe_load_all(rendered)) == _rendered()


def test_every_object_validates_strictly() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an unknown kind only warns
        for item in _rendered():
            kubernetes_validate.validate(item, "1.30", strict=True)


def test_a_misspelt_field_is_caught() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    broken = next(iter(_deployments().values()))
    broken["spec"]["replicaz"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.30", strict=True)


def test_each_pool_is_one_scalable_object() -> None:
    modules = [
        item["spec"]["template"]["spec"]["containers"][0].get("args", ["", ""])[1] for item in _deployments().values()
    ]
    assert sorted(set(modules) & set(_CONFIGS)) == sorted(_CONFIGS)
    assert all(modules.count(module) == 1 for module in _CONFIGS)


def container_port_of_scrapes(module: str) -> int:
    """Return the port that the pod's annotations name to Prometheus."""
    templates = [item["spec"]["template"] for item in _deployments().values()]
    pod = next(each for each in templates if each["spec"]["containers"][0].get("args", ["", ""])[1] == module)
    assert pod["metadata"]["annotations"]["prometheus.io/scrape"] == "true"
    return int(pod["metadata"]["annotations"]["prometheus.io/port"])


@pytest.mark.parametrize("module", sorted(_CONFIGS))
def test_every_flag_and_variable_parses_with_the_real_configuration(module: str) -> None:
    import argparse

    container = next(
        item["spec"]["template"]["spec"]["containers"][0]
        for item in _deployments().values()
        if item["spec"]["template"]["spec"]["containers"][0].get("args", ["", ""])[1] == module
    )
    config_map = next(item["data"] for item in _rendered() if item["kind"] == "ConfigMap")
    environment = config_map | {item["name"]: item.get("value", "10.0.0.1") for item in container["env"]}
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_flags(parser, _CONFIGS[module])

    config = load_config(_CONFIGS[module], vars(parser.parse_args(container["args"][2:])), environment)

    known = {f"TANDEM_{name.upper()}" for name in config.__dataclass_fields__}
    assert set(environment) <= known, "a variable that no setting reads"
    assert config.redis.startswith("redis://")
    ports = {item["containerPort"] for item in container["ports"]}
    assert {config.port, config.health_port, config.metrics_port} <= ports
    assert container_port_of_scrapes(module) == config.metrics_port


def test_pods_have_longer_to_end_than_a_drain_takes() -> None:
    config_map = next(item["data"] for item in _rendered() if item["kind"] == "ConfigMap")
    grace_s = float(config_map["TANDEM_DRAIN_GRACE_S"])
    for name, item in _deployments().items():
        if re.search("redis", name):
            continue
        assert item["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > grace_s


def test_every_member_is_restarted_by_liveness_and_routed_to_by_readiness() -> None:
    """The probes use the port that needs neither the event loop nor a certificate."""
    for name, item in _deployments().items():
        if re.search("redis", name):
            continue
        container = item["spec"]["template"]["spec"]["containers"][0]
        health_port = int(container["args"][container["args"].index("--health-port") + 1])
        assert container["livenessProbe"]["grpc"] == {"port": health_port, "service": LIVENESS}
        assert container["readinessProbe"]["grpc"] == {"port": health_port, "service": READINESS}
