"""Every overlay and component renders, validates strictly, custom resources too, and names what the code has.

No control plane runs here: that a cluster accepts and runs these objects is not tested.
"""

import argparse
import json
import re
import shutil
import subprocess
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cli.verbs.access.certs import make_authority, make_certificate
from cluster.observe.metrics import WORKER
from cluster.serving.tls import load_tls
from cluster.settings.config import RouterConfig, WorkerConfig
from cluster.settings.config_sources import add_flags, load_config
from deploy.operator.__main__ import parser
from deploy.operator.pools import DEPLOYMENTS, refuse_other_owners

kubernetes_validate = pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

_KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
_OVERLAYS = sorted(path.parent.name for path in _KUBERNETES.glob("*/kustomization.yaml"))
_COMPONENTS = sorted(path.parent.name for path in _KUBERNETES.glob("components/*/kustomization.yaml"))
_SCHEMAS = {
    kind: json.loads((Path(__file__).parent / "kubernetes_schemas" / f"{kind.lower()}.json").read_text())
    for kind in ("Certificate", "Issuer", "ScaledObject", "ServiceMonitor")
}
_CONFIGS: dict[str, type[RouterConfig] | type[WorkerConfig]] = {
    "tandem-router": RouterConfig,
    "tandem-prefill": WorkerConfig,
    "tandem-decode": WorkerConfig,
}
_METRIC = re.compile(r"tandem_[a-z_]+")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml parses in a tenth of the time


@lru_cache
def _text(folder: Path) -> str:
    command = ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def _loaded(text: str) -> list[dict[str, Any]]:
    return list(yaml.load_all(text, Loader=_LOADER))


def _overlay(name: str) -> list[dict[str, Any]]:
    return _loaded(_text(_KUBERNETES / name))


def _with_component(name: str, folder: Path) -> list[dict[str, Any]]:
    """Render the base with one component."""
    own = folder / name
    if not own.exists():
        own.mkdir()
        content = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["../base"],
            "components": [f"../components/{name}"],
        }
        (own / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return _loaded(_text(own))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("overlays")
    for name in ("base", "components"):
        shutil.copytree(_KUBERNETES / name, made / name)
    return made


def _validate(items: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an unknown kind only warns
        for item in items:
            if (schema := _SCHEMAS.get(item["kind"])) is None:
                kubernetes_validate.validate(item, "1.30", strict=True)
            else:
                jsonschema.validate(item, schema)
                if item["kind"] == "ScaledObject":
                    kubernetes_validate.validate(_autoscaler_of(item), "1.30", strict=True)


def _autoscaler_of(scaled: dict[str, Any]) -> dict[str, Any]:
    """Return the HorizontalPodAutoscaler that KEDA makes of a ScaledObject, as far as its behavior."""
    spec = scaled["spec"]
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": scaled["metadata"]["name"]},
        "spec": {
            "scaleTargetRef": {"kind": "Deployment", "name": spec["scaleTargetRef"]["name"]},
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        },
    }


def _deployment(name: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    return next(item for item in items if item["kind"] == "Deployment" and item["metadata"]["name"] == name)


@pytest.mark.parametrize("name", _OVERLAYS)
def test_an_overlay_validates_and_its_settings_parse(name: str) -> None:
    items = _overlay(name)
    _validate(items)
    settings = next(item["data"] for item in items if item["kind"] == "ConfigMap")
    parsed = []
    for item in items:
        if item["kind"] == "Deployment" and (config_type := _CONFIGS.get(item["metadata"]["name"])):
            (container,) = item["spec"]["template"]["spec"]["containers"]
            own = {each["name"]: each.get("value", "10.0.0.1") for each in container["env"]}
            given = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
            add_flags(given, config_type)
            load_config(config_type, vars(given.parse_args(container["args"][2:])), settings | own)
            parsed.append(item["metadata"]["name"])
    assert sorted(parsed) == sorted(_CONFIGS)


@pytest.mark.parametrize("name", _COMPONENTS)
def test_a_component_validates_on_the_base(name: str, folder: Path) -> None:
    _validate(_with_component(name, folder))


def _pods(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item["spec"]["template"]["spec"] for item in items if item["kind"] in ("Deployment", "Job")]


def _rendered(name: str, folder: Path) -> list[dict[str, Any]]:
    return _overlay(name) if name in _OVERLAYS else _with_component(name, folder)


@pytest.mark.parametrize("name", sorted({*_OVERLAYS, *_COMPONENTS}))
def test_every_object_is_in_the_namespace_of_the_secrets_and_finds_its_config_map(name: str, folder: Path) -> None:
    """`kubectl apply -k` would put an object without a namespace into the one of the user's context."""
    items = _rendered(name, folder)
    found = {(item["kind"], item["metadata"]["name"]): item["metadata"].get("namespace") for item in items}
    assert found.pop(("Namespace", "tandem")) is None
    assert set(found.values()) == {"tandem"}, found
    subjects = [each for item in items if item["kind"] == "RoleBinding" for each in item["subjects"]]
    assert all(each["namespace"] == "tandem" for each in subjects)
    containers = [each for pod in _pods(items) for each in (*pod.get("initContainers", ()), *pod["containers"])]
    named = {each["configMapRef"]["name"] for container in containers for each in container.get("envFrom", ())}
    assert named <= {config for kind, config in found if kind == "ConfigMap"}


@pytest.mark.parametrize("name", sorted({*_OVERLAYS, *_COMPONENTS}))
def test_every_pod_runs_an_image_of_the_members(name: str, folder: Path) -> None:
    """An image without a tag would be `latest`, which no documented command builds for workers."""
    items = _rendered(name, folder)
    members = {
        container["image"]
        for each in _CONFIGS
        for container in _deployment(each, items)["spec"]["template"]["spec"]["containers"]
    }
    images = {each["image"] for pod in _pods(items) for each in (*pod.get("initContainers", ()), *pod["containers"])}
    assert images - {"redis:7-bookworm"} == members


def test_a_misspelt_field_of_a_custom_resource_is_caught(folder: Path) -> None:
    scaled = next(item for item in _with_component("keda", folder) if item["kind"] == "ScaledObject")
    scaled["spec"]["maxReplicas"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxReplicas"):
        _validate([scaled])


@pytest.mark.parametrize("name", ["hpa", "keda", "follower"])
def test_each_pool_has_exactly_one_owner(name: str, folder: Path) -> None:
    """An autoscaler for each pool and an operator that does not follow, or the operator alone."""
    items = _with_component(name, folder)
    owned = [
        item["spec"]["scaleTargetRef"]["name"]
        for item in items
        if item["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    ]
    operator = next(item for item in items if item["kind"] == "Deployment" and "operator" in item["metadata"]["name"])
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    arguments = parser().parse_args(container["args"][2:])
    follows = list(DEPLOYMENTS.values()) if arguments.follow == "on" else []
    assert sorted([*owned, *follows]) == sorted(DEPLOYMENTS.values())
    (worker,) = _deployment("tandem-decode", items)["spec"]["template"]["spec"]["containers"]
    redis = [each for each in worker["env"] if each["name"] == "TANDEM_REDIS"]
    assert redis and redis == [each for each in container["env"] if each["name"] == "TANDEM_REDIS"]
    pools = [
        item for item in items if item["kind"] == "Deployment" and item["metadata"]["name"] in DEPLOYMENTS.values()
    ]
    assert all("replicas" not in item["spec"] for item in pools), "an apply would undo what the owner has set"


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_autoscalers_use_metrics_that_workers_publish(name: str, folder: Path) -> None:
    used: dict[str, set[str]] = {}
    for item in _with_component(name, folder):
        spec = item.get("spec", {})
        texts = [trigger["metadata"]["query"] for trigger in spec.get("triggers", [])]
        texts += [each["pods"]["metric"]["name"] for each in spec.get("metrics", [])]
        for text in texts:
            used.setdefault(spec["scaleTargetRef"]["name"], set()).update(_METRIC.findall(text))
            for pods in re.findall(r'pod=~"([^"]*)"', text):
                assert re.fullmatch(pods, f"{spec['scaleTargetRef']['name']}-7f9c-x2z")
    assert used == {
        "tandem-prefill": {"tandem_queued_prompt_seconds"},
        "tandem-decode": {"tandem_kv_cache_usage_ratio", "tandem_predicted_itl_seconds"},
    }
    rules = (_KUBERNETES / "components" / "hpa" / "adapter_rules.yaml").read_text()
    assert set(_METRIC.findall(rules)) == set().union(*used.values()) <= set(WORKER)


def test_the_operator_has_exactly_the_rights_that_it_uses(folder: Path) -> None:
    role = next(item for item in _with_component("follower", folder) if item["kind"] == "Role")
    allowed = {(rule["apiGroups"][0], rule["resources"][0]): set(rule["verbs"]) for rule in role["rules"]}
    assert allowed == {
        ("apps", "deployments"): {"get", "list", "watch"},
        ("apps", "deployments/scale"): {"get", "update"},
        ("", "pods"): {"list", "patch"},
        ("autoscaling", "horizontalpodautoscalers"): {"list"},
        ("keda.sh", "scaledobjects"): {"list"},
    }
    assert refuse_other_owners.__module__.startswith(parser().prog.split()[-1])


def test_prometheus_scrapes_every_member_at_its_port_of_metrics(folder: Path) -> None:
    items = _with_component("monitoring", folder)
    service = next(item for item in items if item["metadata"]["name"] == "tandem-metrics")
    monitor = next(item for item in items if item["kind"] == "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {each["port"] for each in monitor["spec"]["endpoints"]} <= {
        port["name"] for port in service["spec"]["ports"]
    }
    (endpoint,) = monitor["spec"]["endpoints"]
    key = endpoint["authorization"]["credentials"]
    scraped = set()
    for item in items:
        if item["kind"] == "Deployment":
            template = item["spec"]["template"]
            if service["spec"]["selector"].items() <= template["metadata"]["labels"].items():
                scraped.add(item["metadata"]["name"])
                (container,) = template["spec"]["containers"]
                (file,) = [each["value"] for each in container["env"] if each["name"] == "TANDEM_METRICS_KEY_FILE"] or [
                    next(each["data"] for each in items if each["kind"] == "ConfigMap")["TANDEM_METRICS_KEY_FILE"]
                ]
                mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
                secrets = {
                    each["name"]: each.get("secret", {}).get("secretName") for each in template["spec"]["volumes"]
                }
                assert key == {"name": secrets[mounted[str(Path(file).parent)]], "key": Path(file).name}
                ports = container["ports"]
                assert {"name": "metrics", "containerPort": service["spec"]["ports"][0]["port"]} in ports
    assert scraped == {"tandem-router", "tandem-prefill", "tandem-decode"}


def test_members_with_tls_have_certificates_that_each_other_and_clients_accept(tmp_path: Path) -> None:
    """The certificates are made here with the names that the manifests ask for; cert-manager does not run here."""
    items = _overlay("mtls")
    issuers = {item["metadata"]["name"] for item in items if item["kind"] == "Issuer"}
    certificates = {item["spec"]["secretName"]: item["spec"] for item in items if item["kind"] == "Certificate"}
    assert {spec["issuerRef"]["name"] for spec in certificates.values()} == issuers
    assert [name for name, spec in certificates.items() if spec.get("isCA")] == [
        item["spec"]["ca"]["secretName"] for item in items if item["kind"] == "Issuer" and "ca" in item["spec"]
    ]
    settings = next(item["data"] for item in items if item["kind"] == "ConfigMap")
    authority = make_authority(tmp_path, days=2)
    secrets = {}
    for name in (*_CONFIGS, "tandem-operator"):
        pod = _deployment(name, items)["spec"]["template"]["spec"]
        mounted = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        (secrets[name],) = [
            each["secret"]["secretName"] for each in pod["volumes"] if mounted.get(each["name"]) == "/tls"
        ]
        names = certificates[secrets[name]]
        hosts = (*names["dnsNames"], *names.get("ipAddresses", ()))
        pair = make_certificate(tmp_path, authority, secrets[name], hosts, days=2)
        files = {"/tls/tls.crt": pair.cert, "/tls/tls.key": pair.key, "/tls/ca.crt": authority.cert}
        tls = {key: str(files.get(value, value)) for key, value in settings.items() if key.startswith("TANDEM_TLS_")}
        assert len(tls) == 4
        assert load_tls(load_config(RouterConfig, {"model": "-"}, tls), "10.0.0.1") is not None
    services = {item["metadata"]["name"] for item in items if item["kind"] == "Service"}
    dialled = {"tandem-router", "tandem-router.tandem.svc", "localhost"}
    assert dialled <= set(certificates[secrets["tandem-router"]]["dnsNames"]) and "tandem-router" in services


def test_probes_of_members_with_tls_ask_the_port_that_has_none() -> None:
    """A kubelet has no certificate of a member. The base's probes are checked in test_kubernetes.py."""
    base, with_tls = _overlay("base"), _overlay("mtls")
    for name in _CONFIGS:
        probes = [
            {key: value for key, value in each["spec"]["template"]["spec"]["containers"][0].items() if "Probe" in key}
            for each in (_deployment(name, base), _deployment(name, with_tls))
        ]
        assert probes[0] == probes[1] and all("grpc" in probe for probe in probes[1].values())


def test_members_wait_for_the_model_that_the_job_writes_where_they_read_it(folder: Path) -> None:
    items = _with_component("model", folder)
    settings = {item["metadata"]["name"]: item["data"] for item in items if item["kind"] == "ConfigMap"}
    model = next(data for name, data in settings.items() if name.startswith("tandem-model"))
    shared = next(data for name, data in settings.items() if name.startswith("tandem-settings"))
    assert shared["TANDEM_MODEL"] == model["FOLDER"]
    job = next(item for item in items if item["kind"] == "Job")
    claim = next(item["metadata"]["name"] for item in items if item["kind"] == "PersistentVolumeClaim")
    pods = [
        job["spec"]["template"]["spec"],
        *(_deployment(name, items)["spec"]["template"]["spec"] for name in _CONFIGS),
    ]
    for pod in pods:
        (volume,) = [each for each in pod["volumes"] if each.get("persistentVolumeClaim", {}).get("claimName") == claim]
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            (mount,) = [each for each in container["volumeMounts"] if each["name"] == volume["name"]]
            assert model["FOLDER"].startswith(f"{mount['mountPath']}/")
            assert mount.get("readOnly", False) == (pod is not pods[0])
    assert all(len(pod["initContainers"]) == 1 for pod in pods[1:])


def test_workers_with_rdma_may_pin_memory_and_ask_for_a_device() -> None:
    for item in _overlay("rdma"):
        if item["kind"] == "Deployment" and item["metadata"]["name"] in DEPLOYMENTS.values():
            (container,) = item["spec"]["template"]["spec"]["containers"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
            assert container["resources"]["limits"]["rdma/hca"] == 1
