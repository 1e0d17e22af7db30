"""The events that an attempt receives about its sequences at one decode worker, and the queue that holds them."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

from cluster.messages import MemberId, SampledToken, TokenLogprobs
from cluster.protocol import wire
from router.policies.prediction.work_ahead import SequenceProgress
from router.request.account import HandOff
from router.running import first_done
from tandem.internal.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class SequencesStarted:
    """Sequences joined the worker's batch. `first_tokens` is empty when that worker prefills their prompt."""

    handles: tuple[int, ...]
    first_tokens: tuple[int, ...]
    queue_s: float
    kv_bytes: int
    transport: str
    num_cached: int  # tokens whose KV was there already
    exposed_s: float = 0.0  # the part of the transfer that prefill did not hide

    def hand_off(self, importer: str, now_s: float) -> HandOff:
        """Return the hand-off that brought the KV; its transport is "local" where the worker computed it."""
        return HandOff(importer, self.transport, self.kv_bytes, self.exposed_s, now_s - self.queue_s)


class SequenceToken(NamedTuple):
    """A token of a sequence. It is a tuple because there is one per token: a frozen dataclass takes four times as long
    to make.
    """

    handle: int
    index: int  # type: ignore[assignment]  # hides a method of tuples that nothing needs here
    token: SampledToken
    received_s: float  # when this router received its step, by its own clock


@dataclass(frozen=True, slots=True)
class SequencesFailed:
    """The worker does not continue these sequences."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The worker is lost, or its messages about these sequences are."""

    detail: str


class MoveOutcome(StrEnum):
    MOVED = "moved"  # the sequence continues at the other worker
    KEPT = "kept"  # it continued where it was
    RESTARTED = "restarted"  # neither worker had it any more: it is prefilled again
    ENDED = "ended"  # before it could be moved
    DEFERRED = "deferred"  # its worker has frozen as many as it may: ask again later


@dataclass(frozen=True, slots=True, eq=False)
class MoveRequest:
    """This router's own request to move the sequence to another decode worker."""

    handle: int
    target: MemberId | None  # None: placement chooses
    timeout_s: float  # for messages of the source in flight, and for the target to start
    outcome: asyncio.Future[MoveOutcome]

    def settle(self, outcome: MoveOutcome) -> None:
        """Set the outcome. Only the first call has an effect."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


DecodeEvent = SequencesStarted | SequenceToken | SequencesFailed | StreamLost | MoveRequest


class Sequences:
    """The handles of one attempt on the stream of a decode worker, and the events about them. One task waits at a
    time."""

    def __init__(self, all_progress: dict[int, SequenceProgress]) -> None:
        """`all_progress` is the progress of each sequence by handle."""
        self.handles = tuple(all_progress)
        self.all_progress = all_progress
        self.live = set(all_progress)
        self.started: set[int] = set()  # sequences that have joined the worker's batch
        self.on_first_token: Callable[[float], None] | None = None  # called once, with the time, where this is set
        self.events: deque[DecodeEvent] = deque()  # bounded by the request's own max_tokens
        self._take: Callable[[SequenceToken], None] | None = None  # takes tokens as they arrive
        self._woken: asyncio.Future[None] | None = None  # done when the task that waits must continue

    def put(self, event: DecodeEvent) -> None:
        """Add an event. A token goes to the attempt at once, if it waits in `next_besides_tokens`."""
        woken = self._woken
        if woken is None or woken.done():
            self.events.append(event)
        elif self._take is None or not isinstance(event, SequenceToken):
            self.events.append(event)
            woken.set_result(None)
        else:
            try:
                self._take(event)
            except Exception as error:  # noqa: BLE001  # the attempt's, which raises it; the stream serves others
                woken.set_exception(error)
            else:
                if not self.live:
                    woken.set_result(None)

    async def next_besides_tokens(self, take: Callable[[SequenceToken], None]) -> DecodeEvent | None:
        """Pass tokens to `take` as they arrive, without a switch to this task for each, until another event arrives.
        Returns that event; None when no sequence is live. Raises the errors of `take`.
        """
        while self.live:
            if not self.events:
                await self._wait(take)
                continue
            event = self.events.popleft()
            if not isinstance(event, SequenceToken):
                return event
            take(event)
        return None

    async def next(self) -> DecodeEvent:
        while not self.events:
            await self._wait()
        return self.events.popleft()

    async def unless_failed(self, until: asyncio.Future[None]) -> SequencesFailed | StreamLost | None:
        """Wait for `until`. Returns a failure that arrives before it. Other events wait, in their order."""
        while not until.done():
            failure = next((event for event in self.events if isinstance(event, SequencesFailed | StreamLost)), None)
            if failure is not None:
                self.events.remove(failure)
                return failure
            await self._wait(until=until)
        return None

    def split(self, handle: int) -> "Sequences":
        """Return one sequence by itself, with the events about it that were not read yet."""
        parted = Sequences({handle: self.all_progress[handle]})
        parted.started = self.started & parted.live
        self.live.discard(handle)
        for _ in range(len(self.events)):
            event = self.events.popleft()
            is_its_own = isinstance(event, SequenceToken | MoveRequest) and event.handle == handle
            if is_its_own or not isinstance(event, SequenceToken | MoveRequest):
                parted.events.append(event)
            if not is_its_own:
                self.events.append(event)
        return parted

    async def _wait(
        self, take: Callable[[SequenceToken], None] | None = None, *, until: asyncio.Future[None] | None = None
    ) -> None:
        """Wait for an event that `take` does not take, for the end of the last sequence, or for `until`."""
        assert self._woken is None, "another task waits for these events"
        self._take, self._woken = take, asyncio.get_running_loop().create_future()
        try:
            if until is None:
                await self._woken
            else:
                await first_done(self._woken, until)
        finally:
            self._take = self._woken = None


def tokens_of(step: worker_pb2.StepOutput, received_s: float) -> Iterator[SequenceToken]:
    """Yield every token of one engine step, which was received at this time. The message has been validated."""
    handles, token_ids, indices = map(wire.unpack_ids, (step.handles, step.token_ids, step.indices))
    if not step.ends and not step.logprobs:
        return map(SequenceToken, handles, indices, map(_plain_token, token_ids), repeat(received_s))
    return _tokens_with_more(step, handles, token_ids, indices, received_s)


def _tokens_with_more(
    step: worker_pb2.StepOutput,
    handles: Sequence[int],
    token_ids: Sequence[int],
    indices: Sequence[int],
    received_s: float,
) -> Iterator[SequenceToken]:
    ends = {end.handle: wire.finish_reason_from_wire(end.finish_reason) for end in step.ends}
    # Accepted draft tokens are several tokens of one step.
    last = {handle: position for position, handle in enumerate(handles)}
    for position, (handle, token_id, index) in enumerate(zip(handles, token_ids, indices, strict=True)):
        reason = ends.get(handle) if position == last[handle] else None
        yield SequenceToken(handle, index, SampledToken(token_id, _logprobs(step, position), reason), received_s)


@lru_cache(maxsize=1 << 16)
def _plain_token(token_id: int) -> SampledToken:
    return SampledToken(token_id, None, None)


def _logprobs(step: worker_pb2.StepOutput, position: int) -> TokenLogprobs | None:
    """Return the log-probabilities of a token; None if its sequence requested none, although another one of the message
    did.
    """
    if not step.logprobs or not step.logprobs[position].HasField("chosen"):
        return None
    return wire.logprobs_from_wire(step.logprobs[position])
