"""Builds C sources once per machine and loads the library. Knows no kernel.

Owns the compiler's command, the cache of built libraries and the check that no other user could have written one. An
image without a compiler finds a library that was built beside the sources.
"""

import ctypes
import errno
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.process import full_disk

_LOG = logging.getLogger("tandem.kernels")
_FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_TIMEOUT_S = 120.0

Signature = tuple[type | None, tuple[type, ...]]  # the types of the result and of the arguments


class NotCompiled(Exception):
    """There is no compiled form for this processor, device or model. The message is a short reason, which a worker
    prints at its start.
    """


@dataclass(frozen=True, slots=True)
class CompiledLibrary:
    """A library built from all .c and .h files of one folder. It exports td_version() beside its functions.

    The files are read when this is created, with the module that calls the library: a process that was forked from an
    older one builds the sources of the code that it runs, even if others were installed in their place since."""

    name: str  # the file's name begins with it
    folder: Path
    signatures: Mapping[str, Signature]
    version: int  # of the contract between the sources and their caller
    sources: Mapping[str, bytes] = field(init=False)  # by file name

    def __post_init__(self) -> None:
        paths = sorted([*self.folder.glob("*.c"), *self.folder.glob("*.h")])
        object.__setattr__(self, "sources", {path.name: path.read_bytes() for path in paths})

    def load(self) -> ctypes.CDLL:
        """Load the library beside the sources, else the cached one, else build it. Raises NotCompiled."""
        self._require_sources()
        beside = self.folder / self._file_name()
        if beside.is_file():
            return self._loaded(beside)
        compiler = _compiler()
        cached = _cache_folder() / self._file_name(_version_of(compiler))
        if not cached.exists():
            _LOG.info("compiling %s for this machine; later starts find it in %s", self.name, cached.parent)
            _build(compiler, self.sources, cached)
        _require_ours(cached)
        return self._loaded(cached)

    def build_in(self, folder: Path) -> int:
        """Build a library that detects the processor when it runs. Returns the exit status."""
        try:
            self._require_sources()
            _build(_compiler(), self.sources, folder / self._file_name())
        except NotCompiled as why:
            print(f"no kernels: {why}", file=sys.stderr)  # noqa: T201 - run as a program
            return 1
        return 0

    def _require_sources(self) -> None:
        if not any(name.endswith(".c") for name in self.sources):
            raise NotCompiled("the kernels' sources are not installed")

    def _file_name(self, compiler_version: str = "") -> str:
        digest = hashlib.blake2b(repr((_FLAGS, compiler_version)).encode(), digest_size=12)
        for name, text in self.sources.items():
            digest.update(name.encode() + b"\0" + text)
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


def _build(compiler: str, sources: Mapping[str, bytes], target: Path) -> None:
    """Build the library and put it in place atomically; if several workers build at the same time, the file of the last
    one remains. Raises NotCompiled."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            folder = Path(name)
            for file_name, text in sources.items():
                (folder / file_name).write_bytes(text)
            unfinished = folder / target.name
            c_files = [str(folder / file_name) for file_name in sources if file_name.endswith(".c")]
            command = [compiler, *_FLAGS, "-o", str(unfinished), *c_files, "-lm"]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
            if ended.returncode:
                raise NotCompiled(f"{Path(compiler).name} failed: {_first_error(ended.stderr)}")
            os.chmod(unfinished, 0o755)
            os.replace(unfinished, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        if isinstance(error, OSError) and full_disk(error):
            raise NotCompiled(f"{target.parent} has no space left; free some there") from error
        raise NotCompiled(f"{Path(compiler).name} could not be run: {error}") from error


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
    causes = (os.strerror(errno.ENOSPC), "error")  # the linker's last line has the word, and not the cause
    found = (line for cause in causes for line in lines if cause in line)
    return next(found, lines[0] if lines else "it gave no reason")
