"""Work on an executor whose future always ends."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvtransfer.thread_work import submit

_DEADLINE_S = 20.0


def test_work_that_waits_when_its_executor_is_shut_down_ends_as_cancelled() -> None:
    executor, may_end = ThreadPoolExecutor(1), threading.Event()
    running, waiting = submit(executor, may_end.wait, _DEADLINE_S), submit(executor, may_end.wait)
    executor.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    may_end.set()
    assert running.result(_DEADLINE_S)


def test_work_that_its_thread_could_not_begin_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real_submit = ThreadPoolExecutor.submit

    def no_memory(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda executor, _: real_submit(executor, no_memory))
    with ThreadPoolExecutor(1) as executor, pytest.raises(MemoryError):
        submit(executor, int).result(_DEADLINE_S)
