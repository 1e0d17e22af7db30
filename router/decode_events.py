"""What a decode worker says about the sequences of one attempt, and the queue in which the attempt finds it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from cluster import wire
from cluster.messages import SampledToken, TokenLogprobs
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


DecodeEvent = Started | Token | Failed | Lost


class Sequences:
    """One attempt's handles on the stream, and what the worker says about them."""

    def __init__(self, handles: tuple[int, ...]) -> None:
        self.handles = handles
        self.live = set(handles)
        self.events: asyncio.Queue[DecodeEvent] = asyncio.Queue()  # bounded by the request's own max_tokens

    async def next(self) -> DecodeEvent:
        return await self.events.get()


def tokens_of(step: worker_pb2.StepOutput) -> Iterator[Token]:
    """Every token of one engine step. Raises InvalidRequest, ValueError for a message whose parts do not fit."""
    ends = {end.handle: wire.finish_reason_from_wire(end.finish_reason) for end in step.ends}
    columns = map(wire.unpack_ids, (step.handles, step.token_ids, step.indices))
    for position, (handle, token_id, index) in enumerate(zip(*columns, strict=True)):
        yield Token(handle, index, SampledToken(token_id, _logprobs(step, position), ends.get(handle)))


def _logprobs(step: worker_pb2.StepOutput, position: int) -> TokenLogprobs | None:
    """Sequences that asked for none share the message with those that did."""
    if not step.logprobs or not step.logprobs[position].HasField("chosen"):
        return None
    return wire.logprobs_from_wire(step.logprobs[position])
