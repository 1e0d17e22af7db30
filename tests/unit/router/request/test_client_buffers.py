"""Tests that a router that buffers too many tokens ends the client that has not read for longest, and then the client
with the most tokens."""

import random

from router.request.live_table import STOPPED_S, BufferShare, ClientBuffers


class _Clients:
    def __init__(self, max_tokens: int) -> None:
        self.buffers = ClientBuffers(max_tokens)
        self.shares: dict[str, BufferShare] = {}
        self.ended: list[tuple[str, bool]] = []

    def add(self, name: str) -> BufferShare:
        def end(description: str, has_stopped: bool) -> None:
            self.ended.append((name, has_stopped))
            self.shares[name].clear()

        self.shares[name] = self.buffers.add(end)
        return self.shares[name]


def test_a_stopped_client_with_few_tokens_is_ended_before_a_reading_client_with_many() -> None:
    clients = _Clients(1000)
    stopped, reading = clients.add("stopped"), clients.add("reading")
    stopped.add_readable(10, now_s=0.0)
    reading.add_readable(900, now_s=10.0)
    reading.subtract_read(1, now_s=10.1)
    reading.add_readable(100, now_s=10.2)
    assert clients.ended == [("stopped", True)]
    assert reading.num_tokens == 999


def test_stopped_clients_are_ended_until_the_bound_holds() -> None:
    clients = _Clients(100)
    for number in range(5):
        clients.add(f"stopped{number}").add_readable(10, now_s=float(number))
    clients.add("reading").add_readable(90, now_s=20.0)
    assert clients.ended == [(f"stopped{number}", True) for number in range(4)]
    assert clients.buffers.num_tokens == 100
    clients.buffers.check()


def test_a_client_that_read_recently_does_not_count_as_stopped() -> None:
    clients = _Clients(100)
    slow, stopped = clients.add("slow"), clients.add("stopped")
    slow.add_readable(60, now_s=0.0)
    stopped.add_readable(10, now_s=5.0)
    slow.subtract_read(1, now_s=9.9)  # its other tokens have waited since 0.0
    slow.add_readable(35, now_s=10.0)
    assert clients.ended == [("stopped", True)]


def test_no_reading_client_with_few_tokens_is_ended_before_one_with_many() -> None:
    clients = _Clients(100)
    for number in range(10):
        clients.add(f"small{number}").add_readable(2, now_s=0.0)
    clients.add("large").add_readable(90, now_s=STOPPED_S / 2)
    assert clients.ended == [("large", False)]
    assert clients.buffers.num_tokens == 20


def test_tokens_that_cannot_be_read_yet_do_not_count_as_stopped() -> None:
    clients = _Clients(100)
    clients.add("whole").add_unreadable(50, now_s=0.0)
    clients.add("reading").add_readable(60, now_s=100.0)
    assert clients.ended == [("reading", False)]


def test_the_bound_holds_for_any_order_of_buffered_read_and_dropped_tokens() -> None:
    dice = random.Random(5)
    clients = _Clients(50)
    for number in range(20):
        clients.add(str(number))
    for step in range(5000):
        share = clients.shares[dice.choice(list(clients.shares))]
        match dice.randrange(5):
            case 0:
                share.add_readable(dice.randrange(9), step * 0.05)
            case 1:
                share.add_unreadable(dice.randrange(9), step * 0.05)
            case 2:
                share.subtract_read(dice.randint(0, share.num_tokens), step * 0.05)
            case 3:
                share.clear()
            case 4:
                share.subtract_last_read(dice.randint(0, share.num_tokens))
        clients.buffers.check()
        assert clients.buffers.num_tokens <= 50
    assert {is_stopped for _, is_stopped in clients.ended} == {True, False}
