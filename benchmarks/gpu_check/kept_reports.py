"""A plugin of pytest that keeps what became of each test as it ends, so that a run that is cut still tells.

`--keep-reports FILE`: one JSON object per line (`Kept`). With pytest-xdist the file is written by the process that
gives out the tests; one that computes them ends itself once its GPU is lost, for every later test of it would fail of
that, and another one takes its place. Tests marked `whole_gpu` wait for each other, whichever process computes them:
pytest-xdist's own groups end in a hang where a process is lost.
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
    """`outcome`: passed, failed or skipped. `text`: a skip's reason, or a failure with what was printed."""

    name: str
    outcome: str
    seconds: float
    text: str


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-reports", default="", help="a line of JSON for each test, into this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--keep-reports") and not _computes_for_another(config):
        config.pluginmanager.register(_Keeper(Path(config.getoption("--keep-reports"))), "tandem-keeper")


class _Keeper:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's account is its call's, or that of the first other part that did not pass."""
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
    """Its reports are with the other process by the time it returns. The wait for the GPU is not the test's time."""
    with _alone() if item.get_closest_marker("whole_gpu") else nullcontext():
        result = yield
    if _computes_for_another(item.config):
        if _gpu_is_lost():
            os._exit(1)
        _give_back()
    return result


@contextmanager
def _alone() -> Iterator[None]:
    """The lock goes with the process that has it."""
    with (Path(tempfile.gettempdir()) / f"tandem-whole-gpu-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _computes_for_another(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")  # pytest-xdist's own; its variable reaches the processes that a test starts


def _gpu_is_lost() -> bool:
    """An illegal access or a failed assertion of a kernel leaves the process no context."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _give_back() -> None:
    """What torch keeps of a test's memory: processes share the device."""
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
    """Beginning and end: where it was, and what it came to."""
    half = _LONGEST // 2
    return (
        text if len(text) <= _LONGEST else f"{text[:half]}\n... {len(text) - _LONGEST} characters ...\n{text[-half:]}"
    )
