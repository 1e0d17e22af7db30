"""What a result was measured on."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch


def about() -> dict[str, str]:
    """Goes with every result that is kept."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "processor": f"{os.cpu_count()} x {_processor()}",
        "kernel": f"Linux {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit() -> str:
    """Of the checkout, with a plus when it has changes."""
    folder = Path(__file__).parent
    described = subprocess.run(
        ("git", "describe", "--always", "--dirty=+", "--abbrev=10"),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
