"""The kernels' library is built once, found again, and never loaded from a place where other users can write; every
reason for a missing library has a name. The tests use a library of a few lines; test_cpu_kernels.py tests the real one.
"""

import os
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.compiled_library import NotCompiled
from engine.cpu import library
from engine.cpu.library import load_kernels, main

SOURCE = """
long td_version(void) {{ return {version}; }}
long td_supported(void) {{ return {supported}; }}
{others}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder, with sources for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(library, "_LIBRARY", replace(library._LIBRARY, folder=tmp_path / "sources"))
    (tmp_path / "sources").mkdir()
    write_source()
    import_again()
    return tmp_path / "cache" / "tandem" / "kernels"


def write_source(version: int = library.VERSION, supported: int = 256) -> None:
    others = "\n".join(f"void {name}(void) {{}}" for name in library._SIGNATURES if name != "td_supported")
    text = SOURCE.format(version=version, supported=supported, others=others)
    (library._LIBRARY.folder / "kernels.c").write_text(text)


def import_again() -> None:
    """Read the sources, as the import of the module does."""
    library._LIBRARY = replace(library._LIBRARY)


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


needs_compiler = pytest.mark.skipif(
    not any(os.access(Path(folder) / "cc", os.X_OK) for folder in os.get_exec_path()), reason="no compiler here"
)


@needs_compiler
def test_the_library_is_built_once_and_reused(cache: Path) -> None:
    assert load_kernels().width == 256
    built = [(path.name, path.stat().st_mtime_ns) for path in cache.iterdir()]
    assert load_kernels().width == 256

    assert [(path.name, path.stat().st_mtime_ns) for path in cache.iterdir()] == built
    assert len(built) == 1


@needs_compiler
def test_changed_sources_build_another_library(cache: Path) -> None:
    load_kernels()
    (library._LIBRARY.folder / "more.h").write_text("/* nothing */")
    import_again()
    load_kernels()
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_a_process_builds_the_sources_of_the_code_that_it_has_imported(cache: Path) -> None:
    write_source(version=library.VERSION + 1)
    assert load_kernels().width == 256
    import_again()
    with pytest.raises(NotCompiled, match="is of another version"):
        load_kernels()


@needs_compiler
def test_workers_that_start_at_once_leave_one_library(cache: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        loaded = [future.result() for future in [threads.submit(load_kernels) for _ in range(4)]]
    assert [kernels.width for kernels in loaded] == [256] * 4
    assert len(list(cache.iterdir())) == 1


@needs_compiler
def test_without_a_compiler_the_library_beside_the_sources_is_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(str(library._LIBRARY.folder)) == 0
    monkeypatch.setenv("PATH", str(cache))
    assert load_kernels().width == 256
    assert not cache.exists()


def test_a_missing_compiler_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(NotCompiled, match=r"^no compiler found$"):
        load_kernels()
    monkeypatch.setenv("CC", "their-cc")
    with pytest.raises(NotCompiled, match=r"no compiler found: \$CC is their-cc"):
        load_kernels()


def test_a_failed_compilation_is_quoted_and_leaves_no_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = '[ "$1" = --version ] || { echo "In file x.h" >&2; echo "kernels.c:1: error: no such thing" >&2; exit 1; }'
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    with pytest.raises(NotCompiled, match=r"^compiler failed: kernels.c:1: error: no such thing$"):
        load_kernels()
    assert list(cache.iterdir()) == []


def test_missing_sources_are_named(cache: Path) -> None:
    (library._LIBRARY.folder / "kernels.c").unlink()
    import_again()
    with pytest.raises(NotCompiled, match="sources are not installed"):
        load_kernels()


@needs_compiler
def test_a_processor_without_the_instructions_is_named(cache: Path) -> None:
    write_source(supported=0)
    import_again()
    with pytest.raises(NotCompiled, match="this processor has no AVX2"):
        load_kernels()


@needs_compiler
def test_a_library_that_other_users_may_write_is_not_loaded(cache: Path) -> None:
    load_kernels()
    (built,) = cache.iterdir()
    for path in (built, cache, cache.parent):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | stat.S_IWOTH)
        with pytest.raises(NotCompiled, match="must belong to this user and be writable by no other user"):
            load_kernels()
        path.chmod(mode)
    load_kernels()


def test_a_missing_folder_for_the_cache_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("CC", compiler(tmp_path, "exit 0"))
    with pytest.raises(NotCompiled, match="no folder for built libraries"):
        load_kernels()


@pytest.mark.parametrize("package", ["engine.cpu", "kvtransfer"])
def test_the_kernels_sources_are_installed(package: str) -> None:
    root = Path(__file__).parents[4]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][package]
    folder = root / package.replace(".", "/")
    sources = [path.relative_to(folder) for path in folder.rglob("*.[ch]")]
    assert sources
    assert [str(path) for path in sources if not any(path.match(pattern) for pattern in patterns)] == []
