"""A pytest plugin that stores the result of each test as it ends, so that a run that is cut off leaves its results.

`--keep-reports FILE`: one JSON object per line (`Kept`). With pytest-xdist the controlling process writes the file. A
worker process whose GPU context is lost ends itself, because every later test in it would fail, and another one
replaces it. Tests marked `whole_gpu` run one at a time across processes; pytest-xdist's own groups hang when a process
is lost.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

_LONGEST = 12_000  # characters of one failure


@dataclass(frozen=True, slots=True)
class Kept:
    """One test. `outcome`: passed, failed or skipped. `text`: the reason of a skip, or a failure with the test's
    output."""

    name: str
    outcome: str
    seconds: float
    text: str


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-reports", default="", help="write a line of JSON for each test into this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--keep-reports") and not _computes_for_another(config):
        config.pluginmanager.register(_Keeper(Path(config.getoption("--keep-reports"))), "tandem-keeper")


class _Keeper:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the test's call, or the first other phase that did not pass."""
        if report.when == "call" or not report.passed:
            self._keep(Kept(report.nodeid, report.outcome, report.duration, _text(report)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._keep(Kept(report.nodeid or "collection", "failed", 0.0, _within(report.longreprtext)))

    def _keep(self, kept: Kept) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(kept)) + "\n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process after a test that lost the GPU's context. The wait for the GPU does not count as the test's
    time."""
    with _alone() if item.get_closest_marker("whole_gpu") else nullcontext():
        result = yield
    if _computes_for_another(item.config):
        if _gpu_is_lost():
            os._exit(1)
        _give_back()
    return result


@contextmanager
def _alone() -> Iterator[None]:
    """Hold a file lock, which the system releases when the process ends."""
    with (Path(tempfile.gettempdir()) / f"tandem-whole-gpu-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _computes_for_another(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")  # pytest-xdist's own; its variable reaches the processes that a test starts


def _gpu_is_lost() -> bool:
    """Whether an illegal access or a failed assertion of a kernel has destroyed the process's context."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _give_back() -> None:
    """Release the memory that torch caches, because processes share the device."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _text(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    printed = [f"--- {title} ---\n{content}" for title, content in report.sections]
    return _within("\n".join((report.longreprtext, *printed)))


def _within(text: str) -> str:
    """Return the beginning and the end of a long text."""
    half = _LONGEST // 2
    return (
        text if len(text) <= _LONGEST else f"{text[:half]}\n... {len(text) - _LONGEST} characters ...\n{text[-half:]}"
    )
