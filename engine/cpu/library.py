"""Builds the C kernels of this folder once per machine and loads them.

Owns the compiler's command, the cache of built libraries, and the declaration of every function and struct of
kernels.h; independent of models. `python -m engine.cpu.library FOLDER` builds the library into a folder instead; an
image without a compiler finds it beside the sources.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from engine.decoders.traced_calls import NotCompiled

VERSION = 1  # of the contract in kernels.h
_FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_TIMEOUT_S = 120.0
_SOURCES = Path(__file__).parent
_pointer, _integer, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_floats, _bf16s, _address = _pointer, _pointer, _pointer


class Product(ctypes.Structure):
    _fields_ = (("panels", _pointer), ("bias", _pointer), ("in_features", _integer), ("out_features", _integer))


class Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", _pointer),
        ("query_norm", _pointer),
        ("key_norm", _pointer),
        ("attention_out_norm", _pointer),
        ("ffn_norm", _pointer),
        ("ffn_out_norm", _pointer),
        ("qkv", Product),
        ("out", Product),
        ("gate_up", Product),
        ("down", Product),
        ("keys", _pointer),
        ("values", _pointer),
        ("window", _integer),
        ("rotary", _integer),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("num_layers", _integer),
        ("hidden", _integer),
        ("num_heads", _integer),
        ("num_kv_heads", _integer),
        ("head_dim", _integer),
        ("intermediate", _integer),
        ("rotary_dim", _integer),
        ("activation", _integer),
        ("norms_whole_rows", _integer),
        ("norm_eps", _float),
        ("scaling", _float),
        ("softcap", _float),
        ("block_size", _integer),
        ("block_elems", _integer),
        ("layers", ctypes.POINTER(Layer)),
        ("final_norm", _pointer),
        ("head", Product),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("num_tokens", _integer),
        ("num_sequences", _integer),
        ("num_logit_rows", _integer),
        ("table_stride", _integer),
        ("slot_blocks", _pointer),
        ("slot_offsets", _pointer),
        ("block_tables", _pointer),
        ("query_starts", _pointer),
        ("context_lens", _pointer),
        ("logit_rows", _pointer),
        ("cos", _pointer * 2),
        ("sin", _pointer * 2),
        ("hidden", _pointer),
        ("logits", _pointer),
        ("scratch", _pointer),
    )


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "td_version": (_integer, ()),
    "td_supported": (_integer, ()),
    "td_packed_elems": (_integer, (_integer, _integer)),
    "td_pack": (None, (_bf16s, _integer, _integer, _integer, _bf16s)),
    "td_pack_gate_up": (None, (_bf16s, _integer, _bf16s, _integer, _integer, _integer, _bf16s)),
    "td_scratch_bytes": (_integer, (ctypes.POINTER(Model), _integer)),
    "td_run": (None, (ctypes.POINTER(Model), ctypes.POINTER(Step))),
    "td_linear_scratch_bytes": (_integer, (_integer,)),
    "td_draw_scratch_bytes": (_integer, (_integer,)),
    "td_draw": (None, (_address, _integer)),
    "td_linear": (None, (_bf16s, _integer, ctypes.POINTER(Product), _floats, _address)),
}


def load_kernels() -> ctypes.CDLL:
    """Load the library for all its kernels. Raises NotCompiled."""
    library = load_library()
    if not library.td_supported():
        raise NotCompiled("this processor has no AVX-512 BF16")
    return library


def load_library() -> ctypes.CDLL:
    """Load the library beside the sources, else the cached one, else build it. Its drawing functions run on any
    processor. Raises NotCompiled."""
    sources = _sources()
    beside = _SOURCES / _name(sources)
    if beside.is_file():
        return _loaded(beside)
    compiler = _compiler()
    folder = _cache_folder()
    cached = folder / _name(sources, _version_of(compiler))
    if not cached.exists():
        build(compiler, sources, cached)
    _require_ours(cached)
    return _loaded(cached)


def build(compiler: str, sources: list[Path], target: Path) -> None:
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


def _sources() -> list[Path]:
    sources = sorted([*_SOURCES.glob("*.c"), *_SOURCES.glob("*.h")])
    if not any(path.suffix == ".c" for path in sources):
        raise NotCompiled("the kernels' sources are not installed")
    return sources


def _name(sources: list[Path], compiler_version: str = "") -> str:
    digest = hashlib.blake2b(repr((_FLAGS, compiler_version)).encode(), digest_size=12)
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"kernels-{digest.hexdigest()}.so"


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


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NotCompiled(f"{path.name} cannot be loaded: {error}") from error
    if library.td_version() != VERSION:
        raise NotCompiled(f"{path.name} is of another version")
    return library


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it gave no reason")


def main(folder: str) -> int:
    """Build a library that detects the processor when it runs. Returns the exit status."""
    try:
        sources = _sources()
        build(_compiler(), sources, Path(folder) / _name(sources))
    except NotCompiled as why:
        print(f"no kernels: {why}", file=sys.stderr)  # noqa: T201 - run as a program
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or [str(_SOURCES)])))
