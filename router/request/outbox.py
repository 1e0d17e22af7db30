"""The deltas that wait for one client to read them.

The router always drains the streams of workers, so tokens that a client does not read accumulate here: at most the
`max_tokens` of its own request, and over all clients a bound above which clients are ended (`ClientBuffers` in
router/request/live_table.py). Whole responses count towards the same bound. A log-probability counts as one token.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

from cluster.clock import Clock
from cluster.errors import BuffersFull, SlowClient, TandemError
from router.request.live_table import ClientBuffers
from router.requests import ChoiceDelta, DirectReader, ScoredPrompt

MAX_PORTION_TOKENS = 4096  # tokens: what a connection is given to write is bounded as what waits for it is
_RETRY_S = 1.0


RecordDelivery = Callable[[Sequence[ChoiceDelta], float], object]  # deltas, and when the client was given them


class OutboxFlush:
    """Writes the deltas that came since its last turn to the readers of all outboxes: one callback of the event loop,
    and one reading of the clock, for all tokens of a step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due: list[Outbox] = []

    def add(self, outbox: "Outbox") -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._write)
        self._due.append(outbox)

    def _write(self) -> None:
        due, self._due = self._due, []
        now_s = self._clock.now_s()
        for outbox in due:
            outbox.write(now_s)


class Outbox:
    """The outbox of one request. The pipeline fills it and the client empties it."""

    def __init__(self, buffers: ClientBuffers, clock: Clock, flush: OutboxFlush, stream_interval: int = 1) -> None:
        """`stream_interval`: tokens of a choice that the client gets together, except at its beginning and its end."""
        self._clock = clock
        self._flush = flush
        self._stream_interval = stream_interval
        self._on_failure: list[Callable[[], object]] = []
        self._waiting: dict[int, list[ChoiceDelta]] = {}
        self._readable: dict[int, None] = {}  # the choices whose deltas the client can read now, the oldest first
        self._changed = asyncio.Event()
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._silent_at_s = math.inf  # when the present wait has taken too long; infinite: nothing waits
        self._silence_s = math.inf
        self._is_silent = False  # the present wait has taken too long
        self._failure: Exception | None = None
        self._reader: DirectReader | None = None
        self._record_delivery: RecordDelivery = _not_recorded  # what the reader gets
        self._is_awaited = False  # `next_deltas` waits
        self._will_write = False  # to the reader, soon
        self._prompt: ScoredPrompt | None = None
        self.had_prompt = False  # the client gets it with its first deltas, or has it
        self.share = buffers.add(self._on_full)

    def connect(self, reader: DirectReader, record_delivery: RecordDelivery) -> None:
        """Write deltas to `reader` while `next_deltas` waits for them and the reader can take them. Deltas that come
        together are one portion. Errors of the reader are raised by `next_deltas`."""
        self._reader, self._record_delivery = reader, record_delivery

    def put(self, delta: ChoiceDelta, now_s: float | None = None) -> None:
        """`now_s`: the present, where the caller has read the clock, which takes a microsecond on some machines."""
        if self._failure is not None:
            return
        choice, waiting = delta.choice, self._waiting.get(delta.choice)
        if waiting is None:
            waiting = self._waiting[choice] = []
        waiting.append(delta)
        is_readable = choice in self._readable
        if not is_readable and (self._stream_interval == 1 or self._completes(waiting[0], delta)):
            is_readable, self._readable[choice] = True, None
            self._hand_out()
        add = self.share.add_readable if is_readable else self.share.add_unreadable
        add(weight(delta), self._clock.now_s() if now_s is None else now_s)

    def put_prompt(self, prompt: ScoredPrompt) -> None:
        """Keep the prompt until the client takes its first deltas. Only the first one counts: another attempt may score
        the prompt again."""
        if self.had_prompt or self._failure is not None:
            return
        self._prompt, self.had_prompt = prompt, True
        self.share.add_unreadable(prompt.num_values, self._clock.now_s())

    def take_prompt(self) -> ScoredPrompt | None:
        """Return the scored prompt at the first call, and None later."""
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            can_read_more = bool(self._readable)
            self.share.subtract_read(prompt.num_values, self._clock.now_s(), can_read_more=can_read_more)
        return prompt

    def on_failure(self, stop: Callable[[], object]) -> None:
        """Register a function that is called when the outbox fails."""
        self._on_failure.append(stop)

    def end(self) -> None:
        """Record that no more deltas follow."""
        self._ended = True
        self._stop_timer()
        self._readable.update(dict.fromkeys(self._waiting))
        self._changed.set()

    def fail(self, error: TandemError) -> None:
        """End the client's stream with this error, drop the waiting deltas, and call the registered functions."""
        self._failure = error
        self._stop_timer()
        self.clear()
        self._changed.set()
        for stop in self._on_failure:
            stop()

    def close(self) -> None:
        """Drop what is left and all references, because the client has left. Without a cycle of references, a request
        is freed at once and leaves nothing to the garbage collector."""
        self.clear()
        self._on_failure.clear()
        self._reader, self._record_delivery = None, _not_recorded

    def clear(self) -> None:
        self._waiting.clear()
        self._readable.clear()
        self._prompt = None
        self.share.clear()

    async def next_deltas(self, within_s: float | None = None) -> tuple[ChoiceDelta, ...] | None:
        """Wait for deltas and return at most one per choice, `MAX_PORTION_TOKENS` tokens or slightly more in all.

        Returns an empty tuple at the end, and None if nothing came within `within_s`. Raises the error of `fail`."""
        while not self._readable and not self._ended and self._failure is None:
            self._changed.clear()
            self._is_awaited = True
            try:
                if within_s is None:
                    await self._changed.wait()
                elif not await self._changes_within(within_s):
                    return None
            finally:
                self._is_awaited = False
        if self._failure is not None:
            raise self._failure
        return self._portion()

    def _hand_out(self) -> None:
        """Pass readable deltas on: to the client's reader once all tokens of this step are here, or to the task that
        awaits `next_deltas`.
        """
        if self._will_write:
            return
        if self._reader is not None and self._is_awaited:
            self._will_write = True
            self._flush.add(self)
        else:
            self._changed.set()

    def write(self, now_s: float) -> None:
        """Write to the reader, as this outbox asked of its `OutboxFlush`, which alone calls this."""
        self._will_write = False
        if self._reader is None or not self._readable:
            return  # the task has taken it, or the request has ended
        if not self._is_awaited or not self._reader.can_write():
            self._changed.set()
            return
        try:
            portion = self._portion()
            self._record_delivery(portion, now_s)
            self._reader.write(portion)
        except Exception as error:  # noqa: BLE001  # raised again where the outbox is read
            self._failure = error
        if self._silent_at_s < math.inf:
            self._silent_at_s = asyncio.get_running_loop().time() + self._silence_s
        if self._readable or self._failure is not None:
            self._changed.set()

    async def _changes_within(self, within_s: float) -> bool:
        """Wait for a change, and return whether it came in time. One timer serves all waits, because most of them are
        shorter than starting a timer.
        """
        loop = asyncio.get_running_loop()
        self._silence_s = within_s
        self._silent_at_s = loop.time() + within_s
        if self._timer is None or self._timer.when() > self._silent_at_s:
            self._stop_timer()
            self._timer = loop.call_at(self._silent_at_s, self._look)
        try:
            await self._changed.wait()
        finally:
            self._silent_at_s = math.inf
        is_silent, self._is_silent = self._is_silent, False
        return not is_silent

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if loop.time() >= self._silent_at_s:
            self._is_silent = True
            self._changed.set()
        elif self._silent_at_s < math.inf:
            self._timer = loop.call_at(self._silent_at_s, self._look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _portion(self) -> tuple[ChoiceDelta, ...]:
        """Return the oldest deltas of each choice. A choice that is cut short waits behind the others."""
        if len(self._readable) == 1:
            (choice,) = self._readable
            if len(waiting := self._waiting[choice]) == 1:  # most portions
                self._readable.clear()
                del self._waiting[choice]
                self.share.subtract_last_read(weight(waiting[0]))
                return (waiting[0],)
        left, portion = MAX_PORTION_TOKENS, []
        while self._readable and left > 0:
            choice = next(iter(self._readable))
            del self._readable[choice]
            waiting, num_taken = self._waiting.pop(choice), 0
            while num_taken < len(waiting) and left > 0:
                left, num_taken = left - weight(waiting[num_taken]), num_taken + 1
            if num_taken < len(waiting):
                self._waiting[choice], self._readable[choice] = waiting[num_taken:], None
            portion.append(_merged(waiting[:num_taken]))
        num_read = MAX_PORTION_TOKENS - left
        self.share.subtract_read(num_read, self._clock.now_s(), can_read_more=bool(self._readable))
        return tuple(portion)

    def _completes(self, first: ChoiceDelta, last: ChoiceDelta) -> bool:
        """Return whether the client gets the deltas from `first` to `last` now: a whole interval of tokens, the first
        token, or the end."""
        if last.finish_reason is not None or first.first_index == 0:
            return True
        return last.first_index + len(last.token_ids) - first.first_index >= self._stream_interval

    def _on_full(self, description: str, has_stopped: bool) -> None:
        self.fail(SlowClient(f"{description}; read faster"))


class WholeAnswer:
    """The deltas that are collected for a client that does not stream, or the scored prompts of one that does. Raises
    BuffersFull or SlowClient once it was ended."""

    def __init__(self, buffers: ClientBuffers, clock: Clock) -> None:
        self._clock = clock
        self._deltas: dict[int, list[ChoiceDelta]] = {}
        self._failure: TandemError | None = None
        self._on_ended: Callable[[], object] | None = None
        self.ended = asyncio.Event()
        self.share = buffers.add(self._on_full)

    def add(self, deltas: Sequence[ChoiceDelta], prompt: ScoredPrompt | None = None) -> None:
        """Add deltas, and count a prompt that the caller keeps with them."""
        if prompt is not None:
            self.share.add_unreadable(prompt.num_values, self._clock.now_s())
        for delta in deltas:
            self.check_open()
            self._deltas.setdefault(delta.choice, []).append(delta)
            self.share.add_unreadable(weight(delta), self._clock.now_s())
        self.check_open()

    def choices(self) -> list[list[ChoiceDelta]]:
        """Return the deltas of each choice, in the order of their numbers."""
        return [self._deltas[number] for number in sorted(self._deltas)]

    def begin_sending(self, on_ended: Callable[[], object] | None = None) -> None:
        """Record that the client can read the response from now on, and must. `on_ended` is called if it is ended."""
        self._deltas.clear()
        self._on_ended = on_ended
        self.share.add_readable(0, self._clock.now_s())

    def part_sent(self) -> None:
        """Record that the client has read a part."""
        self.share.subtract_read(0, self._clock.now_s())

    def pause_sending(self) -> None:
        """Record that there is nothing more for the client to read now."""
        self.share.subtract_read(0, self._clock.now_s(), can_read_more=False)

    def check_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _on_full(self, description: str, has_stopped: bool) -> None:
        if has_stopped:
            self._failure = SlowClient(f"{description}; read faster")
        else:
            advice = "stream the answer, ask for fewer tokens, or try again"
            self._failure = BuffersFull(f"{description}; {advice}", retry_after_s=_RETRY_S)
        self._deltas.clear()
        self.share.clear()
        self.ended.set()
        if self._on_ended is not None:
            self._on_ended()


def _not_recorded(_deltas: Sequence[ChoiceDelta], _now_s: float) -> None:
    pass


def weight(delta: ChoiceDelta) -> int:
    """Return the size of a delta in tokens."""
    num_tokens = len(delta.token_ids)
    return num_tokens + sum(len(logprobs.top) for logprobs in delta.logprobs) if delta.logprobs else num_tokens


def _merged(deltas: list[ChoiceDelta]) -> ChoiceDelta:
    """Merge consecutive deltas of one choice."""
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
