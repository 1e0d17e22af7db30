"""What an attempt hears about its sequences at one decode worker, and the queue in which it finds it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cluster.messages import MemberId, SampledToken, TokenLogprobs
from cluster.protocol import wire
from router.policies.course import Course
from tandem.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class Started:
    """Sequences joined the worker's batch. `first_tokens` is empty when their prompt is prefilled there."""

    handles: tuple[int, ...]
    first_tokens: tuple[int, ...]
    queue_s: float
    kv_bytes: int
    transport: str
    num_cached: int  # tokens whose KV was there already


@dataclass(frozen=True, slots=True)
class Token:
    handle: int
    index: int
    token: SampledToken


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker will not go on with these."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker is gone, or what it said was lost."""

    detail: str


class MoveOutcome(StrEnum):
    MOVED = "moved"  # the sequence goes on at the other worker
    KEPT = "kept"  # it went on where it was
    RESTARTED = "restarted"  # neither had it any more: it is prefilled again
    ENDED = "ended"  # before it could be moved
    DEFERRED = "deferred"  # it goes on where it is, as its worker has frozen as many as it may; it can be asked again


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Not the worker's word but this router's own: the sequence is to go on at another decode worker."""

    handle: int
    target: MemberId | None  # None: placement chooses
    patience_s: float  # for what the source has sent to arrive, and for the target to begin
    outcome: asyncio.Future[MoveOutcome]

    def settle(self, outcome: MoveOutcome) -> None:
        """The first outcome counts."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


DecodeEvent = Started | Token | Failed | Lost | Move


class Sequences:
    """One attempt's handles on the stream, and what the worker says about them."""

    def __init__(self, courses: dict[int, Course]) -> None:
        """By handle."""
        self.handles = tuple(courses)
        self.courses = courses
        self.live = set(courses)
        self.started: set[int] = set()  # that have joined the worker's batch
        self.events: asyncio.Queue[DecodeEvent] = asyncio.Queue()  # bounded by the request's own max_tokens

    async def next(self) -> DecodeEvent:
        return await self.events.get()

    async def failure(self) -> Failed | Lost:
        """The next one. What else was said meanwhile is heard after it, in its order."""
        said: list[DecodeEvent] = []
        try:
            while not isinstance(event := await self.events.get(), Failed | Lost):
                said.append(event)
            return event
        finally:
            said.extend(self.events.get_nowait() for _ in range(self.events.qsize()))
            for event in said:
                self.events.put_nowait(event)

    def part(self, handle: int) -> "Sequences":
        """One of them by itself, with what was said about it and not heard yet."""
        parted = Sequences({handle: self.courses[handle]})
        parted.started = self.started & parted.live
        self.live.discard(handle)
        for _ in range(self.events.qsize()):
            event = self.events.get_nowait()
            is_its_own = isinstance(event, Token | Move) and event.handle == handle
            if is_its_own or not isinstance(event, Token | Move):
                parted.events.put_nowait(event)
            if not is_its_own:
                self.events.put_nowait(event)
        return parted


def tokens_of(step: worker_pb2.StepOutput) -> Iterator[Token]:
    """Every token of one engine step, of a checked message."""
    ends = {end.handle: wire.finish_reason_from_wire(end.finish_reason) for end in step.ends}
    handles, token_ids, indices = map(wire.unpack_ids, (step.handles, step.token_ids, step.indices))
    last = {handle: position for position, handle in enumerate(handles)}  # right guesses are several tokens of one step
    for position, (handle, token_id, index) in enumerate(zip(handles, token_ids, indices, strict=True)):
        reason = ends.get(handle) if position == last[handle] else None
        yield Token(handle, index, SampledToken(token_id, _logprobs(step, position), reason))


def _logprobs(step: worker_pb2.StepOutput, position: int) -> TokenLogprobs | None:
    """Sequences that asked for none share the message with those that did."""
    if not step.logprobs or not step.logprobs[position].HasField("chosen"):
        return None
    return wire.logprobs_from_wire(step.logprobs[position])
