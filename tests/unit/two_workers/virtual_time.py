"""An event loop whose time passes only when there is nothing else to do: hours of leases in milliseconds, no waiting.

Everything on it must run on it: a thread that works beside it would see time rush by. `Inline` stands in for pools of
threads.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

Result = TypeVar("Result")
_LAST_THREADS_S = 10.0  # what closes may end its threads


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.virtual_s


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Would wait: the time it would have waited for has passed."""
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0 if timeout is not None else _LAST_THREADS_S)
        if timeout is None:
            assert ready, "nothing can happen any more: everybody waits for somebody else"
        elif not ready and timeout > 0:
            self._loop.virtual_s += timeout + 1e-9
        return ready


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


class LoopClock:
    """A worker's own clock: the loop's time, and what it is ahead of it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s


class Inline(Executor):
    """Works at once, on the loop's own thread."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments, **keywords))
        except Exception as error:  # noqa: BLE001 -- as a pool of threads would
            future.set_exception(error)
        return future
