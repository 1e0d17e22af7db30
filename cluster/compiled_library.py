"""Builds C sources once per machine and loads the library. Knows no kernel.

Owns the compiler's command, the cache of built libraries and the check that no other user could have written one. An
image without a compiler finds a library that was built beside the sources.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_TIMEOUT_S = 120.0

Signature = tuple[type | None, tuple[type, ...]]  # the types of the result and of the arguments


class NotCompiled(Exception):
    """There is no compiled form for this processor, device or model. The message is a few words that end in a worker's
    report."""


@dataclass(frozen=True, slots=True)
class CompiledLibrary:
    """A library built from all .c and .h files of one folder. It exports td_version() beside its functions."""

    name: str  # the file's name begins with it
    sources: Path
    signatures: Mapping[str, Signature]
    version: int  # of the contract between the sources and their caller

    def load(self) -> ctypes.CDLL:
        """Load the library beside the sources, else the cached one, else build it. Raises NotCompiled."""
        sources = self._found_sources()
        beside = self.sources / self._file_name(sources)
        if beside.is_file():
            return self._loaded(beside)
        compiler = _compiler()
        folder = _cache_folder()
        cached = folder / self._file_name(sources, _version_of(compiler))
        if not cached.exists():
            _build(compiler, sources, cached)
        _require_ours(cached)
        return self._loaded(cached)

    def build_in(self, folder: Path) -> int:
        """Build a library that detects the processor when it runs. Returns the exit status."""
        try:
            sources = self._found_sources()
            _build(_compiler(), sources, folder / self._file_name(sources))
        except NotCompiled as why:
            print(f"no kernels: {why}", file=sys.stderr)  # noqa: T201 - run as a program
            return 1
        return 0

    def _found_sources(self) -> list[Path]:
        sources = sorted([*self.sources.glob("*.c"), *self.sources.glob("*.h")])
        if not any(path.suffix == ".c" for path in sources):
            raise NotCompiled("the kernels' sources are not installed")
        return sources

    def _file_name(self, sources: list[Path], compiler_version: str = "") -> str:
        digest = hashlib.blake2b(repr((_FLAGS, compiler_version)).encode(), digest_size=12)
        for path in sources:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return f"{self.name}-{digest.hexdigest()}.so"

    def _loaded(self, path: Path) -> ctypes.CDLL:
        try:
            library = ctypes.CDLL(str(path))
            library.td_version.restype, library.td_version.argtypes = ctypes.c_int64, ()
            for name, (result, arguments) in self.signatures.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise NotCompiled(f"{path.name} cannot be loaded: {error}") from error
        if library.td_version() != self.version:
            raise NotCompiled(f"{path.name} is of another version")
        return library


def _build(compiler: str, sources: list[Path], target: Path) -> None:
    """Build the library and put it in place atomically; if several workers build at the same time, the file of the last
    one remains. Raises NotCompiled."""
    descriptor, unfinished = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(descriptor)
    try:
        c_files = [str(path) for path in sources if path.suffix == ".c"]
        command = [compiler, *_FLAGS, "-o", unfinished, *c_files, "-lm"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
        if ended.returncode:
            raise NotCompiled(f"{Path(compiler).name} failed: {_first_error(ended.stderr)}")
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{Path(compiler).name} could not be run: {error}") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _compiler() -> str:
    wanted = os.environ.get("CC")
    for name in (wanted,) if wanted else _COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise NotCompiled(f"no compiler found: $CC is {wanted}" if wanted else "no compiler found")


def _version_of(compiler: str) -> str:
    try:
        ended = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{Path(compiler).name} could not be run: {error}") from error
    return compiler + ended.stdout


def _cache_folder() -> Path:
    """Return the folder of built libraries. A user who can write there can run code as this user, so it must be
    writable for this user alone. Raises NotCompiled."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        base.mkdir(parents=True, exist_ok=True)
        folder = base / "tandem" / "kernels"
        for part in (folder.parent, folder):
            part.mkdir(mode=0o700, exist_ok=True)
            _require_ours(part)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        raise NotCompiled(f"no folder for built libraries: {error}") from error
    return folder


def _require_ours(path: Path) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise NotCompiled(f"{path} cannot be read: {error.strerror}") from error
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(found.st_mode):
        raise NotCompiled(f"{path} must belong to this user and be writable by no other user")


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it gave no reason")
