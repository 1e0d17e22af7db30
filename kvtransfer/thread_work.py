"""Work on the threads of an executor that never runs once its caller has been told that it could not be started.

`ThreadPoolExecutor.submit` queues a call before it starts a thread for it. If no thread can be started it raises, and
another thread of the executor runs the call later all the same. By then the caller has returned the blocks to which
the call writes.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def submit(
    executor: ThreadPoolExecutor,
    call: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> "Future[Result]":
    """Queue a call and return its future. If this raises (RuntimeError, MemoryError), the call never runs."""
    future: Future[Result] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # the future's owner handles it
            future.set_exception(error)

    def end(queued: "Future[None]") -> None:
        """End the future also where `run` did not: the executor was shut down, or had no memory to call it."""
        if queued.cancelled():
            future.cancel()
        elif (error := queued.exception()) is not None and not future.done():
            future.set_exception(error)

    try:
        executor.submit(run).add_done_callback(end)
    except BaseException:
        if future.cancel():
            raise
    return future  # also if another thread of the executor has begun it meanwhile
