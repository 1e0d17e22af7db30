"""What a result was measured on."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path


def about() -> dict[str, str]:
    """Goes with every result that is kept."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "processor": f"{os.cpu_count()} x {_processor()}",
        "kernel": f"Linux {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch") or "none",
    }


def version(package: str) -> str:
    """Empty: it is not here. Nothing is imported for it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Of the checkout, with a plus when it has changes. Of a copy without its history: what COMMIT says."""
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
