"""The number of buffered tokens is bounded over all clients, and a client that does not read is ended."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from cluster.clock import ManualClock
from cluster.errors import BuffersFull, SlowClient
from cluster.messages import FinishReason, TokenLogprobs
from cluster.observe.telemetry import Telemetry
from router.request.live_requests import LiveRequests
from router.request.outbox import MAX_PORTION_TOKENS, Outbox
from router.requests import ChoiceDelta, GenerateRequest, TextPrompt


def _live_requests(max_buffered_tokens: int, clock: ManualClock) -> LiveRequests:
    return LiveRequests(
        max_live_requests=8, max_buffered_tokens=max_buffered_tokens, clock=clock, telemetry=Telemetry()
    )


@contextmanager
def _outbox(live_requests: LiveRequests) -> Iterator[Outbox]:
    with live_requests.arrived(GenerateRequest(TextPrompt("p"))) as live:
        yield live.outbox


def delta(choice: int, first_index: int, *token_ids: int, text: str = "") -> ChoiceDelta:
    return ChoiceDelta(choice, first_index, token_ids, text)


async def test_waiting_deltas_are_merged_into_one_per_choice_in_order() -> None:
    live_requests = _live_requests(100, ManualClock())
    with _outbox(live_requests) as outbox:
        for item in (delta(0, 0, 1, text="a"), delta(1, 0, 7), delta(0, 1, 2, 3, text="b"), delta(0, 3, text="c")):
            outbox.put(item)
        live_requests.check()
        assert await outbox.next_deltas() == (delta(0, 0, 1, 2, 3, text="abc"), delta(1, 0, 7))
        outbox.end()
        assert await outbox.next_deltas() == ()
    live_requests.check()


async def test_a_client_that_has_read_everything_has_not_stopped_however_late_the_next_token_comes() -> None:
    clock = ManualClock()
    live_requests = _live_requests(100, clock)
    with _outbox(live_requests) as outbox:
        for index in range(2):
            outbox.put(delta(0, index, index), clock.now_s())
            clock.advance(3.0)
            assert outbox.share.stopped_s(clock.now_s()) == 3.0
            assert await outbox.next_deltas() == (delta(0, index, index),)
            clock.advance(5.0)
            assert outbox.share.stopped_s(clock.now_s()) == 0.0
    live_requests.check()


async def test_above_the_bound_only_the_slowest_client_is_ended() -> None:
    stopped: list[str] = []
    live_requests = _live_requests(10, ManualClock())
    with _outbox(live_requests) as slow, _outbox(live_requests) as quick:
        slow.on_failure(lambda: stopped.append("slow"))
        quick.on_failure(lambda: stopped.append("quick"))
        slow.put(delta(0, 0, *range(8)))
        quick.put(delta(0, 0, 1, 2))
        assert stopped == []
        quick.put(delta(0, 2, 3))
        assert stopped == ["slow"]
        slow.put(delta(0, 8, 9))  # its request has not been cancelled yet
        assert live_requests.num_buffered_tokens == 3
        with pytest.raises(SlowClient, match="8 tokens were kept"):
            await slow.next_deltas()
        assert await quick.next_deltas() == (delta(0, 0, 1, 2, 3),)
        live_requests.check()
    assert live_requests.num_buffered_tokens == 0


async def test_a_stopped_client_is_ended_before_a_reading_one_with_more() -> None:
    clock = ManualClock()
    live_requests = _live_requests(100, clock)
    with _outbox(live_requests) as stopped, _outbox(live_requests) as reading:
        stopped.put(delta(0, 0, 1, 2))
        for index in range(20):
            clock.advance(0.1)
            reading.put(delta(0, index, index))
            await reading.next_deltas()
        reading.put(delta(0, 20, *range(99)))
        with pytest.raises(SlowClient, match=r"2 tokens were kept for this client, which took none for 2\.0 s"):
            await stopped.next_deltas()
        assert live_requests.num_buffered_tokens == 99
        assert await reading.next_deltas() == (delta(0, 20, *range(99)),)
    live_requests.check()


async def test_a_whole_answer_counts_as_buffered_and_the_largest_is_ended_with_a_named_error() -> None:
    clock = ManualClock()
    live_requests = _live_requests(100, clock)
    with (
        live_requests.whole_answer() as whole,
        live_requests.whole_answer() as small,
        _outbox(live_requests) as reading,
    ):
        small.add([delta(0, 0, 1), delta(1, 0, 2)])
        whole.add([delta(0, 0, *range(50)), delta(1, 0, *range(45))])
        assert live_requests.num_buffered_tokens == 97
        reading.put(delta(0, 0, 1, 2, 3, 4))
        assert whole.ended.is_set() and live_requests.num_buffered_tokens == 6
        with pytest.raises(BuffersFull, match="95 tokens were kept for this client, and 101 for all"):
            whole.add([delta(0, 50, 1)])
        small.add([delta(0, 1, 3)])
        assert small.choices() == [[delta(0, 0, 1), delta(0, 1, 3)], [delta(1, 0, 2)]]
        live_requests.check()
    assert live_requests.num_buffered_tokens == 0


async def test_a_client_that_does_not_read_its_whole_answer_has_stopped() -> None:
    clock = ManualClock()
    live_requests = _live_requests(100, clock)
    with live_requests.whole_answer() as whole, _outbox(live_requests) as reading:
        whole.add([delta(0, 0, *range(10))])
        clock.advance(60.0)  # collecting takes its time, which is not its client's fault
        reading.put(delta(0, 0, *range(95)))
        assert not whole.ended.is_set()
    with live_requests.whole_answer() as whole, _outbox(live_requests) as reading:
        whole.add([delta(0, 0, *range(10))])
        whole.begin_sending()
        clock.advance(1.0)
        reading.put(delta(0, 0, *range(95)))
        assert whole.ended.is_set()
        assert await reading.next_deltas() is not None
        with pytest.raises(SlowClient):
            whole.check_open()


async def test_the_buffered_tokens_of_a_client_that_left_are_dropped() -> None:
    live_requests = _live_requests(100, ManualClock())
    with _outbox(live_requests) as outbox:
        outbox.put(delta(0, 0, 1, 2, 3))
    assert live_requests.num_buffered_tokens == 0
    live_requests.check()


async def test_one_batch_of_messages_is_bounded_and_the_rest_follows_in_order() -> None:
    live_requests = _live_requests(100_000, ManualClock())
    with _outbox(live_requests) as outbox:
        for index in range(MAX_PORTION_TOKENS + 10):
            outbox.put(delta(0, index, index))
        outbox.put(delta(1, 0, 7))
        first = await outbox.next_deltas() or ()
        assert [(d.choice, d.first_index, len(d.token_ids)) for d in first] == [(0, 0, MAX_PORTION_TOKENS)]
        second = await outbox.next_deltas() or ()
        assert [(d.choice, d.first_index, len(d.token_ids)) for d in second] == [(1, 0, 1), (0, MAX_PORTION_TOKENS, 10)]
        assert live_requests.num_buffered_tokens == 0
    live_requests.check()


async def test_each_log_probability_counts_as_a_token() -> None:
    live_requests = _live_requests(100, ManualClock())
    logprobs = TokenLogprobs(5, -0.5, tuple((token_id, -1.0) for token_id in range(20)))
    with _outbox(live_requests) as outbox:
        for index in range(4):
            outbox.put(ChoiceDelta(0, index, (5,), "x", (logprobs,)))
        assert live_requests.num_buffered_tokens == 84
        outbox.put(ChoiceDelta(0, 4, (5,), "x", (logprobs,)))
        with pytest.raises(SlowClient):
            await outbox.next_deltas()


async def test_an_interval_of_tokens_comes_together_but_the_first_token_and_the_end_at_once() -> None:
    live_requests = _live_requests(100, ManualClock())
    request = GenerateRequest(TextPrompt("p"), stream_interval=3)
    with live_requests.arrived(request) as live:
        outbox, portions = live.outbox, []
        for index in range(8):
            finish_reason = FinishReason.LENGTH if index == 7 else None
            outbox.put(ChoiceDelta(0, index, (index,), finish_reason=finish_reason))
            while (deltas := await outbox.next_deltas(within_s=0.0)) is not None:
                portions += [one.token_ids for one in deltas]
        assert portions == [(0,), (1, 2, 3), (4, 5, 6), (7,)]
    live_requests.check()


async def test_every_choice_has_its_own_interval_and_the_rest_comes_with_the_end() -> None:
    live_requests = _live_requests(100, ManualClock())
    with live_requests.arrived(GenerateRequest(TextPrompt("p"), n=2, stream_interval=2)) as live:
        for choice, index in ((0, 0), (1, 0)):
            live.outbox.put(delta(choice, index, index))
        assert await live.outbox.next_deltas() == (delta(0, 0, 0), delta(1, 0, 0))
        live.outbox.put(delta(0, 1, 1))
        live.outbox.put(delta(1, 1, 1))
        live.outbox.put(delta(0, 2, 2))
        assert await live.outbox.next_deltas() == (delta(0, 1, 1, 2),)
        live.outbox.end()
        assert await live.outbox.next_deltas() == (delta(1, 1, 1),)
        assert await live.outbox.next_deltas() == ()
    live_requests.check()


async def test_tokens_that_wait_for_their_interval_are_not_held_against_the_client() -> None:
    clock = ManualClock()
    live_requests = _live_requests(10, clock)
    with live_requests.arrived(GenerateRequest(TextPrompt("p"), stream_interval=50)) as live:
        for index in range(3):
            live.outbox.put(delta(0, index, index))
            await live.outbox.next_deltas(within_s=0.0)
        clock.advance(60.0)
        with _outbox(live_requests) as reading:
            reading.put(delta(0, 0, *range(9)))  # above the bound: the one with most tokens is ended
            with pytest.raises(SlowClient, match="9 tokens were kept"):
                await reading.next_deltas()
        assert live_requests.num_buffered_tokens == 2


async def test_every_wait_has_its_own_time_regardless_of_earlier_waits() -> None:
    live_requests = _live_requests(100, ManualClock())
    with _outbox(live_requests) as outbox:
        for index, within_s in enumerate((60.0, 0.01, 60.0)):  # with one minute for all, the second takes a minute
            waiting = asyncio.create_task(outbox.next_deltas(within_s))
            if within_s < 1.0:
                assert await waiting is None
                continue
            await asyncio.sleep(0)
            outbox.put(delta(0, index, index))
            assert await waiting == (delta(0, index, index),)
        assert [await outbox.next_deltas(0.01) for _ in range(3)] == [None] * 3


class _Reader:
    """A client to which deltas are written directly."""

    def __init__(self) -> None:
        self.is_ready = True
        self.error: Exception | None = None
        self.portions: list[tuple[ChoiceDelta, ...]] = []
        self.recorded: list[tuple[tuple[ChoiceDelta, ...], float]] = []
        self.written_s = -math.inf

    def can_write(self) -> bool:
        return self.is_ready

    def record_delivery(self, deltas: Sequence[ChoiceDelta], now_s: float) -> None:
        self.recorded.append((tuple(deltas), now_s))

    def write(self, deltas: Sequence[ChoiceDelta]) -> None:
        if self.error is not None:
            raise self.error
        self.portions.append(tuple(deltas))
        self.written_s = asyncio.get_running_loop().time()


async def test_tokens_that_come_together_are_written_as_one_portion_past_the_task_that_waits() -> None:
    live_requests, reader = _live_requests(100, ManualClock()), _Reader()
    with _outbox(live_requests) as outbox:
        outbox.connect(reader, reader.record_delivery)
        waiting = asyncio.create_task(outbox.next_deltas())
        await asyncio.sleep(0)
        for item in (delta(0, 0, 1, text="a"), delta(1, 0, 7), delta(0, 1, 2, text="b")):
            outbox.put(item)
        assert reader.portions == []
        await asyncio.sleep(0)
        assert reader.portions == [(delta(0, 0, 1, 2, text="ab"), delta(1, 0, 7))]
        assert not waiting.done() and live_requests.num_buffered_tokens == 0
        outbox.put(delta(0, 2, 3))
        outbox.end()
        assert await waiting == ()
        assert reader.portions[1:] == [(delta(0, 2, 3),)]
    live_requests.check()


async def test_tokens_wait_for_the_task_while_their_reader_cannot_take_them() -> None:
    live_requests, reader = _live_requests(100, ManualClock()), _Reader()
    with _outbox(live_requests) as outbox:
        outbox.connect(reader, reader.record_delivery)
        outbox.put(delta(0, 0, 1))  # before the task waits
        assert await outbox.next_deltas() == (delta(0, 0, 1),)
        waiting = asyncio.create_task(outbox.next_deltas())
        await asyncio.sleep(0)
        outbox.put(delta(0, 1, 2))
        reader.is_ready = False  # another portion has filled its connection
        outbox.put(delta(0, 2, 3))
        assert await waiting == (delta(0, 1, 2, 3),)
        assert reader.portions == []
    live_requests.check()


async def test_an_error_of_a_reader_is_raised_where_the_outbox_is_read() -> None:
    live_requests, reader = _live_requests(100, ManualClock()), _Reader()
    with _outbox(live_requests) as outbox:
        outbox.connect(reader, reader.record_delivery)
        reader.error = ValueError("no such token")
        waiting = asyncio.create_task(outbox.next_deltas(60.0))
        await asyncio.sleep(0)
        outbox.put(delta(0, 0, 1))
        with pytest.raises(ValueError, match="no such token"):
            await waiting
    live_requests.check()


async def test_a_written_portion_begins_the_time_without_an_output_again() -> None:
    live_requests, reader = _live_requests(100, ManualClock()), _Reader()
    loop = asyncio.get_running_loop()
    with _outbox(live_requests) as outbox:
        outbox.connect(reader, reader.record_delivery)
        waiting = asyncio.create_task(outbox.next_deltas(0.1))
        for index in range(3):
            await asyncio.sleep(0.03)
            outbox.put(delta(0, index, index))
        assert await waiting is None
        assert loop.time() - reader.written_s >= 0.1  # whenever this process is stopped
    live_requests.check()


async def test_tokens_of_one_step_are_written_together_and_the_error_of_one_client_is_its_own() -> None:
    clock = ManualClock()
    live_requests, broken, sound = _live_requests(100, clock), _Reader(), _Reader()
    with _outbox(live_requests) as first, _outbox(live_requests) as second:
        waiting = []
        for outbox, reader in ((first, broken), (second, sound)):
            outbox.connect(reader, reader.record_delivery)
            waiting.append(asyncio.create_task(outbox.next_deltas()))
        await asyncio.sleep(0)
        broken.error = ValueError("no such token")
        first.put(delta(0, 0, 1))
        second.put(delta(0, 0, 2))
        clock.advance(2.0)
        await asyncio.sleep(0)
        assert sound.recorded == [((delta(0, 0, 2),), 2.0)] and sound.portions == [(delta(0, 0, 2),)]
        with pytest.raises(ValueError, match="no such token"):
            await waiting[0]
        second.end()
        assert await waiting[1] == ()
    live_requests.check()
