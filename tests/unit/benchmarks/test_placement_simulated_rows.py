"""Points of simulated placement that are complete are not measured again."""

from pathlib import Path

import pytest

from benchmarks.placement.simulated_rows import KeptRows, Row


def row(name: str) -> Row:
    return Row(name, {"auto": [0.5, 0.75]}, [0.1], [0.2, 0.3])


def fails() -> Row:
    raise AssertionError("a complete point was measured again")


def test_an_interrupted_run_goes_on_with_the_points_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    KeptRows(path, "code").measured("first", lambda: row("first"))
    with pytest.raises(KeyboardInterrupt):
        KeptRows(path, "code").measured("second", interrupted)
    again = KeptRows(path, "code")
    assert again.measured("first", fails) == row("first")
    assert again.measured("second", lambda: row("second")) == row("second")
    assert KeptRows(path, "code").measured("second", fails) == row("second")


def interrupted() -> Row:
    raise KeyboardInterrupt


def test_points_of_other_code_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    KeptRows(path, "before").measured("point", lambda: row("before"))
    assert KeptRows(path, "after").measured("point", lambda: row("after")) == row("after")


def test_without_a_file_nothing_is_kept() -> None:
    KeptRows(None, "code").measured("point", lambda: row("point"))
    assert KeptRows(None, "code").measured("point", lambda: row("other")) == row("other")
