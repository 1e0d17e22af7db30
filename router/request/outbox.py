"""What waits for clients to read it. Workers' streams are always drained, so what a client does not read piles up here:
at most its own request's tokens, and over all requests a cap, past which clients are ended
(`router/request/buffers.py` says which). What is collected for whole answers counts towards the same cap.

Owns the waiting deltas and their number. Never looks into a request. A log-probability counts as a token.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cluster.clock import Clock
from cluster.errors import BuffersFull, SlowClient, TandemError
from router.request.buffers import Buffers
from router.requests import ChoiceDelta

MOST_TAKEN = 4096  # tokens: what a connection is given to write is bounded as what waits for it is
_RETRY_S = 1.0


class Outbox:
    """One request's. Filled by its story, emptied by its client."""

    def __init__(self, buffers: Buffers, clock: Clock) -> None:
        self._clock = clock
        self._on_slow: list[Callable[[], object]] = []
        self._waiting: dict[int, list[ChoiceDelta]] = {}
        self._changed = asyncio.Event()
        self._ended = False
        self._given_up: TandemError | None = None
        self.share = buffers.add(self._on_full)

    def put(self, delta: ChoiceDelta) -> None:
        if self._given_up is None:
            self._waiting.setdefault(delta.choice, []).append(delta)
            self._changed.set()
            self.share.offer(weight(delta), self._clock.now_s())

    def on_slow(self, stop: Callable[[], object]) -> None:
        """Called when the client is given up."""
        self._on_slow.append(stop)

    def end(self) -> None:
        """Nothing more will be put."""
        self._ended = True
        self._changed.set()

    def give_up(self, error: TandemError) -> None:
        """The client is too slow, or reads another stream: what waits is dropped, and the story is told to stop."""
        self._given_up = error
        self.clear()
        self._changed.set()
        for stop in self._on_slow:
            stop()

    def clear(self) -> None:
        self._waiting.clear()
        self.share.clear()

    async def take(self, within_s: float | None = None) -> tuple[ChoiceDelta, ...] | None:
        """Waits for something; one delta per choice with what it grew by, `MOST_TAKEN` tokens or little more in all.
        Empty: the end. None: nothing came `within_s`. Raises what it was given up with."""
        while not self._waiting and not self._ended and self._given_up is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._changed.wait()
            except TimeoutError:
                return None
        if self._given_up is not None:
            raise self._given_up
        return self._portion()

    def _portion(self) -> tuple[ChoiceDelta, ...]:
        """Of each choice what is oldest; one that is cut short waits behind the others."""
        left, portion = MOST_TAKEN, []
        while self._waiting and left > 0:
            choice = next(iter(self._waiting))
            waiting, num_taken = self._waiting.pop(choice), 0
            while num_taken < len(waiting) and left > 0:
                left, num_taken = left - weight(waiting[num_taken]), num_taken + 1
            if num_taken < len(waiting):
                self._waiting[choice] = waiting[num_taken:]
            portion.append(_merged(waiting[:num_taken]))
        self.share.take(MOST_TAKEN - left, self._clock.now_s())
        return tuple(portion)

    def _on_full(self, told: str, is_stopped: bool) -> None:
        self.give_up(SlowClient(f"{told}; read faster"))


class WholeAnswer:
    """What is collected for a client that wants its answer whole. Raises BuffersFull, SlowClient once it was ended."""

    def __init__(self, buffers: Buffers, clock: Clock) -> None:
        self._clock = clock
        self._deltas: dict[int, list[ChoiceDelta]] = {}
        self._given_up: TandemError | None = None
        self.ended = asyncio.Event()
        self.share = buffers.add(self._on_full)

    def add(self, deltas: Sequence[ChoiceDelta]) -> None:
        for delta in deltas:
            self.check_open()
            self._deltas.setdefault(delta.choice, []).append(delta)
            self.share.keep(weight(delta), self._clock.now_s())
        self.check_open()

    def choices(self) -> list[list[ChoiceDelta]]:
        """The deltas of each choice, by its number."""
        return [self._deltas[number] for number in sorted(self._deltas)]

    def offered(self) -> None:
        """From now on the client can take it, and has to."""
        self._deltas.clear()
        self.share.offer(0, self._clock.now_s())

    def taken(self) -> None:
        """The client has taken a part."""
        self.share.take(0, self._clock.now_s())

    def check_open(self) -> None:
        if self._given_up is not None:
            raise self._given_up

    def _on_full(self, told: str, is_stopped: bool) -> None:
        if is_stopped:
            self._given_up = SlowClient(f"{told}; read faster")
        else:
            advice = "stream the answer, ask for fewer tokens, or try again"
            self._given_up = BuffersFull(f"{told}; {advice}", retry_after_s=_RETRY_S)
        self._deltas.clear()
        self.share.clear()
        self.ended.set()


class Outboxes:
    """All of a router's, and the whole answers that it collects."""

    def __init__(self, *, max_tokens: int, clock: Clock) -> None:
        self._buffers, self._clock = Buffers(max_tokens), clock

    @property
    def num_tokens(self) -> int:
        return self._buffers.num_tokens

    @contextmanager
    def open(self) -> Iterator[Outbox]:
        outbox = Outbox(self._buffers, self._clock)
        try:
            yield outbox
        finally:
            outbox.clear()
            self._buffers.remove(outbox.share)

    @contextmanager
    def whole_answer(self) -> Iterator[WholeAnswer]:
        """Counted until the block is left."""
        answer = WholeAnswer(self._buffers, self._clock)
        try:
            yield answer
        finally:
            self._buffers.remove(answer.share)

    def check(self) -> None:
        self._buffers.check()


def weight(delta: ChoiceDelta) -> int:
    """In tokens."""
    return len(delta.token_ids) + sum(len(logprobs.top) for logprobs in delta.logprobs)


def _merged(deltas: list[ChoiceDelta]) -> ChoiceDelta:
    """Consecutive deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    return ChoiceDelta(
        choice=deltas[0].choice,
        first_index=deltas[0].first_index,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
        stop_cause=deltas[-1].stop_cause,
    )
