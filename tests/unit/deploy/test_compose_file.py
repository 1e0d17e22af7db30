"""The compose file and what it mounts name what the code has; `make compose-test` runs it."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.serving.tls import load_tls
from cluster.settings.config import RouterConfig, WorkerConfig
from cluster.settings.config_sources import load_config
from tests.package.composed import FOLDER, ComposedMembers, services

_MEMBERS = ("router", "prefill", "decode", "prefill-gpu", "decode-gpu")


def _with_profile(profile: str) -> set[str]:
    return {name for name, service in services(profile).items() if profile in service.get("profiles", [profile])}


def test_each_profile_has_a_router_and_both_pools_or_the_dashboards() -> None:
    shared = {"secrets", "redis", "router"}
    assert _with_profile("cpu") == {*shared, "prefill", "decode"}
    assert _with_profile("gpu") == {*shared, "prefill-gpu", "decode-gpu"}
    assert _with_profile("observability") == {*shared, "prometheus", "grafana"}
    assert _with_profile("mtls") == {*shared, "tls-check", "tls"}


def test_each_service_reads_its_own_secrets_only(tmp_path: Path) -> None:
    members = ComposedMembers(tmp_path, "cpu,observability,mtls")
    members.make_secrets()
    owned = {"redis": {"users.acl", "password"}, "prometheus": {"metrics.key"}, "grafana": {"password"}}
    for name, files in owned.items():
        mounted = {volume.split(":")[0] for volume in members.services[name]["volumes"] if volume[0] not in "./"}
        assert mounted == {name}
        assert f"{name}:/keys/{name}" in members.services["secrets"]["volumes"]
        assert {path.name for path in (members.keys / name).iterdir()} == files
    read = {
        name: {volume.split(":")[0] for volume in service.get("volumes", ())}
        for name, service in members.services.items()
    }
    assert {name for name, volumes in read.items() if "keys" in volumes} == {"secrets", "tls-check", "tls", *_MEMBERS}
    assert members.services["grafana"]["networks"] == ["clients"]


def test_the_profile_mtls_fails_with_the_command_to_run_unless_members_use_tls(tmp_path: Path) -> None:
    members = ComposedMembers(tmp_path, "cpu")
    members.make_secrets()
    assert members.run_script("tls-check") == (
        1,
        "mtls: members do not use TLS yet: the profile must be in COMPOSE_PROFILES, which the container of the secrets"
        " reads; run: COMPOSE_PROFILES=cpu,mtls docker compose up -d --force-recreate\n",
    )
    with_tls = ComposedMembers(tmp_path, "cpu,mtls")
    with_tls.make_secrets()
    assert with_tls.run_script("tls-check") == (0, "")


def test_every_mounted_file_exists() -> None:
    for service in services("cpu").values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (FOLDER / source).exists(), volume


@pytest.mark.parametrize("profiles", ["cpu", "gpu", "cpu,observability,mtls"])
def test_the_settings_of_every_member_are_read_with_the_files_that_the_secrets_container_makes(
    profiles: str, tmp_path: Path
) -> None:
    members = ComposedMembers(tmp_path, profiles)
    members.make_secrets()
    kept = {path: path.read_bytes() for path in members.keys.rglob("*.*") if path.name != "tandem.yaml"}
    for name in _MEMBERS:
        config = load_config(RouterConfig if name == "router" else WorkerConfig, {}, members.environment(name))
        assert f"@{members.host('redis')}:6379" in config.redis and config.model.endswith("demo_model")
        tls = load_tls(config, "10.0.0.7")  # raises if the certificate does not work at an address without a name
        assert (tls is not None) == ("mtls" in profiles)
    members.make_secrets()
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert not list(members.keys.rglob("ca.key"))


def test_prometheus_scrapes_every_member_at_its_port_of_metrics() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert sorted(found["names"]) == sorted(_MEMBERS)
    present = services("cpu")
    assert {name for name, each in present.items() if "TANDEM_CONFIG" in each.get("environment", {})} == {*_MEMBERS}
    assert {present[name]["environment"]["TANDEM_METRICS_PORT"] for name in _MEMBERS} == {str(found["port"])}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_accepts_its_configuration_with_the_files_that_compose_mounts(tmp_path: Path) -> None:
    for volume in services("observability")["prometheus"]["volumes"]:
        source, target, _ = volume.split(":")
        if source.startswith("."):
            text = (FOLDER / source).read_text().replace("/keys/metrics.key", str(tmp_path / "key"))
            (tmp_path / Path(target).name).write_text(text)
    (tmp_path / "key").write_text("k")
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0 and "1 rule files found" in checked.stdout, checked.stdout + checked.stderr
