"""The kept digest of a model's weights is used for the very same files only."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.model.loaded import WeightFiles

_NAME = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / _NAME).write_text("weights")
    return folder


class Hashing:
    """Computes the present digest of the weights, and counts the calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.times = 0

    def __call__(self) -> str:
        self.times += 1
        return (self._folder / _NAME).read_text()


def digest(
    folder: Path, compute: Callable[[], str], loaded_as: str = "float32 on cpu", later_s: float = 10.0, least: int = 0
) -> str:
    files = WeightFiles.of(str(folder))
    assert files is not None
    return files.digest(compute, loaded_as, now_s=time.time() + later_s, min_bytes=least)


def test_the_second_start_does_not_hash(folder: Path) -> None:
    compute = Hashing(folder)

    assert [digest(folder, compute) for _ in range(3)] == ["weights"] * 3
    assert compute.times == 1


def test_a_kept_digest_lies_beside_the_weights(folder: Path) -> None:
    digest(folder, Hashing(folder))

    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".tandem-weights.json"]


def rewritten(folder: Path) -> None:
    seen = (folder / _NAME).stat()
    while (folder / _NAME).stat().st_ctime_ns == seen.st_ctime_ns:  # a file system's clock may be coarse
        (folder / _NAME).write_text("WEIGHTS")  # as many bytes, and its old date
        os.utime(folder / _NAME, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def replaced(folder: Path) -> None:
    seen = (folder / _NAME).stat()
    (folder / "new").write_text("WEIGHTS")
    os.utime(folder / "new", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    (folder / "new").replace(folder / _NAME)


def moved(folder: Path) -> None:
    """Replace the folder by other weights, with the digest that was kept for the first ones."""
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    (other / _NAME).write_text("WEIGHTS")
    shutil.rmtree(folder)
    other.rename(folder)


@pytest.mark.parametrize("change", [rewritten, replaced, moved])
def test_other_weights_are_hashed(folder: Path, change: Callable[[Path], None]) -> None:
    compute = Hashing(folder)
    digest(folder, compute)
    assert (folder / ".tandem-weights.json").exists()

    change(folder)

    assert digest(folder, compute) == "WEIGHTS"


def test_a_file_beside_the_weights_that_changes_how_they_are_loaded_counts(folder: Path) -> None:
    compute = Hashing(folder)
    digest(folder, compute)

    (folder / "config.json").write_text('{"dtype": "float16"}')
    digest(folder, compute)
    digest(folder, compute, loaded_as="bfloat16 on cpu")

    assert compute.times == 3


def test_a_change_while_the_weights_are_loaded_is_detected(folder: Path) -> None:
    digest(folder, Hashing(folder))
    files = WeightFiles.of(str(folder))
    assert files is not None
    rewritten(folder)

    assert files.digest(Hashing(folder), "float32 on cpu", now_s=time.time() + 10, min_bytes=0) == "WEIGHTS"


def test_files_changed_a_moment_ago_are_hashed_again(folder: Path) -> None:
    compute = Hashing(folder)

    digest(folder, compute, later_s=0.0)
    digest(folder, compute, later_s=0.0)

    assert compute.times == 2


def test_a_damaged_or_foreign_file_is_no_digest(folder: Path) -> None:
    compute = Hashing(folder)
    digest(folder, compute)
    kept = folder / ".tandem-weights.json"

    kept.chmod(0o666)
    digest(folder, compute)
    kept.write_text("{")
    kept.chmod(0o600)
    digest(folder, compute)

    assert compute.times == 3


def test_a_digest_that_cannot_be_kept_beside_the_weights_is_kept_in_the_users_cache(
    folder: Path, tmp_path: Path
) -> None:
    compute = Hashing(folder)
    (folder / ".tandem-weights.json").mkdir()  # root may write to any folder, but not here

    digest(folder, compute)
    digest(folder, compute)

    assert compute.times == 1
    assert [path.suffix for path in (tmp_path / "cache" / "tandem" / "weights").iterdir()] == [".json"]


def test_small_weights_are_hashed_at_each_start(folder: Path) -> None:
    digest(folder, Hashing(folder), least=1 << 20)

    assert {path.name for path in folder.iterdir()} == {"config.json", _NAME}


@pytest.mark.parametrize("model", ["organisation/name", "nowhere"])
def test_weights_that_are_no_folder_have_no_files(model: str) -> None:
    assert WeightFiles.of(model) is None


def test_an_adapter_names_weights_elsewhere(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")

    assert WeightFiles.of(str(folder)) is None
