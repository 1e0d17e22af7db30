"""The sections of the check, in order. Each is a separate program, so a crash of one does not affect the others."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.gpu_check import tests_run
from benchmarks.gpu_check.inventory import found_version
from benchmarks.gpu_check.readings import read_engine, read_handoff, read_serving
from benchmarks.gpu_check.report import Outcome

SECONDS_LEFT = "SECONDS_LEFT"
_TINY_TIME_FACTOR = 4.0  # times the budget: a small check runs on any processor, beside whatever else that does
_MOST_PROCESSES = 8  # of tests, each with its own half gigabyte of the GPU


@dataclass(frozen=True, slots=True)
class Section:
    """`read` makes the outcome from the folder that `command` wrote and from its output, also after a cut at
    `budget_s`. An exit status outside `statuses` is a failure. The sections before it leave it at least `least_s`.
    SECONDS_LEFT in the command becomes the remaining time. `absent`: the reason why it cannot run, or empty."""

    name: str
    command: tuple[str, ...]
    budget_s: float
    read: Callable[[Path, str], Outcome]
    statuses: frozenset[int] = frozenset({0})
    least_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""
    is_extra: bool = False  # nothing is amiss where no time is left for it


@dataclass(frozen=True, slots=True)
class CheckSetup:
    """`is_tiny`: run a small version of every section on a CPU, to test the check itself."""

    python: str
    folder: Path
    is_tiny: bool

    @property
    def device(self) -> str:
        return "cpu" if self.is_tiny else "cuda"


def sections(setup: CheckSetup) -> list[Section]:
    factor = _TINY_TIME_FACTOR if setup.is_tiny else 1.0
    return [replace(section, budget_s=factor * section.budget_s) for section in _sections(setup)]


def _sections(setup: CheckSetup) -> list[Section]:
    tiny = ("--tiny",) if setup.is_tiny else ()
    bench = (setup.python, "-m")
    handoffs = [
        _handoff(setup, transport) for transport in (("shm",) if setup.is_tiny else ("cuda_ipc", "nccl", "nixl"))
    ]
    return [
        _tests(setup, "Golden tokens, every attention back end", "golden", 90.0),
        _tests(setup, "CUDA graphs and steady steps", "steady", 90.0),
        _tests(setup, "Kernels, digests, NCCL, cuda_ipc", "kernels", 70.0),
        *handoffs,
        Section(
            "A Llama's shape",
            (*bench, "benchmarks.gpu.engine", *_folder(setup), *tiny),
            100.0,
            read_engine,
            least_s=60.0,
        ),
        Section(
            "A whole cluster, and kill -9",
            (*bench, "benchmarks.gpu.serving", "--seconds", SECONDS_LEFT, *_folder(setup), *tiny),
            440.0,  # whatever is left
            read_serving,
            least_s=180.0,
        ),
        replace(_handoff(setup, "tcp"), is_extra=True),
    ]


_TESTS = {
    "golden": (
        "tests/cuda/test_golden.py",
        "tests/cuda/test_back_ends.py",
        "tests/unit/engine/attention/test_attention.py",
    ),
    "steady": (
        "tests/cuda/test_steady_steps.py",
        "tests/unit/engine/cuda/test_fused_forward.py",
        "tests/unit/engine/sampling/test_sampler.py",
        "tests/unit/engine/sampling/test_logit_rules.py",
    ),
    "kernels": (
        "tests/unit/engine/attention/test_triton_paged.py",
        "tests/unit/kvtransfer/digests/test_digest_kernel.py",
        "tests/unit/kvtransfer/digests/test_digests.py",
        "tests/unit/kvtransfer/digests/test_cuda_copy.py",
        "tests/unit/engine/cuda/test_cuda_memory.py",
        "tests/unit/engine/kv/test_capacity.py",
        "tests/unit/engine/kv/test_wire_dtypes.py",
        "tests/contract/transports/test_cuda_ipc.py",
        "tests/contract/transports/test_nccl_wheels.py",
        "tests/contract/transports/test_nixl.py",
    ),
}


def _tests(setup: CheckSetup, title: str, group: str, budget_s: float) -> Section:
    """Return the section of a group of tests; in small, the tests of the same files that need no GPU."""
    kept = f"{group}.jsonl"
    files = ("tests/unit/kvtransfer/digests/test_digests.py",) if setup.is_tiny else _TESTS[group]
    command = tests_run.command(
        setup.python,
        files,
        setup.folder / kept,
        marker="not cuda and not slow" if setup.is_tiny else "cuda and not slow",
        num_processes=1 if setup.is_tiny else min(_MOST_PROCESSES, max(2, (os.cpu_count() or 2) // 2)),
    )
    return Section(
        title,
        tuple(command),
        budget_s,
        lambda folder, _: tests_run.read_account(folder / kept).outcome(title),
        statuses=frozenset({0, 1}),  # pytest's: 1 says that a test failed, which its report says, too
        # So many processes with a thread for every core each would wait for each other.
        environment={"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"},
    )


def _handoff(setup: CheckSetup, transport: str) -> Section:
    title = f"Hand-off between two processes by {transport}"
    kept = setup.folder / transport
    small = ("--quick",) if setup.is_tiny else ()
    digests = ("--digests",) if transport in ("cuda_ipc", "shm") else ()
    command = (
        *(setup.python, "-m", "benchmarks.kv", "--device", setup.device, "--transports", transport),
        *("--output", str(kept), "--keep", *small, *digests),
    )
    return Section(
        title,
        command,
        40.0,
        lambda folder, said: read_handoff(title, folder / transport, said, setup.is_tiny),
        absent=_why_absent(transport),
    )


def _why_absent(transport: str) -> str:
    """Return why a transport cannot run here, which saves starting a process that could only report the same."""
    if transport == "nixl" and not found_version("nixl-cu13"):
        return "The wheel of NIXL is not here."
    if transport == "nccl":
        if not found_version("cupy-cuda13x"):
            return "CuPy is not here."
        nccl = found_version("nvidia-nccl-cu13")
        if nccl and _numbers(nccl) < (2, 30):
            return f"Two processes on one GPU need NCCL 2.30, and this is {nccl}: its tests send to themselves."
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _folder(setup: CheckSetup) -> tuple[str, ...]:
    return ("--output", str(setup.folder))
