"""A plugin of pytest that shows what a failed test was waiting for: the stacks of threads and asyncio tasks.

A wait that ends by its deadline reports only the deadline. So while a test runs for long, a thread of the test process
writes down, a few times, the stack of every thread and of every asyncio task. The report of a failed test has the
result as a section; that of a passed test has none. A test that reaches its time limit ends its process without a
report, so the last snapshot before that is printed.
"""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from types import FrameType

import pytest

_TITLE = "Stacks while the test ran"


class StacksOfSlowTests:
    """Keeps the snapshots of the test that runs now. One instance serves one test process."""

    def __init__(
        self,
        *,
        first_s: float = 10.0,
        every_s: float = 20.0,
        most: int = 3,
        limit_s: float,
        spare_s: float = 5.0,
    ) -> None:
        """The first of the `most` snapshots of a test is made after `first_s`: the waits of most tests have deadlines
        of 20 or 60 s. One more is printed `spare_s` before the test's limit, on what is standard error now.
        `limit_s`: of a test that has no mark `timeout`."""
        self._first_s, self._every_s, self._most = first_s, every_s, most
        self._limit_s, self._spare_s = limit_s, spare_s
        self._last_s = 0.0  # of the test that runs now
        self._error_output = os.dup(2)  # tests run with another one
        self._changed = threading.Condition()
        self._began_s: float | None = None  # None: no test runs
        self._test = ""
        self._snapshots: list[str] = []
        threading.Thread(target=self._watch, name="stacks of slow tests", daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        mark = item.get_closest_marker("timeout")
        self._test = item.nodeid
        self._last_s = (float(mark.args[0]) if mark is not None and mark.args else self._limit_s) - self._spare_s
        self._set(time.monotonic())
        try:
            return (yield)
        finally:
            self._set(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        with self._changed:
            if report.failed and self._snapshots:
                report.sections.append((_TITLE, "\n".join(self._snapshots)))
        return report

    def _set(self, began_s: float | None) -> None:
        with self._changed:
            self._began_s, self._snapshots = began_s, []
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while True:
                self._changed.wait(self._due_in_s())
                if self._due_in_s() == 0.0 and self._began_s is not None:
                    self._snapshots.append(_snapshot(time.monotonic() - self._began_s))
                    if len(self._snapshots) > self._most:
                        self._print(f"{self._test} is about to reach its time limit\n{self._snapshots[-1]}\n")

    def _due_in_s(self) -> float | None:
        """Return the time to the next snapshot; None if there will be none."""
        num_made = len(self._snapshots)
        if self._began_s is None or num_made > self._most:
            return None
        due_s = self._first_s + self._every_s * num_made if num_made < self._most else self._last_s
        return max(0.0, self._began_s + due_s - time.monotonic())

    def _print(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._error_output, data) :]


def _snapshot(age_s: float) -> str:
    lines = [f"---- after {age_s:.1f} s"]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines += [f"thread {names.get(ident, ident)}:", *_lines(frame)]
    for task in _tasks():
        frames = task.get_stack()
        lines.append(f"task {task.get_name()}, {task.get_coro()}:")
        lines += [line for frame in frames for line in _lines(frame, only_this=True)]
    return "\n".join(lines)


def _tasks() -> list["asyncio.Task[object]"]:
    """Return the tasks of all event loops that have not ended. asyncio has no public function that returns those of
    other threads.
    """
    for _ in range(100):
        try:
            return [task for task in list(asyncio.tasks._all_tasks) if not task.done()]  # type: ignore[attr-defined]
        except RuntimeError:  # a task began or ended in the meantime
            continue
    return []


def _lines(frame: FrameType, *, only_this: bool = False) -> list[str]:
    stack = traceback.StackSummary.extract([(frame, frame.f_lineno)]) if only_this else traceback.extract_stack(frame)
    return [line.rstrip("\n") for line in traceback.format_list(stack)]
