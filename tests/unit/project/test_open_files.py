"""Tests that the files of ended tests are closed although these are left to the garbage collector."""

import gc
import os
import weakref
from collections.abc import Iterator

import pytest

from tests.open_files import OpenFiles


class _Owner:
    """An object in a cycle with a file that is closed when it is collected, as that of a KV pool is."""

    def __init__(self) -> None:
        self.itself = self
        self.file = weakref.finalize(self, os.close, os.memfd_create("left"))


def _left_files() -> "list[weakref.finalize[[int], _Owner]]":
    return [_Owner().file for _ in range(100)]


@pytest.fixture
def no_collection_by_itself() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection_by_itself")
def test_files_that_a_test_left_are_closed_once_they_are_many() -> None:
    plugin = OpenFiles(most_left=10)
    plugin.pytest_runtest_logfinish()  # what is open now is kept
    files = _left_files()
    assert all(file.alive for file in files)
    plugin.pytest_runtest_logfinish()
    assert not any(file.alive for file in files)
