"""What waits for clients is bounded over all of them, and the slowest pays."""

import pytest

from cluster.errors import SlowClient
from router.outbox import Outboxes
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
