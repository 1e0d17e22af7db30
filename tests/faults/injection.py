"""Raise exceptions at every point where a coroutine waits or work goes to another thread, one point per run.

A first run counts the points; each later run raises at one of them. At every point, the code under test must release
everything that it holds.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class When(Enum):
    """The moment of an await at which the fault occurs."""

    BEFORE_ITS_RESULT = auto()
    WITH_ITS_RESULT = auto()  # due in one turn of the loop: the result is lost
    TWICE = auto()  # before its result, and at the next await of the same task, in whichever cleanup that is


class Where(Enum):
    """The place of a submission to an executor at which the fault occurs."""

    NOT_SUBMITTED = auto()
    SUBMITTED_ALL_THE_SAME = auto()  # as where no thread can be started: the work waits in the executor's queue
    BEFORE_THE_WORK = auto()
    AFTER_THE_WORK = auto()


class AwaitFaults:
    """Raises `error` at await number `at` of tasks that run `code`: a folder or file, and after a colon the beginning
    of the coroutine's name. Applies to tasks that are made between `install` and `disarm`."""

    def __init__(self, code: str, at: int = -1, error: type[BaseException] = OSError, when: When | None = None) -> None:
        self.num_awaits = 0
        path, _, self._name = code.partition(":")
        self._path, self._at, self._error, self._when = str(ROOT / path), at, error, when
        self._is_armed = False

    def install(self) -> None:
        asyncio.get_running_loop().set_task_factory(self._make)
        self._is_armed = True

    def disarm(self) -> None:
        self._is_armed = False

    def _make(self, loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
        code = getattr(coro, "cr_code", None)
        is_meant = code is not None and code.co_filename.startswith(self._path)
        if self._is_armed and is_meant and coro.__qualname__.startswith(self._name):
            coro = self._run(coro)
        return asyncio.Task(coro, loop=loop, **more)

    async def _run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        return await _Driven(coro, self)

    def hit(self) -> When | None:
        """Count a new await of any task."""
        number, self.num_awaits = self.num_awaits, self.num_awaits + self._is_armed
        return self._when if number == self._at and self._is_armed else None

    def error(self) -> BaseException:
        return self._error("injected")


class _Driven:
    def __init__(self, coro: Coroutine[Any, Any, Any], faults: AwaitFaults) -> None:
        self._coro, self._faults = coro, faults

    def __await__(self) -> Generator[Any, Any, Any]:
        again = False
        try:
            waited = self._coro.send(None)
            while True:
                when = When.BEFORE_ITS_RESULT if again else self._faults.hit()
                again = when is When.TWICE
                if when in (When.BEFORE_ITS_RESULT, When.TWICE):
                    if waited is not None:
                        waited._asyncio_future_blocking = False
                    waited = self._coro.throw(self._faults.error())
                    continue
                try:
                    sent = yield waited
                except BaseException as error:  # noqa: BLE001 - handed on, whatever it is
                    waited = self._coro.throw(error)
                    continue
                if when is When.WITH_ITS_RESULT:
                    waited = self._coro.throw(self._faults.error())
                else:
                    waited = self._coro.send(sent)
        except StopIteration as stop:
            return stop.value


class SubmitFaults:
    """Raises `error` at submission number `at` to an executor."""

    def __init__(self, at: int = -1, error: type[Exception] = OSError, where: Where | None = None) -> None:
        self.num_submitted = 0
        self._at, self._error, self._where = at, error, where
        self._is_armed = True

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_submit = ThreadPoolExecutor.submit
        faults = self

        def submit(executor: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any) -> Future[Any]:
            where = faults._hit()
            if where is Where.SUBMITTED_ALL_THE_SAME:
                real_submit(executor, work, *args)
            if where in (Where.NOT_SUBMITTED, Where.SUBMITTED_ALL_THE_SAME):
                raise faults._error("injected")
            return real_submit(executor, work if where is None else faults._failing(where, work), *args)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)

    def disarm(self) -> None:
        self._is_armed = False

    def _hit(self) -> Where | None:
        number, self.num_submitted = self.num_submitted, self.num_submitted + self._is_armed
        return self._where if number == self._at and self._is_armed else None

    def _failing(self, where: Where, work: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*args: Any) -> None:
            if where is Where.AFTER_THE_WORK:
                work(*args)
            raise self._error("injected")

        return fail


class CallFaults:
    """A function that raises `error` at its call number `at` and calls the real one otherwise."""

    def __init__(self, real: Callable[..., Any], at: int = -1, error: type[Exception] = OSError) -> None:
        self.num_calls = 0
        self._real, self._at, self._error = real, at, error

    def __call__(self, *args: Any, **named: Any) -> Any:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if number == self._at:
            raise self._error("injected")
        return self._real(*args, **named)
