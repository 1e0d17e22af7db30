"""Tests which package may import which, and which modules need only the standard library."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Package -> what it may import of ours. deploy, benchmarks and cli may import anything above them.
ALLOWED: dict[str, set[str]] = {
    "tandem": set(),
    "tandem_serving": set(),
    "cluster": {"tandem"},
    "engine": {
        "cluster.messages",
        "cluster.errors",
        "cluster.fair_queue",
        "cluster.grammar",
        "engine.timing.least_squares",
        "engine.timing.service_time_fit",
        "cluster.settings.worker_settings",
        "cluster.clock",
        "cluster.compiled_library",
        "cluster.holders",
        "cluster.member",
        "cluster.service_times",
        "cluster.protocol.hashing",
        "cluster.request_size",
        "cluster.shared_memory",
    },
    "kvtransfer": {"cluster", "tandem"},
    "prefill_worker": {"engine", "kvtransfer", "cluster", "tandem"},
    "decode_worker": {"engine", "kvtransfer", "cluster", "tandem"},
    "worker": {"prefill_worker", "decode_worker", "engine", "kvtransfer", "cluster", "tandem"},
    "router": {"cluster", "tandem"},
}
# These modules start a worker; no other module of their packages may import it.
STARTS_WORKER = {"prefill_worker/__main__.py", "decode_worker/__main__.py"}
OURS = {*ALLOWED, "simulator", "cli", "deploy", "benchmarks"}

# Pure modules decide and loops perform: they import the standard library and each other, without a clock or an await.
PURE = [
    "cli.local.layout",
    "cluster.accounts.keys",
    "cluster.accounts.usage",
    "cluster.settings.config",
    "cluster.settings.config_sources",
    "cluster.auth.keys",
    "cluster.clock",
    "cluster.settings.worker_settings",
    "cluster.errors",
    "cluster.fair_queue",
    "cluster.protocol.field_rules",
    "cluster.protocol.hashing",
    "cluster.holders",
    "engine.timing.least_squares",
    "engine.timing.service_time_fit",
    "cluster.member",
    "cluster.messages",
    "cluster.outstanding_work",
    "cluster.request_size",
    "cluster.service_times",
    "cluster.registry.scale_target",
    "cluster.observe.stalls",
    "decode_worker.live_handles",
    "engine.kv.block_pool",
    "engine.kv.capacity",
    "engine.kv.layout",
    "engine.kv.eviction",
    "engine.kv.prefix_cache",
    "engine.sampling.logit_state",
    "engine.scheduling.admission",
    "engine.scheduling.batching.batch",
    "engine.scheduling.batching.block_tables",
    "engine.scheduling.batching.chunks",
    "engine.scheduling.batching.sequences",
    "engine.scheduling.batching.preemption",
    "engine.scheduling.batching.queues",
    "engine.scheduling.batching.reservations",
    "engine.scheduling.cache_commands",
    "engine.scheduling.commands",
    "engine.scheduling.exports",
    "engine.scheduling.length_prediction",
    "engine.scheduling.limits",
    "engine.scheduling.policies",
    "engine.scheduling.prefix_access",
    "engine.scheduling.scheduler",
    "engine.scheduling.step",
    "engine.scheduling.steps_in_flight",
    "engine.speculation.drafter",
    "kvtransfer.protocol.export_machine",
    "kvtransfer.protocol.frozen",
    "kvtransfer.protocol.handoff",
    "kvtransfer.protocol.import_failure",
    "kvtransfer.protocol.import_state",
    "kvtransfer.protocol.import_machine",
    "kvtransfer.protocol.leases",
    "kvtransfer.transports.nccl.communicator_life",
    "kvtransfer.importer.links",
    "prefill_worker.prefixes.tier_index",
    "router.overview.history",
    "router.overview.slowness",
    "router.grammars.compile_turns",
    "router.policies.admission",
    "router.policies.breakers",
    "router.request.explanations",
    "router.request.live_table",
    "router.http.connection_places",
    "router.policies.prediction.work_ahead",
    "router.fleet.membership",
    "router.policies.hedging",
    "router.request.validation",
    "router.policies.candidates",
    "router.policies.effect",
    "router.policies.placement",
    "router.policies.prediction.forecast",
    "router.policies.prediction.latency",
    "router.policies.slo_aware",
    "router.policies.prefix_index",
    "router.policies.prediction.unmodelled",
    "router.policies.prediction.recent_prompts",
    "router.policies.prediction.speeds",
    "tandem.keepalive",
]
# Deciding modules among them: neither read a clock nor wait.
CLOCKLESS = [name for name in PURE if name not in ("cluster.clock", "cluster.settings.config_sources")]
BLOCKED = ["torch", "grpc", "redis", "numpy", "transformers", "google", "prometheus_client", "fastapi", "yaml"]


def modules(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)


def path_of(module: str) -> Path:
    return ROOT / Path(*module.split(".")).with_suffix(".py")


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the full names of imported modules; `from a.b import c` gives both a.b and a.b.c, because c may be a
    module.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def is_within(name: str, allowed: set[str]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in allowed)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_its_allowed_packages(package: str) -> None:
    allowed = ALLOWED[package] | {package}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(package)
        for name in sorted(imported(path))
        if name.split(".")[0] in OURS and not is_within(name, allowed)
        if not (name.split(".")[0] == "worker" and str(path.relative_to(ROOT)) in STARTS_WORKER)
    ]
    assert wrong == []


def test_ray_is_imported_only_in_its_own_package() -> None:
    places = {
        path.relative_to(ROOT).parts[:2]
        for package in OURS
        for path in modules(package)
        if is_within("ray", roots(path))
    }
    assert places <= {("deploy", "ray")}


def test_the_router_never_imports_torch() -> None:
    """A deployment runs many routers, and torch would cost each half a gigabyte and seconds of start."""
    assert {path.name for path in modules("router") if roots(path) & {"torch", "transformers", "numpy"}} == set()
    modules_found = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules("router")]
    names = [name.removesuffix(".__init__") for name in modules_found if not name.endswith("__main__")]
    assert_imports(names, blocked=["torch", "transformers", "engine", "kvtransfer"])


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_the_standard_library_only(module: str) -> None:
    outside = {
        name
        for name in imported(path_of(module))
        if name.split(".")[0] not in sys.stdlib_module_names and name.split(".")[0] not in OURS
    }
    read_later = (
        {"yaml"} if module == "cluster.settings.config_sources" else set()
    )  # where a file is given, not at import
    assert outside <= read_later


def test_pure_modules_load_without_installed_packages() -> None:
    assert_imports(PURE, blocked=BLOCKED)


@pytest.mark.parametrize("module", CLOCKLESS)
def test_a_pure_module_neither_reads_a_clock_nor_waits(module: str) -> None:
    path = path_of(module)
    waits = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Await | ast.AsyncFunctionDef)
    ]
    assert waits == []
    assert roots(path) & {"time", "datetime", "asyncio", "threading", "random", "socket"} == set()


def test_every_scheduler_and_policy_is_on_the_list() -> None:
    names = [
        "scheduler",
        "placement",
        "admission",
        "block_pool",
        "prefix_cache",
        "leases",
        "handoff",
        "autoscale",
    ]
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ALLOWED
        for path in modules(package)
        if path.stem in names
    }
    assert found - set(PURE) == set()


def test_init_files_are_empty_except_the_one_of_the_client_library() -> None:
    written = [path for package in OURS for path in modules(package) if path.name == "__init__.py" and path.read_text()]
    assert written == [ROOT / "tandem" / "__init__.py"]


def test_every_package_is_installed_by_name() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in OURS - {"benchmarks"}  # these run from the checkout
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(found)


def assert_imports(names: list[str], *, blocked: list[str]) -> None:
    """Import the modules in a separate process in which every blocked name is missing."""
    program = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        f"for name in {names!r}: __import__(name)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
