"""What waits for clients to read it. Workers' streams are always drained, so what a client does not read piles up here:
at most its own request's tokens, and over all requests a cap, past which the slowest client is given up.

Owns the waiting deltas and their number. Never looks into a request. A log-probability counts as a token.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.errors import SlowClient, TandemError
from router.requests import ChoiceDelta

MOST_TAKEN = 4096  # tokens: what a connection is given to write is bounded as what waits for it is


class Outbox:
    """One request's. Filled by its story, emptied by its client."""

    def __init__(self, on_put: Callable[[int], None]) -> None:
        self._on_put = on_put
        self._on_slow: list[Callable[[], object]] = []
        self._waiting: dict[int, list[ChoiceDelta]] = {}
        self._changed = asyncio.Event()
        self._ended = False
        self._given_up: TandemError | None = None
        self.num_tokens = 0

    def put(self, delta: ChoiceDelta) -> None:
        if self._given_up is None:
            self._waiting.setdefault(delta.choice, []).append(delta)
            self._changed.set()
            self._count(_weight(delta))

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
        self._count(-self.num_tokens)

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
        return tuple(self._portion())

    def _portion(self) -> Iterator[ChoiceDelta]:
        """Of each choice what is oldest; one that is cut short waits behind the others."""
        left = MOST_TAKEN
        while self._waiting and left > 0:
            choice = next(iter(self._waiting))
            waiting, taken = self._waiting.pop(choice), 0
            while taken < len(waiting) and left > 0:
                weight = _weight(waiting[taken])
                self._count(-weight)
                left, taken = left - weight, taken + 1
            if taken < len(waiting):
                self._waiting[choice] = waiting[taken:]
            yield _merged(waiting[:taken])

    def _count(self, change: int) -> None:
        self.num_tokens += change
        self._on_put(change)


class Outboxes:
    """All of a router's."""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._open: set[Outbox] = set()
        self.num_tokens = 0

    @contextmanager
    def open(self) -> Iterator[Outbox]:
        outbox = Outbox(self._on_put)
        self._open.add(outbox)
        try:
            yield outbox
        finally:
            outbox.clear()
            self._open.remove(outbox)

    def check(self) -> None:
        assert self.num_tokens == sum(outbox.num_tokens for outbox in self._open), "waiting tokens do not add up"

    def _on_put(self, change: int) -> None:
        self.num_tokens += change
        if self.num_tokens > self._max_tokens:
            slowest = max(self._open, key=lambda outbox: outbox.num_tokens)
            slowest.give_up(
                SlowClient(
                    f"{slowest.num_tokens} tokens were waiting for this client, the most of all, and"
                    f" {self.num_tokens} for all clients, more than {self._max_tokens}; read faster"
                )
            )


def _weight(delta: ChoiceDelta) -> int:
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
