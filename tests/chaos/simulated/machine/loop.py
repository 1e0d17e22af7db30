"""The event loop on which simulated processes run, are stopped, and die, in simulated time.

Every callback belongs to the process in whose context it was created. Within a process callbacks keep their order, as
asyncio promises; among processes the seed chooses. Time advances only when nothing can run. The callbacks of a killed
process never run again: nothing of it is closed or released, as with SIGKILL.
"""

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from random import Random
from typing import Any

_PROCESS: "contextvars.ContextVar[Process]" = contextvars.ContextVar("process")
_MAX_AT_ONCE = 200_000  # callbacks at one moment; more than this is an endless loop
_REFUSED = 0.5  # of the large allocations, where memory is short
_TICK_S = 1e-9  # the least advance: a wait shorter than the clock's last bit ends, as on a real machine


class Process:
    """An incarnation of a simulated process. Its successor runs at the same `place`."""

    def __init__(self, place: str, number: int = 0) -> None:
        self.place, self.number = place, number
        self.is_alive = True
        self.is_stopped = False
        self.clock_ahead_s = 0.0  # offset of its wall clock
        self.clock_tick_s = 0.0  # the step in which the time of its event loop advances; 0: none
        self.fails_in_step = False  # the next one
        self.hangs_in_step_s = 0.0  # the next one
        self.hangs = asyncio.Event()  # set when the hang begins
        self.fails_reads = False  # of other workers' KV
        self.num_refusals = 0  # large allocations that will fail
        self.step_s = 0.0  # the longest, beside its tokens
        self.token_s = 0.0  # per token of a step
        self.ready: deque[asyncio.Handle] = deque()
        self.is_queued = False
        self.tasks: list[
            asyncio.Task[Any]
        ] = []  # kept: a collected task would be closed, and a dead process closes nothing
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)

    def __str__(self) -> str:
        return f"{self.place}#{self.number}" if self.number else self.place

    @property
    def runs(self) -> bool:
        return self.is_alive and not self.is_stopped

    @property
    def unfinished(self) -> list[asyncio.Task[Any]]:
        return [task for task in self.tasks if not task.done()]


def current() -> Process:
    """Return the process whose callback runs now."""
    return _PROCESS.get()


class Counted:
    """An object whose hash is the same in every run, so that sets of tasks have the same order when a seed is
    replayed."""

    numbers = itertools.count()
    _number = -1

    def __hash__(self) -> int:
        if self._number < 0:
            self._number = next(Counted.numbers)
        return self._number


class _Task(Counted, asyncio.Task):  # type: ignore[type-arg]
    pass


class _Future(Counted, asyncio.Future):  # type: ignore[type-arg]
    pass


class _Callback(asyncio.TimerHandle):
    """Handle of asyncio without the attributes that only its debug mode uses."""

    __slots__ = ()

    def __init__(
        self, when_s: float, callback: Any, args: Any, loop: "SimulatedLoop", context: contextvars.Context | None
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._callback, self._args, self._loop, self._when = callback, args, loop, when_s
        self._cancelled, self._repr, self._source_traceback = False, None, None

    def cancel(self) -> None:
        self._cancelled, self._callback, self._args = True, None, ()


class Stuck(AssertionError):
    """No callback can run any more, or simulated time does not advance."""


class SimulatedLoop(asyncio.BaseEventLoop):
    def __init__(self, dice: Random) -> None:
        super().__init__()
        Counted.numbers = itertools.count()
        self._dice = dice
        self.now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._serial = itertools.count()
        self._runnable: list[Process] = []
        self.num_run = 0
        # Connects a protocol of this factory to an address, as `create_connection` does; raises OSError.
        self.connect: Callable[[Callable[[], Any], str], Coroutine[Any, Any, Any]]
        self.world = Process("world")
        self.set_exception_handler(lambda _, context: self.errors.append(context))
        self.errors: list[dict[str, Any]] = []  # unhandled exceptions
        self._owners: dict[int, Process] = {}  # of async generators that have begun, by id

    def time(self) -> float:
        tick_s = _PROCESS.get(self.world).clock_tick_s
        return self.now_s // tick_s * tick_s if tick_s else self.now_s

    def spend(self, seconds: float) -> None:
        """Let the present callback take this many seconds."""
        self.now_s += seconds

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Callback(self.now_s, callback, args, self, context)
        self._put(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Callback(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._serial), timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> "asyncio.Task[Any]":
        task = _Task(coro, loop=self, name=name, context=context)
        (current() if context is None else context[_PROCESS]).tasks.append(task)
        return task

    def create_future(self) -> "asyncio.Future[Any]":
        return _Future(loop=self)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run the work of a thread after a short delay."""
        threads = executor if isinstance(executor, Threads) else Threads(allocates=False)
        return asyncio.wrap_future(threads.submit(func, *args), loop=self)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self.connect(protocol_factory, f"{host}:{port}")

    async def create_server(self, protocol_factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:
        """Accept connections at a simulated socket, which is its own server."""
        sock.factory = protocol_factory
        return sock

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        """Start a task of another process."""
        return self.create_task(work, name=name, context=process.context)

    def kill(self, process: Process) -> None:
        process.is_alive = False
        process.ready.clear()
        for task in process.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    def stop_process(self, process: Process) -> None:
        process.is_stopped = True

    def wake(self, process: Process) -> None:
        process.is_stopped = False
        self._queue(process)

    def is_refused_memory(self) -> bool:
        """Return whether a large allocation of this process fails."""
        process = current()
        is_refused = process.num_refusals > 0 and self._dice.random() < _REFUSED
        process.num_refusals -= is_refused
        return is_refused

    def soon_s(self, most_s: float) -> float:
        """Return a random short delay. Most are much shorter than the longest."""
        return most_s * float(self._dice.random()) ** 3

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        super()._asyncgen_firstiter_hook(agen)  # type: ignore[misc]
        self._owners[id(agen)] = _PROCESS.get(self.world)

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """Close an async generator that its process has dropped, in that process; a dead process closes nothing."""
        owner = self._owners.pop(id(agen), self.world)
        if owner.is_alive and not self.is_closed():
            self.call_soon(self.create_task, agen.aclose(), context=owner.context)

    def _put(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(_PROCESS, self.world)  # type: ignore[attr-defined]
        if process.is_alive:
            process.ready.append(handle)
            self._queue(process)

    def _queue(self, process: Process) -> None:
        if process.ready and not process.is_queued:
            process.is_queued = True
            self._runnable.append(process)

    def _run_once(self) -> None:
        """Run until the loop is stopped."""
        runnable, random, num_at_once = self._runnable, self._dice.random, 0
        while not self._stopping:  # type: ignore[attr-defined]
            if not runnable:
                self._pass_time()
                num_at_once = 0
                continue
            place = int(random() * len(runnable)) if len(runnable) > 1 else 0
            process = runnable[place]
            if not process.is_alive or process.is_stopped or not process.ready:
                process.is_queued = False
                runnable[place] = runnable[-1]
                runnable.pop()
                continue
            handle = process.ready.popleft()
            if not handle._cancelled:
                handle._run()
                self.num_run += 1
                num_at_once += 1
                if num_at_once > _MAX_AT_ONCE:
                    raise Stuck(f"time stands still at {self.now_s:.3f} s: the last callback was {handle!r}")

    def _pass_time(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Stuck("nothing can happen any more: every task waits for another one")
        self.now_s = max(self.now_s + _TICK_S, timers[0][0])
        while timers and timers[0][0] <= self.now_s:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                self._put(timer)


class Threads(Executor):
    """A pool of one thread. It runs work in the order of submission, after a short delay, in the process that submitted
    it."""

    def __init__(self, *_: object, most_s: float = 0.002, allocates: bool = True) -> None:
        """`allocates`: the work needs a large allocation, which fails when memory is short."""
        self._most_s, self._allocates = most_s, allocates
        self._free_at_s = 0.0
        self._pending: dict[Future[Any], asyncio.TimerHandle] = {}

    def submit(self, work: Callable[..., Any], /, *args: Any, **keywords: Any) -> "Future[Any]":
        """Queue the work. While memory is short no thread starts, and the next thread that starts does the work."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        is_refused = self._allocates and loop.is_refused_memory()
        future: Future[Any] = Future()
        self._free_at_s = max(self._free_at_s, loop.now_s) + loop.soon_s(self._most_s)
        self._pending[future] = loop.call_at(self._free_at_s, self._do, future, work, args, keywords)
        if is_refused:
            raise RuntimeError("can't start new thread")
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future, timer in tuple(self._pending.items()):
                timer.cancel()
                future.cancel()

    def _do(self, future: "Future[Any]", work: Callable[..., Any], args: Any, keywords: Any) -> None:
        self._pending.pop(future, None)
        if not future.set_running_or_notify_cancel():
            return
        try:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimulatedLoop)
            if self._allocates and loop.is_refused_memory():
                raise MemoryError
            future.set_result(work(*args, **keywords))
        except Exception as error:  # noqa: BLE001 -- as a real thread pool does
            future.set_exception(error)
