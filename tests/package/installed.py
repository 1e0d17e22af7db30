"""An environment of its own in which the wheel is installed with one extra, and run far from the checkout."""

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 1800.0
# Folders and modules with the names of Tandem's own packages, which belong to somebody else.
_COLLIDING = ("cli", "cluster", "engine", "router", "worker")


class Installed:
    def __init__(self, folder: Path, python: str, wheel: Path, extra: str = "") -> None:
        self.python, self.tandem = folder / "venv" / "bin" / "python", folder / "venv" / "bin" / "tandem"
        self.folder = folder / "elsewhere"
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "PYTHON"))
        }
        self.environment["XDG_RUNTIME_DIR"] = str(folder)  # finds no other cluster of this machine
        self.folder.mkdir(parents=True)
        subprocess.run((python, "-m", "venv", folder / "venv"), check=True)
        wanted = f"tandem-serving[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        pip = (self.python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wanted)
        subprocess.run(pip, check=True, timeout=_TIMEOUT_S)

    def collide(self) -> None:
        """Put packages of Tandem's internal names where this environment's programs find them first or at all."""
        packages = Path(self.run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        for name in _COLLIDING:
            for folder in (packages, self.folder):
                (folder / name).mkdir()
                (folder / name / "__init__.py").write_text("OWNER = 'another project'\n")

    def run(self, *command: object, status: int = 0) -> str:
        """Run a command in a folder of its own. Returns its output if it succeeds, and else its stderr."""
        ended = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == status, ended.stdout + ended.stderr
        return ended.stderr if status else ended.stdout

    def packages(self) -> set[str]:
        return {line.partition("==")[0].lower() for line in self.run(self.python, "-m", "pip", "freeze").splitlines()}


@functools.cache
def pythons() -> Sequence[str]:
    """Return the interpreters on this machine that Tandem supports, one per version."""
    found = []
    for version in ("3.11", "3.12"):
        name = f"python{version}"
        others = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))
        candidates = [path for path in (shutil.which(name), *map(str, others)) if path]
        runs = (subprocess.run((path, "-S", "-c", ""), capture_output=True) for path in candidates)
        found += [path for path, run in zip(candidates, runs, strict=True) if not run.returncode][:1]
    return tuple(found)
