"""From requests of the pipeline to one answer: merged, collected, or sent as server-sent events.

Owns cancellation: whoever stops reading, the generators behind it are closed at once, and with them both legs.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import TandemError
from router.http.edge import ClientGone, ClientStalled, while_connected
from router.http.openai_errors import error_body, internal_error, json_bytes
from router.http.openai_responses import Envelope, Shape
from router.request.outbox import Outboxes, WholeAnswer
from router.requests import GenerateRequest, Output, Usage
from router.running import running

_QUEUED_OUTPUTS = 1  # between the generators of several prompts and the client: what waits, waits in the outboxes
_PART_BYTES = 64 << 10  # of a whole answer: the next one is sent when the client has taken most of it


class Generates(Protocol):
    """What this module needs of router.pipeline.pipeline.Pipeline."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Output, None]: ...


def opened(
    pipeline: Generates, requests: Sequence[GenerateRequest]
) -> AbstractAsyncContextManager[AsyncIterator[Output]]:
    """The outputs of all requests as they come, choices numbered over the requests. Its end closes the generators."""
    if len(requests) == 1:
        return aclosing(pipeline.generate(requests[0]))
    return aclosing(_merged(pipeline, requests))


async def _merged(pipeline: Generates, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Output, None]:
    """The first request to fail ends all."""
    queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue(_QUEUED_OUTPUTS)

    async def pump(request: GenerateRequest, first_choice: int) -> None:
        try:
            async with aclosing(pipeline.generate(request)) as outputs:
                async for output in outputs:
                    deltas = tuple(replace(delta, choice=first_choice + delta.choice) for delta in output.deltas)
                    await queue.put(replace(output, deltas=deltas))
            await queue.put(None)
        except Exception as error:  # noqa: BLE001  # raised again where the queue is read
            await queue.put(error)

    pumps = [asyncio.create_task(pump(request, i * request.n)) for i, request in enumerate(requests)]
    try:
        num_running = len(pumps)
        while num_running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class WholeResponse(Response):
    """The answer in one body, counted among what the router keeps for clients until the last part of it is taken.

    Raises what the pipeline raises, before anything was sent.
    """

    media_type = "application/json"

    def __init__(
        self,
        pipeline: Generates,
        outboxes: Outboxes,
        requests: Sequence[GenerateRequest],
        shape: Shape,
        envelope: Envelope,
    ) -> None:
        super().__init__()
        self._pipeline, self._outboxes, self._requests = pipeline, outboxes, requests
        self._shape, self._envelope = shape, envelope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._outboxes.whole_answer() as answer:
            body = await while_connected(receive, self._collected(answer))
            await _unless_ended(answer, self._send_body(body, answer, send))

    async def _collected(self, answer: WholeAnswer) -> bytes:
        usage = Usage(0, 0)
        async with opened(self._pipeline, self._requests) as outputs:
            async for output in outputs:
                answer.add(output.deltas)
                usage = _plus(usage, output)
        choices = [self._shape.whole(deltas) for deltas in answer.choices()]
        return json_bytes(self._envelope.answer(choices, usage))

    async def _send_body(self, body: bytes, answer: WholeAnswer, send: Send) -> None:
        answer.offered()
        self.headers["content-length"] = str(len(body))
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for start in range(0, len(body), _PART_BYTES):
            await _send_body(send, body[start : start + _PART_BYTES])
            answer.taken()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_ended(answer: WholeAnswer, sending: Coroutine[None, None, None]) -> None:
    """Raises ClientStalled when the answer is ended while it is sent."""
    async with running(sending) as task, running(answer.ended.wait()) as ended:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientStalled
        task.result()


class EventStream(Response):
    """Server-sent events. The status line waits for the first output, so that a refusal has its own status.

    A failure after that is an event `error` and the end of the stream, without [DONE].
    """

    media_type = "text/event-stream"

    def __init__(
        self, pipeline: Generates, requests: Sequence[GenerateRequest], shape: Shape, envelope: Envelope
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pipeline = pipeline
        self._requests = requests
        self._shape = shape
        self._envelope = envelope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        started = False
        try:
            async with opened(self._pipeline, self._requests) as outputs:
                async for events in self._events(outputs):
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                    await _send_body(send, events)
        except ClientGone:
            raise
        except Exception as error:
            if not started:
                raise
            await _send_body(send, _error_event(error, self._requests[0].label))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, outputs: AsyncIterator[Output]) -> AsyncIterator[bytes]:
        """Never an empty portion."""
        usage = Usage(0, 0)
        async for output in outputs:
            chunks = [self._envelope.chunk([choice]) for delta in output.deltas for choice in self._shape.chunks(delta)]
            usage = _plus(usage, output)
            if chunks:
                yield b"".join(_event(chunk) for chunk in chunks)
        if self._envelope.include_usage:
            yield _event(self._envelope.usage_chunk(usage))
        yield b"data: [DONE]\n\n"


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(value: object) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def _error_event(error: Exception, request_id: str) -> bytes:
    told = error if isinstance(error, TandemError) else internal_error(error, request_id)
    return b"event: error\n" + _event(error_body(told))


def _plus(usage: Usage, output: Output) -> Usage:
    if output.summary is None:
        return usage
    more = output.summary.usage
    return Usage(
        usage.prompt_tokens + more.prompt_tokens,
        usage.completion_tokens + more.completion_tokens,
        usage.cached_tokens + more.cached_tokens,
    )
