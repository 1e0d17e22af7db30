"""What waits for clients is bounded over all of them, and the client that does not read pays."""

import pytest

from cluster.clock import ManualClock
from cluster.errors import BuffersFull, SlowClient
from cluster.messages import TokenLogprobs
from router.request.outbox import MOST_TAKEN, Outboxes
from router.requests import ChoiceDelta


def delta(choice: int, first_index: int, *token_ids: int, text: str = "") -> ChoiceDelta:
    return ChoiceDelta(choice, first_index, token_ids, text)


async def test_what_waited_comes_as_one_delta_per_choice_in_order() -> None:
    outboxes = Outboxes(max_tokens=100, clock=ManualClock())
    with outboxes.open() as outbox:
        for item in (delta(0, 0, 1, text="a"), delta(1, 0, 7), delta(0, 1, 2, 3, text="b"), delta(0, 3, text="c")):
            outbox.put(item)
        outboxes.check()
        assert await outbox.take() == (delta(0, 0, 1, 2, 3, text="abc"), delta(1, 0, 7))
        outbox.end()
        assert await outbox.take() == ()
    outboxes.check()


async def test_past_the_cap_the_slowest_client_is_given_up_and_only_that_one() -> None:
    stopped: list[str] = []
    outboxes = Outboxes(max_tokens=10, clock=ManualClock())
    with outboxes.open() as slow, outboxes.open() as quick:
        slow.on_slow(lambda: stopped.append("slow"))
        quick.on_slow(lambda: stopped.append("quick"))
        slow.put(delta(0, 0, *range(8)))
        quick.put(delta(0, 0, 1, 2))
        assert stopped == []
        quick.put(delta(0, 2, 3))
        assert stopped == ["slow"]
        slow.put(delta(0, 8, 9))  # its story has not heard yet
        assert outboxes.num_tokens == 3
        with pytest.raises(SlowClient, match="8 tokens were kept"):
            await slow.take()
        assert await quick.take() == (delta(0, 0, 1, 2, 3),)
        outboxes.check()
    assert outboxes.num_tokens == 0


async def test_a_stopped_client_is_ended_before_a_reading_one_with_more() -> None:
    clock = ManualClock()
    outboxes = Outboxes(max_tokens=100, clock=clock)
    with outboxes.open() as stopped, outboxes.open() as reading:
        stopped.put(delta(0, 0, 1, 2))
        for index in range(20):
            clock.advance(0.1)
            reading.put(delta(0, index, index))
            await reading.take()
        reading.put(delta(0, 20, *range(99)))
        with pytest.raises(SlowClient, match=r"2 tokens were kept for this client, which took none for 2\.0 s"):
            await stopped.take()
        assert outboxes.num_tokens == 99
        assert await reading.take() == (delta(0, 20, *range(99)),)
    outboxes.check()


async def test_a_whole_answer_counts_and_is_refused_by_name_when_it_is_the_most() -> None:
    clock = ManualClock()
    outboxes = Outboxes(max_tokens=100, clock=clock)
    with outboxes.whole_answer() as whole, outboxes.whole_answer() as small, outboxes.open() as reading:
        small.add([delta(0, 0, 1), delta(1, 0, 2)])
        whole.add([delta(0, 0, *range(50)), delta(1, 0, *range(45))])
        assert outboxes.num_tokens == 97
        reading.put(delta(0, 0, 1, 2, 3, 4))
        assert whole.ended.is_set() and outboxes.num_tokens == 6
        with pytest.raises(BuffersFull, match="95 tokens were kept for this client, and 101 for all"):
            whole.add([delta(0, 50, 1)])
        small.add([delta(0, 1, 3)])
        assert small.choices() == [[delta(0, 0, 1), delta(0, 1, 3)], [delta(1, 0, 2)]]
        outboxes.check()
    assert outboxes.num_tokens == 0


async def test_a_whole_answer_that_its_client_does_not_take_is_a_stopped_client() -> None:
    clock = ManualClock()
    outboxes = Outboxes(max_tokens=100, clock=clock)
    with outboxes.whole_answer() as whole, outboxes.open() as reading:
        whole.add([delta(0, 0, *range(10))])
        clock.advance(60.0)  # collecting takes its time, which is not its client's fault
        reading.put(delta(0, 0, *range(95)))
        assert not whole.ended.is_set()
    with outboxes.whole_answer() as whole, outboxes.open() as reading:
        whole.add([delta(0, 0, *range(10))])
        whole.offered()
        clock.advance(1.0)
        reading.put(delta(0, 0, *range(95)))
        assert whole.ended.is_set()
        assert await reading.take() is not None
        with pytest.raises(SlowClient):
            whole.check_open()


async def test_a_client_that_leaves_takes_what_waited_with_it() -> None:
    outboxes = Outboxes(max_tokens=100, clock=ManualClock())
    with outboxes.open() as outbox:
        outbox.put(delta(0, 0, 1, 2, 3))
    assert outboxes.num_tokens == 0
    outboxes.check()


async def test_one_take_is_bounded_and_what_is_left_comes_in_order_with_the_next() -> None:
    outboxes = Outboxes(max_tokens=100_000, clock=ManualClock())
    with outboxes.open() as outbox:
        for index in range(MOST_TAKEN + 10):
            outbox.put(delta(0, index, index))
        outbox.put(delta(1, 0, 7))
        first = await outbox.take() or ()
        assert [(d.choice, d.first_index, len(d.token_ids)) for d in first] == [(0, 0, MOST_TAKEN)]
        second = await outbox.take() or ()
        assert [(d.choice, d.first_index, len(d.token_ids)) for d in second] == [(1, 0, 1), (0, MOST_TAKEN, 10)]
        assert outboxes.num_tokens == 0
    outboxes.check()


async def test_log_probabilities_weigh_as_the_tokens_that_they_name() -> None:
    outboxes = Outboxes(max_tokens=100, clock=ManualClock())
    logprobs = TokenLogprobs(5, -0.5, tuple((token_id, -1.0) for token_id in range(20)))
    with outboxes.open() as outbox:
        for index in range(4):
            outbox.put(ChoiceDelta(0, index, (5,), "x", (logprobs,)))
        assert outboxes.num_tokens == 84
        outbox.put(ChoiceDelta(0, 4, (5,), "x", (logprobs,)))
        with pytest.raises(SlowClient):
            await outbox.take()
