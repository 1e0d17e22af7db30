"""A thread for calls that may never return. An executor's threads are joined when the interpreter ends; this one's is
simply left behind."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


class LoneThread:
    """Runs one call after another. Started with the first, and ended by `end`, after those that wait."""

    def __init__(self, name: str, *, idle: Callable[[], None], idle_s: float) -> None:
        """`idle` is called when nothing was asked for so long; it must not raise."""
        self._idle, self._idle_s = idle, idle_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], _Result]) -> "Future[_Result]":
        """What has not begun can be cancelled."""
        future: Future[_Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  (whoever waits for the future is to answer it)
                future.set_exception(error)

        self._calls.put(run)
        return future

    def end(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=self._idle_s)
            except queue.Empty:
                self._idle()
                continue
            if call is None:
                return
            call()
