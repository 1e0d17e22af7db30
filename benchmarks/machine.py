"""The machine, versions and commit of a measurement."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path


def about() -> dict[str, str]:
    """Return the fields that every stored result has."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "processor": f"{os.cpu_count()} x {_processor()}",
        "kernel": f"Linux {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch") or "none",
    }


def version(package: str) -> str:
    """Return a package's version without importing it; empty if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Return the checkout's commit, with a plus if it has changes. For a copy without history: the variable COMMIT."""
    describe = ("git", "describe", "--always", "--dirty=+", "--abbrev=10")
    try:
        described = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return os.environ.get("COMMIT", "unknown")
    return described.stdout.strip() or os.environ.get("COMMIT", "unknown")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
