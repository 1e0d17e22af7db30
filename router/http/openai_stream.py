"""Sends the outputs of one or more requests as one response: collected, or as server-sent events.

Owns cancellation: when the client stops reading, the generators are closed at once, which cancels both legs on every
worker.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace
from functools import partial
from json.encoder import encode_basestring
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import TandemError
from cluster.messages import FinishReason
from router.http.edge import ClientGone, ClientStalled, DirectChunks, SentChunks, chunks_of, while_connected
from router.http.errors import error_body, internal_error, json_bytes
from router.http.openai_responses import Envelope, PromptFields, Shape, UsageSoFar
from router.request.live_requests import LiveRequests
from router.request.outbox import WholeAnswer
from router.requests import Accepted, ChoiceDelta, DirectReader, GenerateRequest, Ledger, Output, Usage
from router.running import running

KEEPALIVE_INTERVAL_S = 15.0  # without an output
_COMMENT = b": waiting\n\n"
_QUEUED_OUTPUTS = 1  # between the generators of several prompts and the client: what waits, waits in the outboxes
_HOLE = "\x00text\x00"  # no other field of a chunk can have it
_PART_BYTES = 64 << 10  # of a whole answer: the next one is sent when the client has taken most of it


class Generates(Protocol):
    """The part of Pipeline that this module uses."""

    def generate(
        self,
        request: GenerateRequest,
        *,
        keepalive_interval_s: float | None = None,
        reader: DirectReader | None = None,
    ) -> AsyncGenerator[Output, None]: ...


class PromptsOnly:
    """Answers requests for prompts only, with `max_tokens` 0. Workers draw one token, which no client receives."""

    def __init__(self, pipeline: Generates) -> None:
        self._pipeline = pipeline

    async def generate(
        self,
        request: GenerateRequest,
        *,
        keepalive_interval_s: float | None = None,
        reader: DirectReader | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request of one token without that token, which the reader would get."""
        generating = self._pipeline.generate(request, keepalive_interval_s=keepalive_interval_s)
        async with aclosing(generating) as outputs:
            async for output in outputs:
                deltas, summary = tuple(map(_without_tokens, output.deltas)), output.summary
                if summary is not None:
                    summary = replace(summary, usage=replace(summary.usage, completion_tokens=0))
                yield replace(output, deltas=deltas, summary=summary)


def _without_tokens(delta: ChoiceDelta) -> ChoiceDelta:
    end = None if delta.finish_reason is None else FinishReason.LENGTH
    return ChoiceDelta(delta.choice, first_index=0, finish_reason=end)


class DeltaEvents(Protocol):
    """The events of one stream's deltas."""

    def begin(self, accepted: Accepted) -> None:
        """Record that the request was accepted. It is called before the first deltas."""
        ...

    def of(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Return the events of deltas; nothing if there are none."""
        ...


def opened(
    pipeline: Generates,
    requests: Sequence[GenerateRequest],
    *,
    keepalive_interval_s: float | None = None,
    reader: DirectReader | None = None,
) -> AbstractAsyncContextManager[AsyncIterator[Output]]:
    """Open the merged outputs of all requests. Choices are numbered over the requests. Leaving closes the
    generators. `reader`: as in Pipeline.generate, for a single request."""
    if len(requests) == 1:
        return aclosing(pipeline.generate(requests[0], keepalive_interval_s=keepalive_interval_s, reader=reader))
    return aclosing(_merged(pipeline, requests, keepalive_interval_s))


async def _merged(
    pipeline: Generates, requests: Sequence[GenerateRequest], keepalive_interval_s: float | None
) -> AsyncGenerator[Output, None]:
    """Merge the outputs of several requests. The first request that fails ends all."""
    queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue(_QUEUED_OUTPUTS)

    async def pump(request: GenerateRequest, first_choice: int) -> None:
        try:
            generating = pipeline.generate(request, keepalive_interval_s=keepalive_interval_s)
            async with aclosing(generating) as outputs:
                async for output in outputs:
                    deltas = tuple(delta._replace(choice=first_choice + delta.choice) for delta in output.deltas)
                    await queue.put(replace(output, deltas=deltas, first_choice=first_choice))
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
    """A response in one body. Its tokens count as buffered until the client has read the last part.

    Raises the errors of the pipeline before anything is sent.
    """

    media_type = "application/json"

    def __init__(
        self,
        pipeline: Generates,
        live_requests: LiveRequests,
        requests: Sequence[GenerateRequest],
        shape: Shape,
        envelope: Envelope,
        prompts: PromptFields | None = None,
    ) -> None:
        """`prompts`: the fields of the response about its prompts; None: it has none."""
        super().__init__()
        self._pipeline, self._live_requests, self._requests = pipeline, live_requests, requests
        self._shape, self._envelope, self._prompts = shape, envelope, prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._live_requests.whole_answer() as answer:
            body = await while_connected(scope, receive, self._collected(answer))
            await _unless_ended(answer, self._send_body(body, answer, send))

    async def _collected(self, answer: WholeAnswer) -> bytes:
        usage, ledgers = Usage(0, 0), list[Ledger]()
        async with opened(self._pipeline, self._requests) as outputs:
            async for output in outputs:
                answer.add(output.deltas, output.prompt)
                if self._prompts is not None:
                    self._prompts.add(output)
                if output.summary is not None:
                    usage = _plus(usage, output)
                    ledgers.append(output.summary.ledger)
        if self._prompts is None:
            return self._body(answer, usage, ledgers)
        return await asyncio.to_thread(self._body, answer, usage, ledgers)  # it may have a hundred thousand values

    def _body(self, answer: WholeAnswer, usage: Usage, ledgers: Sequence[Ledger]) -> bytes:
        choices = [self._shape.whole(deltas) for deltas in answer.choices()]
        beside = self._prompts.in_body() if self._prompts is not None else {}
        return json_bytes(self._envelope.answer(choices, usage, ledgers) | beside)

    async def _send_body(self, body: bytes, answer: WholeAnswer, send: Send) -> None:
        answer.begin_sending()
        self.headers["content-length"] = str(len(body))
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _in_parts(body, partial(_send_body, send), answer)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _in_parts(body: bytes, write: Callable[[bytes], Awaitable[None]], answer: WholeAnswer) -> None:
    for start in range(0, len(body), _PART_BYTES):
        await write(body[start : start + _PART_BYTES])
        answer.part_sent()


async def _write_counted(events: bytes, chunks: DirectChunks | SentChunks, scored: WholeAnswer) -> None:
    """Write long events, as those of a prompt are. Raises ClientStalled when the router ends the stream meanwhile."""
    scored.begin_sending()
    await _unless_ended(scored, _in_parts(events, chunks.write, scored))
    scored.pause_sending()


async def _unless_ended(answer: WholeAnswer, sending: Coroutine[None, None, None]) -> None:
    """Await `sending`. Raises ClientStalled when the router ends the response meanwhile."""
    async with running(sending) as task, running(answer.ended.wait()) as ended:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientStalled
        task.result()


class LastEvents(bytes):
    """The events at the end of a stream, which are sent together with the end of the response."""


class EventStream(Response):
    """A response as server-sent events. The status line waits for the first token, so that a refusal has its own
    status, but no longer than `KEEPALIVE_INTERVAL_S`: then a comment is sent, which keeps connections open.

    A failure after that is sent as an event `error` and ends the stream without [DONE]. The log-probabilities of
    prompts count as buffered tokens until the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pipeline: Generates,
        live_requests: LiveRequests,
        requests: Sequence[GenerateRequest],
        shape: Shape,
        envelope: Envelope,
        prompts: PromptFields | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pipeline, self._live_requests, self._requests = pipeline, live_requests, requests
        self._shape, self._envelope, self._prompts = shape, envelope, prompts
        self._scored: WholeAnswer | None = None  # counts the values of prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with nullcontext() if self._prompts is None else self._live_requests.whole_answer() as self._scored:
            await while_connected(scope, receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        started, chunks, last = False, chunks_of(scope, send), b""
        events_of = self._new_events()
        reader = None
        if isinstance(chunks, DirectChunks) and len(self._requests) == 1:  # of several, choices are numbered again
            reader = _Reader(chunks, events_of)
        try:
            async with opened(
                self._pipeline, self._requests, keepalive_interval_s=KEEPALIVE_INTERVAL_S, reader=reader
            ) as outputs:
                async for events in self._events(outputs, events_of):
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                        if reader is not None:
                            reader.begin()
                    if isinstance(events, LastEvents):
                        last = events
                    elif self._scored is None or len(events) <= _PART_BYTES:
                        await chunks.write(events)
                    else:
                        await _write_counted(events, chunks, self._scored)
        except ClientGone:
            raise
        except Exception as error:
            if not started:
                raise
            last = self.failure(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def failure(self, error: Exception) -> bytes:
        """Return the event of an error that ends the stream."""
        return _error_event(error, self._requests[0].label)

    def _new_events(self) -> DeltaEvents:
        return _Events(self._shape, self._envelope, self._prompts)

    async def _events(self, outputs: AsyncIterator[Output], events_of: DeltaEvents) -> AsyncIterator[bytes]:
        """Yield the bytes to send, the last ones as LastEvents; never an empty portion. Deltas that went to the reader
        are not among them."""
        usage, ledgers = Usage(0, 0), list[Ledger]()
        async for output in outputs:
            if output.accepted is not None:
                events_of.begin(output.accepted)
            if self._prompts is None:
                events = events_of.of(output.deltas)
            else:
                async for events in self._with_prompts(output, self._prompts, events_of):
                    yield events
                events = b""
            if output.summary is not None:
                usage = _plus(usage, output)
                ledgers.append(output.summary.ledger)
            if events:
                yield events
            elif not output.deltas and output.summary is None and output.accepted is None:
                yield _COMMENT
        about = _event(self._envelope.usage_chunk(usage)) if self._envelope.include_usage else b""
        about += _event(self._envelope.ledger_chunk(ledgers)) if self._envelope.with_ledger else b""
        yield LastEvents(about + b"data: [DONE]\n\n")

    async def _with_prompts(
        self, output: Output, prompts: PromptFields, events_of: DeltaEvents
    ) -> AsyncIterator[bytes]:
        """Yield the events of each delta. The first one of a choice may have a hundred thousand values of its
        prompt."""
        prompts.add(output)
        if self._scored is not None:
            self._scored.add((), output.prompt)
        for delta in output.deltas:
            is_first = delta.first_index == 0
            events = await asyncio.to_thread(events_of.of, (delta,)) if is_first else events_of.of((delta,))
            if events:
                yield events


class _Reader:
    """Writes the events of deltas to the connection of a client, once its response has begun."""

    def __init__(self, chunks: DirectChunks, events_of: DeltaEvents) -> None:
        self._chunks, self._write_now, self._events_of = chunks, chunks.write_now, events_of
        self.can_write: Callable[[], bool] = lambda: False

    def begin(self) -> None:
        """Record that the response has begun."""
        self.can_write = self._chunks.can_write

    def write(self, deltas: Sequence[ChoiceDelta]) -> None:
        if events := self._events_of.of(deltas):
            self._write_now(events)


class _Events:
    """The events of a stream's deltas. Most deltas only add text, and the JSON around the text is equal in all deltas
    of a choice, so it is encoded once.
    """

    def __init__(self, shape: Shape, envelope: Envelope, prompts: PromptFields | None = None) -> None:
        self._shape, self._envelope, self._prompts = shape, envelope, prompts
        self._around: dict[int, tuple[bytes, bytes]] = {}  # a text, by choice
        self._so_far = UsageSoFar() if envelope.continuous_usage else None  # the usage that each event has

    def begin(self, accepted: Accepted) -> None:
        if self._so_far is not None:
            self._so_far.add_prompt(accepted)

    def of(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        so_far = None
        if self._so_far is not None:
            self._so_far.add(deltas)
            so_far = self._so_far.usage
        if len(deltas) == 1:
            return self._of_one(deltas[0], so_far)
        return b"".join([self._of_one(delta, so_far) for delta in deltas])

    def _of_one(self, delta: ChoiceDelta, so_far: Usage | None) -> bytes:
        if delta.text and not delta.logprobs and delta.finish_reason is None and so_far is None:
            around = self._around.get(delta.choice) or self._prepare(delta.choice)
            if around is not None:
                text = encode_basestring(delta.text).encode("utf-8", "backslashreplace")
                return b"%b%b%b" % (around[0], text, around[1])
        chunks = [self._envelope.chunk([choice], so_far) for choice in self._shape.chunks(delta)]
        if self._prompts is not None and chunks:
            chunks[0] |= self._prompts.in_body()
        return b"".join(map(_event, chunks))

    def _prepare(self, choice: int) -> tuple[bytes, bytes] | None:
        plain = self._shape.plain(choice, _HOLE)
        if plain is None:
            return None
        before, _, after = _event(self._envelope.chunk([plain])).partition(json_bytes(_HOLE))
        self._around[choice] = before, after
        return before, after


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(value: object) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def _error_event(error: Exception, request_id: str) -> bytes:
    reported = error if isinstance(error, TandemError) else internal_error(error, request_id)
    return b"event: error\n" + _event(error_body(reported))


def _plus(usage: Usage, output: Output) -> Usage:
    if output.summary is None:
        return usage
    more = output.summary.usage
    return Usage(
        usage.prompt_tokens + more.prompt_tokens,
        usage.completion_tokens + more.completion_tokens,
        usage.cached_tokens + more.cached_tokens,
    )
