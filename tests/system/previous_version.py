"""Code of an earlier version, taken from git's history, to run beside the present one.

The newest tag `v*` before the present commit is the previous version. Until there is one, `PREVIOUS_VERSION` says it in
its first line; further lines are older ones, for the long tests.
"""

import io
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_WRITTEN = Path(__file__).with_name("PREVIOUS_VERSION").read_text().split()
AGES = range(len(_WRITTEN))  # 0: the previous version; more: older ones
_PACKAGES = ("tandem", "cluster", "engine", "kvtransfer", "prefill_worker", "decode_worker", "router")


@dataclass(frozen=True, slots=True)
class EarlierVersion:
    name: str  # tag or commit
    directory: Path

    @property
    def wrapper(self) -> tuple[str, ...]:
        """Before a command: the same Python with the same libraries runs this version's packages."""
        return ("env", "-C", str(self.directory), f"PYTHONPATH={self.directory}")


def earlier_version(directory: Path, age: int = 0) -> EarlierVersion:
    """Unpacked in this empty directory. Skips the test, with the reason, where there is no git or no such history."""
    name = (_newest_tag() if age == 0 else "") or _WRITTEN[age]
    packed = _git("archive", "--format=tar", name, "--", *_PACKAGES)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(directory, filter="data")
    version = EarlierVersion(name, directory)
    command = (*version.wrapper, sys.executable, "-c", "import router; print(router.__file__)")
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert Path(found.strip()).is_relative_to(directory), f"{found} would run instead of version {name}"
    return version


def _newest_tag() -> str:
    listed = _git("tag", "--list", "v*", "--merged", "HEAD", "--no-contains", "HEAD", "--sort=-version:refname")
    return listed.decode().partition("\n")[0]


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(("git", "-C", str(ROOT), *arguments), capture_output=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("there is no git here to take an earlier version from")
    if done.returncode:
        pytest.skip(f"git has no earlier version here: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
