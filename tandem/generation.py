"""A running generation, for blocking readers and for readers on an event loop.

It continues at another router when its own is lost.
"""

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import grpc

from tandem.errors import Cancelled, TandemError, Unavailable, error_from_rpc
from tandem.keepalive import KEEPALIVE_KEY, KeepAliveTimer, keepalive_interval_s
from tandem.keepalive_watch import KeepAliveWatch, waiting
from tandem.progress import Progress
from tandem.results import Delta, Result
from tandem.routers import Routers
from tandem.v1 import inference_pb2

Metadata: TypeAlias = tuple[tuple[str, str], ...]
# Any other status comes from a router that responds.
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_AsyncCall: TypeAlias = "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"


def trace_context() -> Metadata:
    """Return the W3C context of the caller's current span as metadata; empty if the program does not use
    OpenTelemetry, or has no span now."""
    if "opentelemetry" not in sys.modules:
        return ()
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return (("traceparent", carrier["traceparent"]),) if "traceparent" in carrier else ()


class _Call(Protocol):
    """The stream of responses of gRPC's blocking client."""

    def __next__(self) -> inference_pb2.GenerateResponse: ...

    def cancel(self) -> bool: ...

    def initial_metadata(self) -> Collection[tuple[str, str | bytes]] | None: ...


@dataclass(frozen=True, slots=True)
class CallParameters:
    """The request, the routers to send it to, and the timeouts."""

    request: inference_pb2.GenerateRequest
    routers: Routers[Any]  # of blocking channels, or of asyncio's
    metadata: Metadata
    timeout_s: float
    connect_timeout_s: float  # for the first response of any router
    keepalive_timeout_s: float  # for routers that send keep-alive messages

    def metadata_with_keepalive(self) -> Metadata:
        return (*self.metadata, (KEEPALIVE_KEY, f"{keepalive_interval_s(self.keepalive_timeout_s):g}"))

    def progress(self) -> Progress:
        now_s, routers = time.monotonic(), self.routers
        return Progress(
            self.request,
            known=routers.known,
            router=routers.first,
            deadline_s=now_s + self.timeout_s,
            connect_by_s=now_s + self.connect_timeout_s,
            is_reached=lambda: routers.is_reached,
        )


class _BaseGeneration:
    """The parts of both generations: the received output, and the call to the present router."""

    def __init__(self, parameters: CallParameters) -> None:
        self._parameters = parameters
        self._progress = parameters.progress()
        self._pending: deque[Delta] = deque()
        self._has_metadata = False
        self._failure: TandemError | None = None  # the error that ended the generation: each later read raises it again
        self._reading = threading.Lock()  # held while a reader waits; gRPC fails the call of two of them

    @property
    def request_id(self) -> str:
        """Return the request's id. It changes only if the id was still live at a router after the first router was
        lost.
        """
        return self._progress.request.request_id

    def _begin_call(self) -> tuple[Any, KeepAliveTimer]:
        """Call the present router. Returns gRPC's call and the timer of its keep-alive messages."""
        progress, parameters = self._progress, self._parameters
        stub = parameters.routers.stub(progress.router)
        self._has_metadata = False
        left_s = progress.time_left_s(time.monotonic())
        call = stub.Generate(progress.request, timeout=left_s, metadata=parameters.metadata_with_keepalive())
        known_s = parameters.routers.keepalive_timeout_s(progress.router)
        if known_s is None:
            return call, KeepAliveTimer.of_first_call(parameters.keepalive_timeout_s * progress.patience)
        return call, KeepAliveTimer(known_s * progress.patience, can_ping=True)

    def _learn(self, metadata: Collection[tuple[str, str | bytes]] | None, timer: KeepAliveTimer) -> list[Any]:
        """Use the initial metadata of the call. Returns channels to close."""
        router, routers = self._progress.router, self._parameters.routers
        routers.on_metadata(router, metadata, self._parameters.keepalive_timeout_s)
        timer.on_first_message(routers.keepalive_timeout_s(router))
        return routers.learn(router, metadata)

    def _add(self, response: inference_pb2.GenerateResponse) -> None:
        self._parameters.routers.on_response(self._progress.router)
        self._pending.extend(self._progress.add(response))


class Generation(_BaseGeneration):
    """The answer to one request, while it is generated. Iterate over its deltas, or call `result`. It has one reader
    and can be read once; a read while another thread waits for its next delta raises RuntimeError."""

    def __init__(self, parameters: CallParameters, watch: KeepAliveWatch) -> None:
        super().__init__(parameters)
        self._watch = watch
        self._closed = threading.Event()
        self._call: _Call
        self._call, self._keepalive = self._begin_call()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if self._failure is not None:
            raise self._failure
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("another thread is reading this generation")
        try:
            return self._next_delta()
        except TandemError as error:
            self._failure = error
            raise
        finally:
            self._reading.release()

    def _next_delta(self) -> Delta:
        while not self._pending:
            try:
                with translated_errors(), self._watch.waiting(self._keepalive, self._call.cancel, self._ping):
                    response = next(self._call)
            except TandemError as error:
                if self._closed.is_set() or self._parameters.routers.is_closed:
                    raise _closed() from error
                lost = _keepalive_lost(self._progress.router, self._keepalive) if self._keepalive.is_over else error
                self._read_metadata()
                self._continue(lost)
                continue
            self._read_metadata()
            self._add(response)
        return self._pending.popleft()

    def result(self) -> Result:
        """Read to the end and return the whole result, with the deltas that were read before. Raises TandemError."""
        for _ in self:
            pass
        return self._progress.result()

    def close(self) -> None:
        """Cancel the generation on all workers if it still runs."""
        self._closed.set()
        self._call.cancel()

    def _read_metadata(self) -> None:
        """Read the initial metadata, once per call: the response has begun, or the call has ended."""
        if not self._has_metadata:
            self._has_metadata = True
            for channel in self._learn(self._call.initial_metadata(), self._keepalive):
                channel.close()

    def _continue(self, error: TandemError) -> None:
        """Raises TandemError."""
        if self._closed.wait(self._progress.on_lost(error, time.monotonic())) or self._parameters.routers.is_closed:
            raise _closed() from error
        self._call, self._keepalive = self._begin_call()
        if self._closed.is_set():  # while the call was started
            self._call.cancel()

    def _ping(self) -> None:
        """Call the router on the connection of the generation. Runs on the thread of the watch."""
        timer, request = self._keepalive, inference_pb2.ListModelsRequest()
        with suppress(Cancelled, ValueError):  # the client was closed, and its channel is
            stub = self._parameters.routers.stub(self._progress.router)
            answer = stub.ListModels.future(request, timeout=timer.response_s, metadata=self._parameters.metadata)
            answer.add_done_callback(lambda done: timer.on_ping_response() if done.code() not in _NO_ANSWER else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


class AsyncGeneration(_BaseGeneration):
    """A Generation that is read with `async for` or `await generation.result()`."""

    def __init__(self, parameters: CallParameters) -> None:
        super().__init__(parameters)
        self._closed = asyncio.Event()
        self._has_ended = False  # it was read to its end
        self._ping_task: asyncio.Task[None] | None = None  # the last ping
        self._start_call()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._failure is not None:
            raise self._failure
        if self._closed.is_set() and not self._has_ended:
            raise _closed()
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("another task is reading this generation")
        try:
            return await self._next_delta()
        except StopAsyncIteration:
            self._has_ended = True
            raise
        except TandemError as error:
            self._failure = error
            raise
        except asyncio.CancelledError:  # of the reader's task: gRPC has ended the call with it
            self._failure = _cancelled_read()
            self._call.cancel()
            raise
        finally:
            self._reading.release()

    async def _next_delta(self) -> Delta:
        while not self._pending:
            try:
                with translated_errors(), waiting(self._keepalive, self._call.cancel, self._ping):
                    response = await anext(self._responses)
            except TandemError as error:
                await self._read_metadata()
                await self._continue(error)
                continue
            except asyncio.CancelledError:  # gRPC raises it for a closed call too
                task = asyncio.current_task()
                if task is None or task.cancelling() or not (self._is_over or self._keepalive.is_over):
                    raise
                if self._is_over:
                    raise _closed() from None
                lost = _keepalive_lost(self._progress.router, self._keepalive)
                await self._read_metadata()
                await self._continue(lost)
                continue
            await self._read_metadata()
            self._add(response)
        return self._pending.popleft()

    async def result(self) -> Result:
        """Read to the end and return the whole result, with the deltas that were read before. Raises TandemError."""
        async for _ in self:
            pass
        return self._progress.result()

    def close(self) -> None:
        """Cancel the generation on all workers if it still runs."""
        self._closed.set()
        self._call.cancel()
        if self._ping_task is not None:
            self._ping_task.cancel()

    @property
    def _is_over(self) -> bool:
        return self._closed.is_set() or self._parameters.routers.is_closed

    async def _read_metadata(self) -> None:
        """Read the metadata as `Generation._read_metadata` does."""
        if not self._has_metadata:
            self._has_metadata = True
            for channel in self._learn(await self._call.initial_metadata(), self._keepalive):
                await channel.close()

    async def _continue(self, error: TandemError) -> None:
        """Raises TandemError."""
        wait_s = self._progress.on_lost(error, time.monotonic())
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._closed.wait()
        if self._is_over:
            raise _closed() from error
        self._start_call()

    def _start_call(self) -> None:
        self._call: _AsyncCall
        self._call, self._keepalive = self._begin_call()
        self._responses = aiter(self._call)

    def _ping(self) -> None:
        self._ping_task = asyncio.create_task(self._ping_router(self._keepalive))

    async def _ping_router(self, timer: KeepAliveTimer) -> None:
        """Call the router on the connection of the generation."""
        if self._is_over:
            return
        stub = self._parameters.routers.stub(self._progress.router)
        call = stub.ListModels(
            inference_pb2.ListModelsRequest(), timeout=timer.response_s, metadata=self._parameters.metadata
        )
        if await call.code() not in _NO_ANSWER:
            timer.on_ping_response()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise the errors of gRPC within as those of tandem/errors.py."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


def _keepalive_lost(router: str, timer: KeepAliveTimer) -> Unavailable:
    message = f"the router at {router} sent no message for {timer.waited_s:.1f} s"
    return Unavailable(message, reason="keepalive_timeout", is_lost=True)


def _closed() -> Cancelled:
    return Cancelled("this generation was closed", reason="cancelled")


def _cancelled_read() -> Cancelled:
    return Cancelled("a read of this generation was cancelled, and the generation with it", reason="cancelled")
