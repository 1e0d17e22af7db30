"""One running generation, read by blocking or on an event loop. Goes on at another router when its own is lost."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import grpc

from tandem.errors import Cancelled, TandemError, Unavailable, error_from_rpc
from tandem.progress import Progress
from tandem.results import Delta, Result
from tandem.routers import Routers
from tandem.silence import ALIVE_KEY, Silence, sign_every_s
from tandem.v1 import inference_pb2
from tandem.watch import Watch, waiting

Metadata: TypeAlias = tuple[tuple[str, str], ...]
# Any other status is the word of a router that is there.
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_AsyncCall: TypeAlias = "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"


class _Call(Protocol):
    """What grpc's blocking client returns for a stream of responses."""

    def __next__(self) -> inference_pb2.GenerateResponse: ...

    def cancel(self) -> bool: ...

    def initial_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


@dataclass(frozen=True, slots=True)
class Asking:
    """What is asked, of whom, for how long."""

    request: inference_pb2.GenerateRequest
    routers: Routers[Any]  # of blocking channels, or of asyncio's
    metadata: Metadata
    timeout_s: float
    silence_s: float  # so long a router that promised signs of life may give none

    def metadata_for_signs(self) -> Metadata:
        return (*self.metadata, (ALIVE_KEY, f"{sign_every_s(self.silence_s):g}"))

    def progress(self) -> Progress:
        return Progress(
            self.request,
            known=self.routers.known,
            router=self.routers.first,
            deadline_s=time.monotonic() + self.timeout_s,
        )


class Generation:
    """Iterate over its deltas, or take its `result`. One reader, once."""

    def __init__(self, asking: Asking, watch: Watch) -> None:
        self._asking = asking
        self._watch = watch
        self._progress = asking.progress()
        self._closed = threading.Event()
        self._pending: deque[Delta] = deque()
        self._has_learnt = False
        self._call, self._silence = self._ask()

    @property
    def request_id(self) -> str:
        """Changes only where the id was still live after a router was lost."""
        return self._progress.request.request_id

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while not self._pending:
            try:
                with told(), self._watch.waiting(self._silence, self._call.cancel, self._ask_whether_there):
                    response = next(self._call)
            except TandemError as error:
                if self._closed.is_set():
                    raise
                lost = _silent(self._progress.router, self._silence) if self._silence.is_over else error
                self._learn()
                self._go_on(lost)
                continue
            self._learn()
            self._asking.routers.first = self._progress.router
            self._pending.extend(self._progress.take(response))
        return self._pending.popleft()

    def result(self) -> Result:
        """Reads to the end. Deltas that were read before count too."""
        for _ in self:
            pass
        return self._progress.result()

    def close(self) -> None:
        """Cancels it if it still runs."""
        self._closed.set()
        self._call.cancel()

    def _learn(self) -> None:
        """Once per call: its answer has begun, or it has ended."""
        if not self._has_learnt:
            self._has_learnt = True
            router, routers, metadata = self._progress.router, self._asking.routers, self._call.initial_metadata()
            routers.promised(router, metadata, self._asking.silence_s)
            self._silence.limit_s = routers.borne_s(router)
            for channel in routers.learn(router, metadata):
                channel.close()

    def _go_on(self, error: TandemError) -> None:
        """Raises TandemError."""
        if self._closed.wait(self._progress.lost(error, time.monotonic())) or self._asking.routers.is_closed:
            raise _closed() from error
        self._call, self._silence = self._ask()
        if self._closed.is_set():  # since we looked
            self._call.cancel()

    def _ask(self) -> tuple[_Call, Silence]:
        progress, asking = self._progress, self._asking
        stub = asking.routers.stub(progress.router)
        self._has_learnt = False
        left_s = progress.time_left_s(time.monotonic())
        call: _Call = stub.Generate(progress.request, timeout=left_s, metadata=asking.metadata_for_signs())
        return call, Silence(asking.routers.borne_s(progress.router), asks=True)

    def _ask_whether_there(self) -> None:
        """On the connection of the call; on the thread that watches."""
        silence, stub = self._silence, self._asking.routers.stub(self._progress.router)
        request = inference_pb2.ListModelsRequest()
        with suppress(ValueError):  # its client has closed the channel meanwhile
            answer = stub.ListModels.future(request, timeout=silence.answer_s, metadata=self._asking.metadata)
            answer.add_done_callback(lambda done: silence.answered() if done.code() not in _NO_ANSWER else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


class AsyncGeneration:
    """As Generation, read with `async for` or `await generation.result()`."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._progress = asking.progress()
        self._closed = asyncio.Event()
        self._pending: deque[Delta] = deque()
        self._has_learnt = False
        self._question: asyncio.Task[None] | None = None  # whether the router is there, asked last
        self._call, self._responses, self._silence = self._ask()

    @property
    def request_id(self) -> str:
        """Changes only where the id was still live after a router was lost."""
        return self._progress.request.request_id

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._closed.is_set():
            raise _closed()
        while not self._pending:
            try:
                with told(), waiting(self._silence, self._call.cancel, self._ask_whether_there):
                    response = await anext(self._responses)
            except TandemError as error:
                await self._learn()
                await self._go_on(error)
                continue
            except asyncio.CancelledError:  # grpc's word for a closed call too, as if the reader's task were cancelled
                task = asyncio.current_task()
                if task is None or task.cancelling() or not (self._is_over or self._silence.is_over):
                    raise
                if self._is_over:
                    raise _closed() from None
                lost = _silent(self._progress.router, self._silence)
                await self._learn()
                await self._go_on(lost)
                continue
            await self._learn()
            self._asking.routers.first = self._progress.router
            self._pending.extend(self._progress.take(response))
        return self._pending.popleft()

    async def result(self) -> Result:
        """Reads to the end. Deltas that were read before count too."""
        async for _ in self:
            pass
        return self._progress.result()

    def close(self) -> None:
        """Cancels it if it still runs."""
        self._closed.set()
        self._call.cancel()
        if self._question is not None:
            self._question.cancel()

    @property
    def _is_over(self) -> bool:
        return self._closed.is_set() or self._asking.routers.is_closed

    async def _learn(self) -> None:
        """As Generation._learn."""
        if not self._has_learnt:
            self._has_learnt = True
            router, routers, metadata = self._progress.router, self._asking.routers, await self._call.initial_metadata()
            routers.promised(router, metadata, self._asking.silence_s)
            self._silence.limit_s = routers.borne_s(router)
            for channel in routers.learn(router, metadata):
                await channel.close()

    async def _go_on(self, error: TandemError) -> None:
        """Raises TandemError."""
        wait_s = self._progress.lost(error, time.monotonic())
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._closed.wait()
        if self._is_over:
            raise _closed() from error
        self._call, self._responses, self._silence = self._ask()

    def _ask(self) -> tuple[_AsyncCall, AsyncIterator[inference_pb2.GenerateResponse], Silence]:
        progress, asking = self._progress, self._asking
        stub = asking.routers.stub(progress.router)
        self._has_learnt = False
        left_s = progress.time_left_s(time.monotonic())
        call: _AsyncCall = stub.Generate(progress.request, timeout=left_s, metadata=asking.metadata_for_signs())
        return call, aiter(call), Silence(asking.routers.borne_s(progress.router), asks=True)

    def _ask_whether_there(self) -> None:
        self._question = asyncio.create_task(self._question_answered(self._silence))

    async def _question_answered(self, silence: Silence) -> None:
        """On the connection of the call."""
        if self._is_over:
            return
        stub = self._asking.routers.stub(self._progress.router)
        call = stub.ListModels(
            inference_pb2.ListModelsRequest(), timeout=silence.answer_s, metadata=self._asking.metadata
        )
        if await call.code() not in _NO_ANSWER:
            silence.answered()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def told() -> Iterator[None]:
    """gRPC's errors as Tandem's."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


def _silent(router: str, silence: Silence) -> Unavailable:
    message = f"the router at {router} said nothing for {silence.lasted_s:.1f} s"
    return Unavailable(message, reason="silent", is_lost=True)


def _closed() -> Cancelled:
    return Cancelled("this generation was closed", reason="cancelled")
