"""What waits for clients is bounded over all of them, and the slowest pays."""

import pytest

from cluster.errors import SlowClient
from cluster.messages import TokenLogprobs
from router.outbox import MOST_TAKEN, Outboxes
from router.requests import ChoiceDelta


def delta(choice: int, first_index: int, *token_ids: int, text: str = "") -> ChoiceDelta:
    return ChoiceDelta(choice, first_index, token_ids, text)


async def test_what_waited_comes_as_one_delta_per_choice_in_order() -> None:
    outboxes = Outboxes(max_tokens=100)
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
    outboxes = Outboxes(max_tokens=10)
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
        with pytest.raises(SlowClient, match="8 tokens were waiting"):
            await slow.take()
        assert await quick.take() == (delta(0, 0, 1, 2, 3),)
        outboxes.check()
    assert outboxes.num_tokens == 0


async def test_a_client_that_leaves_takes_what_waited_with_it() -> None:
    outboxes = Outboxes(max_tokens=100)
    with outboxes.open() as outbox:
        outbox.put(delta(0, 0, 1, 2, 3))
    assert outboxes.num_tokens == 0
    outboxes.check()


async def test_one_take_is_bounded_and_what_is_left_comes_in_order_with_the_next() -> None:
    outboxes = Outboxes(max_tokens=100_000)
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
    outboxes = Outboxes(max_tokens=100)
    logprobs = TokenLogprobs(5, -0.5, tuple((token_id, -1.0) for token_id in range(20)))
    with outboxes.open() as outbox:
        for index in range(4):
            outbox.put(ChoiceDelta(0, index, (5,), "x", (logprobs,)))
        assert outboxes.num_tokens == 84
        outbox.put(ChoiceDelta(0, 4, (5,), "x", (logprobs,)))
        with pytest.raises(SlowClient):
            await outbox.take()
