"""Structured concurrency: tasks that live exactly as long as the block that started them, and a signal for which many
tasks can wait.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from types import TracebackType
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class running(Generic[Answer]):  # a generator would cost each request four times as much
    """Run `work` as a task that is cancelled when the `async with` block ends. The block gets the task."""

    def __init__(self, work: Coroutine[Any, Any, Answer]) -> None:
        self._work = work

    async def __aenter__(self) -> asyncio.Task[Answer]:
        self._task = asyncio.create_task(self._work)
        return self._task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await end(self._task)


async def end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks and wait until they have ended. Those that have ended already cost no wait."""
    for task in tasks:
        task.cancel()
    if present := [task for task in tasks if not task.done()]:
        await asyncio.gather(*present, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # who wanted it has it: asyncio must not report it


@asynccontextmanager
async def branches() -> AsyncIterator[asyncio.TaskGroup]:
    """Run tasks that are started one by one. The block ends when all have ended. The first error, of a task or of the
    block, cancels the others and is raised."""
    task = asyncio.current_task()
    assert task is not None
    num_cancels = task.cancelling()
    try:
        async with _Branches() as group:
            yield group
            await group.until_all_ended()
    except ExceptionGroup as errors:
        if task.cancelling() > num_cancels:  # from outside: a group that has errors forgets it
            task.uncancel()
            task.cancel()
        raise errors.exceptions[0] from errors


class _Branches(asyncio.TaskGroup):
    """A task group whose tasks end before its block does.

    `TaskGroup.__aexit__` of Python 3.11 and 3.12 leaves the task that waits there marked as cancelled when one of its
    tasks fails, and every `asyncio.timeout` around it then raises CancelledError instead of TimeoutError.
    """

    def __init__(self) -> None:
        super().__init__()
        self._started: set[asyncio.Task[Any]] = set()

    def create_task(
        self,
        coro: Generator[Any, None, Answer] | Coroutine[Any, Any, Answer],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Answer]:
        task = super().create_task(coro, name=name, context=context)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return task

    async def until_all_ended(self) -> None:
        while self._started:
            await asyncio.wait(self._started)


async def all_of(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all at once. The first error cancels the others and is raised."""
    async with branches() as group:
        for work in works:
            group.create_task(work)


async def first_done(
    *waits: "asyncio.Future[Any]", timeout_s: float | None = None, changes: "Iterable[ChangeSignal]" = ()
) -> None:
    """Wait until one of these is done, for `timeout_s` at most, or until one of the changes. No future is cancelled or
    read. It does what asyncio.wait does at a third of the cost, because it returns nothing."""
    for wait in waits:
        if wait.done():
            return
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    for wait in waits:
        wait.add_done_callback(wake)
    for change in changes:
        change.add(wake)
    try:
        await woken
    finally:
        if timer is not None:
            timer.cancel()
        for wait in waits:
            wait.remove_done_callback(wake)
        for change in changes:
            change.remove(wake)


class ChangeSignal:
    """A signal for tasks that wait for the next change. `next` costs a waiter no task, because all waiters share one
    future. A wait that most often ends without a change is given the signal itself (`first_done`): to leave the shared
    future, it would look at every other waiter.
    """

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None
        self._called: dict[Callable[[], None], None] = {}  # in order of their beginning: a simulation replays it

    @contextmanager
    def calling(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Call `on_change` at each change, until the `with` block ends."""
        self.add(on_change)
        try:
            yield
        finally:
            self.remove(on_change)

    def add(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` at each change, until it is removed."""
        self._called[on_change] = None

    def remove(self, on_change: Callable[[], None]) -> None:
        del self._called[on_change]

    def next(self) -> "asyncio.Future[None]":
        """Return the future of the next change. It is shared: give it to `first_done`, and never await it directly,
        because cancelling the task would cancel it for all."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    async def wait(self) -> None:
        """Wait for the next change."""
        await asyncio.shield(self.next())

    def set(self) -> None:
        """Wake every task that waits for the change, and make the calls."""
        changed, self._next = self._next, None
        if changed is not None:
            changed.set_result(None)
        for on_change in tuple(self._called):
            on_change()
