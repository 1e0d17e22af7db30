"""The Kubernetes base uses the flags of the processes, and the committed render equals the output of kustomize."""

import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.command import _parser
from cli.connection import find_address
from cluster.observe.health import LIVENESS, READINESS
from cluster.registry.redis_server import RIGHTS
from cluster.settings.config import RouterConfig, WorkerConfig
from cluster.settings.config_sources import add_flags, load_config

_KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
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


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_overlay_for_gpus_validates_and_gives_each_worker_one() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    command = ["kubectl", "kustomize", str(_KUBERNETES / "nvidia")]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    gpus: dict[str, object] = {}
    for item in yaml.safe_load_all(rendered):
        kubernetes_validate.validate(item, "1.30", strict=True)
        if item["kind"] == "Deployment":
            (container,) = item["spec"]["template"]["spec"]["containers"]
            gpus[container["image"]] = container["resources"]["limits"].get("nvidia.com/gpu")
    assert gpus == {"tandem-worker:cuda": 1, "tandem-router:latest": None, "redis:7-bookworm": None}


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
    secret = {"tandem-redis": "redis://tandem:P@tandem-redis:6379/0"}  # as the command in kustomization.yaml makes it
    environment = config_map | {
        item["name"]: item["value"] if "value" in item else secret.get(_secret_of(item), "10.0.0.1")
        for item in container["env"]
    }
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_flags(parser, _CONFIGS[module])

    config = load_config(_CONFIGS[module], vars(parser.parse_args(container["args"][2:])), environment)

    known = {f"TANDEM_{name.upper()}" for name in config.__dataclass_fields__}
    of_commands = environment.pop("TANDEM_ADDRESS", "")
    assert of_commands == ("127.0.0.1:50051" if module == "router" else "")
    assert set(environment) <= known, "a variable that no setting reads"
    assert config.redis == secret["tandem-redis"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    files = [value for name, value in environment.items() if name.endswith("_KEY_FILE")]
    assert all(str(Path(file).parent) in mounts for file in files)
    ports = {item["containerPort"] for item in container["ports"]}
    assert {config.port, config.health_port, config.metrics_port} <= ports
    assert container_port_of_scrapes(module) == config.metrics_port


def _secret_of(variable: dict[str, Any]) -> str:
    """Return the name of the secret whose `url` a container's variable has; empty: it is no secret."""
    reference = variable["valueFrom"].get("secretKeyRef", {"name": "", "key": "url"})
    assert reference["key"] == "url"
    return str(reference["name"])


def test_redis_has_the_users_of_a_secret_and_members_no_more_rights_than_they_need() -> None:
    (container,) = _deployments()["tandem-redis"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-2:] == ["--aclfile", "/users/users.acl"]
    for page in (
        _KUBERNETES / "base" / "kustomization.yaml",
        _KUBERNETES.parents[1] / "docs" / "operate" / "install.md",
    ):
        text = page.read_text()
        assert f'user tandem on >$P resetchannels ~{{tandem}}:* &{{tandem}}:* {" ".join(RIGHTS)}"' in text
        assert 'users.acl="user default off' in text


def test_pods_have_longer_to_end_than_a_drain_takes() -> None:
    config_map = next(item["data"] for item in _rendered() if item["kind"] == "ConfigMap")
    grace_s = float(config_map["TANDEM_DRAIN_GRACE_S"])
    for name, item in _deployments().items():
        if re.search("redis", name):
            continue
        pod = item["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > _pre_stop_s(pod) + grace_s


def _pre_stop_s(pod: dict[str, Any]) -> float:
    hook = pod["containers"][0].get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})
    program, seconds = hook["exec"]["command"]
    assert program == "sleep"
    return float(seconds)


def test_a_router_refuses_requests_only_after_its_endpoint_is_gone() -> None:
    """Clients find routers by a Service, and routers find workers by the registry."""
    waits = {name: _pre_stop_s(item["spec"]["template"]["spec"]) > 0 for name, item in _deployments().items()}
    assert waits == {"tandem-router": True, "tandem-prefill": False, "tandem-decode": False, "tandem-redis": False}


def test_an_eviction_takes_one_member_of_a_pool_at_a_time_and_pools_spread_over_nodes() -> None:
    budgets = {item["metadata"]["name"]: item["spec"] for item in _rendered() if item["kind"] == "PodDisruptionBudget"}
    members = {name: item["spec"] for name, item in _deployments().items() if name != "tandem-redis"}
    assert set(budgets) == set(members)
    for name, spec in members.items():
        assert budgets[name] == {"maxUnavailable": 1, "selector": spec["selector"]}
        (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"] == spec["selector"]


def test_network_policies_name_ports_that_their_pods_have_and_open_workers_to_members_only() -> None:
    policies = {item["metadata"]["name"]: item["spec"] for item in _rendered() if item["kind"] == "NetworkPolicy"}
    covered: dict[str, str] = {}
    for policy, spec in policies.items():
        for pod in _selected(spec["podSelector"]):
            covered[pod] = policy
            (container,) = _deployments()[pod]["spec"]["template"]["spec"]["containers"]
            named = {port["port"] for rule in spec["ingress"] for port in rule.get("ports", [])}
            assert named <= {port["name"] for port in container["ports"]}
    assert covered == {
        "tandem-redis": "tandem-redis",
        "tandem-router": "tandem-router",
        "tandem-prefill": "tandem-workers",
        "tandem-decode": "tandem-workers",
    }
    open_to_all = [rule for rule in policies["tandem-workers"]["ingress"] if "from" not in rule]
    assert [rule["ports"] for rule in open_to_all] == [[{"port": "metrics"}]]


def _selected(selector: dict[str, Any]) -> list[str]:
    """Return the Deployments whose pods the selector of a policy names."""
    names = [value for each in selector.get("matchExpressions", []) for value in each["values"]]
    return names or [selector["matchLabels"]["app.kubernetes.io/name"]]


def test_every_member_is_restarted_by_liveness_and_routed_to_by_readiness() -> None:
    """The probes use the port that needs neither the event loop nor a certificate."""
    for name, item in _deployments().items():
        if re.search("redis", name):
            continue
        container = item["spec"]["template"]["spec"]["containers"][0]
        health_port = int(container["args"][container["args"].index("--health-port") + 1])
        assert container["livenessProbe"]["grpc"] == {"port": health_port, "service": LIVENESS}
        assert container["readinessProbe"]["grpc"] == {"port": health_port, "service": READINESS}


def test_operators_commands_in_a_routers_pod_find_the_router_and_the_admin_key() -> None:
    """`kubectl exec deploy/tandem-router -- tandem scale ...` has the variables and files of this container."""
    (container,) = _deployments()["tandem-router"]["spec"]["template"]["spec"]["containers"]
    variables = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    assert find_address(None, variables) == f"127.0.0.1:{_port(container, 'grpc')}"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    key = Path(variables["TANDEM_ADMIN_KEY_FILE"])
    assert (mounts[str(key.parent)], key.name) == ("api-keys", "admin.key")


def _port(container: dict[str, Any], name: str) -> int:
    return next(int(port["containerPort"]) for port in container["ports"] if port["name"] == name)


def test_the_flags_of_kuberay_parse_and_its_deployment_validates() -> None:
    import argparse

    from cli.verbs.clusters import up
    from deploy.ray.options import ray_options

    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    text = (_KUBERNETES.parent / "ray" / "kuberay.yaml").read_text()
    cluster, deployment = yaml.safe_load_all(text)
    kubernetes_validate.validate(deployment, "1.30", strict=True)
    container = deployment["spec"]["template"]["spec"]["containers"][-1]
    verb, *flags = container["args"]
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    up.add_arguments(parser)
    arguments = parser.parse_args(flags)
    options = ray_options(arguments)
    head = f"{cluster['metadata']['name']}-head-svc:6379"
    assert (container["command"], verb) == (["tandem"], "up")
    assert options is not None and (options.address, options.keep_at_stop) == (head, True)
    assert {arguments.port, arguments.grpc_port} == {port["containerPort"] for port in container["ports"]}
    (told,) = re.findall(r"# +kubectl -n tandem exec deploy/(\S+) -c (\S+) -- tandem (.*)", text)
    assert told[:2] == (deployment["metadata"]["name"], container["name"]), "the first container has no keys"
    assert _parser()[0].parse_args(told[2].split()).verb == "scale"
