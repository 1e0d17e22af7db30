"""Checks that this machine meets Tandem's needs: versions, devices and limits. Changes nothing.

A finding is a problem only if Tandem cannot work with it. A transport that is not available is not a problem.
"""

import os
import platform
import resource
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cli.table import bytes_text
from cluster.auth.keys import SECRET_BYTES, ClusterKeys
from cluster.errors import ConfigError
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from cluster.registry.redis_server import redis_program
from cluster.settings.config import ClusterSettings
from cluster.settings.worker_settings import TRANSPORTS, TransferSettings

# Packages that Tandem requires, and packages that only some transports need.
_NEEDED = (
    *("torch", "transformers", "grpcio", "protobuf", "redis", "tokenizers"),
    *("fastapi", "uvicorn", "httptools", "uvloop"),
)
_OPTIONAL = {
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
}
_FEW_FILES = 4096  # sockets of a busy worker: one per stream, hand-off and client
_LITTLE_SHM_BYTES = 1 << 30  # NCCL keeps its buffers between processes there


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    text: str
    is_problem: bool = False


def look() -> list[Finding]:
    """Return all findings. Takes seconds, because it loads torch."""
    return [_python(), *_packages(), *_devices(), *_limits(), _redis(), *_transports()]


def _python() -> Finding:
    is_right = sys.platform == "linux" and platform.machine() == "x86_64" and (3, 11) <= sys.version_info < (3, 13)
    text = f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}"
    wanted = "" if is_right else "; Tandem needs Python 3.11 or 3.12 on Linux, x86-64"
    return Finding("python", text + wanted, not is_right)


def _packages() -> Iterator[Finding]:
    for name in _NEEDED:
        version = _version(name)
        yield Finding(name, version or "not installed", not version)
    for subject, names in _OPTIONAL.items():
        versions = [f"{name} {version}" for name in names if (version := _version(name))]
        yield Finding(subject, ", ".join(versions) or "not installed")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _devices() -> Iterator[Finding]:
    yield Finding("CUDA", *_cuda())
    folder = Path("/sys/class/infiniband")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    yield Finding("RDMA devices", ", ".join(found) or "none")


def _cuda() -> tuple[str, bool]:
    """Return a text and whether it is a problem. A GPU that torch cannot use is one: workers would run on the CPU."""
    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    try:
        import torch
    except Exception as error:  # noqa: BLE001 -- a broken installation raises anything; it is reported
        return f"torch cannot be imported: {error}", True
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        there = ", and this machine has a GPU" if has_device else ""
        return f"not available; torch {torch.__version__} was built {built}{there}", has_device
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}: {', '.join(names)}", False


def _limits() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", f"{cores} of {os.cpu_count()} may be used")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("memory", f"{bytes_text(pages)}{_memory_limit()}")
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    if shm is None:
        yield Finding("/dev/shm", "missing; nccl between processes of one host needs it")
    else:
        size, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
        few = "; little for nccl between processes of one host" if free < _LITTLE_SHM_BYTES else ""
        yield Finding("/dev/shm", f"{bytes_text(size)}, {bytes_text(free)} free{few}")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = f"; a busy router or worker needs more: run `ulimit -n {_FEW_FILES}`" if 0 <= files < _FEW_FILES else ""
    yield Finding("open files", f"at most {files}{few}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    most = (
        "unlimited"
        if locked == resource.RLIM_INFINITY
        else f"at most {bytes_text(locked)}; RDMA needs the size of the block pool"
    )
    yield Finding("locked memory", most)
    folder = Path(tempfile.gettempdir())
    writable = os.access(folder, os.W_OK | os.X_OK)
    yield Finding("temporary folder", f"{folder}, {bytes_text(shutil.disk_usage(folder).free)} free", not writable)


def _memory_limit() -> str:
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return f", of which this control group may use {bytes_text(int(text))}" if text.isdigit() else ""


def _redis() -> Finding:
    try:
        return Finding("redis-server", redis_program())
    except ConfigError as error:
        return Finding("redis-server", f"{error.message}; needed for `tandem up` without --redis")


def _transports() -> Iterator[Finding]:
    """Yield which transports a worker on this machine could use, on the device that it would choose."""
    try:
        import torch

        from engine.kv.layout import LayerShape, lay_out
        from engine.kv.pool import KvPool
        from kvtransfer.transports.available import available_transports
        from kvtransfer.transports.base import TransportSetup
        from kvtransfer.transports.proven_connections import ConnectionProofs

        device = "cuda" if torch.cuda.is_available() else "cpu"
        pool = KvPool(lay_out([LayerShape(1, 8, 8)], 1, "float32"), 1, device)
        host = ClusterSettings().host
        member = MemberId("doctor", "0")
        unused = ClusterKeys(secrets.token_bytes(SECRET_BYTES))  # nothing connects
        proofs = ConnectionProofs(unused, member, Telemetry())
        means = TransportSetup(member, proofs, pool, host, host, TransferSettings().read_timeout_s)
        available = available_transports(TransferSettings(), means)
    except Exception as error:  # noqa: BLE001 -- the other findings are still reported
        yield Finding("transports", f"cannot be checked: {error}", True)
        return
    for name in TRANSPORTS:
        yield Finding(
            f"transport {name}", available.missing.get(name, f"works on this machine, for a pool on {device}")
        )
