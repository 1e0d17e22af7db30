"""When a router keeps too many tokens, the client stopped for longest is ended first, then the one with the most."""

import random

from router.request.buffers import STOPPED_S, Buffers, Share


class _Clients:
    def __init__(self, max_tokens: int) -> None:
        self.buffers = Buffers(max_tokens)
        self.shares: dict[str, Share] = {}
        self.ended: list[tuple[str, bool]] = []

    def add(self, name: str) -> Share:
        def end(told: str, is_stopped: bool) -> None:
            self.ended.append((name, is_stopped))
            self.shares[name].clear()

        self.shares[name] = self.buffers.add(end)
        return self.shares[name]


def test_a_stopped_client_with_little_is_ended_before_a_reading_client_with_much() -> None:
    clients = _Clients(1000)
    stopped, reading = clients.add("stopped"), clients.add("reading")
    stopped.offer(10, now_s=0.0)
    reading.offer(900, now_s=10.0)
    reading.take(1, now_s=10.1)
    reading.offer(100, now_s=10.2)
    assert clients.ended == [("stopped", True)]
    assert reading.num_tokens == 999


def test_as_many_stopped_clients_are_ended_as_it_takes() -> None:
    clients = _Clients(100)
    for number in range(5):
        clients.add(f"stopped{number}").offer(10, now_s=float(number))
    clients.add("reading").offer(90, now_s=20.0)
    assert clients.ended == [(f"stopped{number}", True) for number in range(4)]
    assert clients.buffers.num_tokens == 100
    clients.buffers.check()


def test_a_client_that_took_something_lately_is_not_the_stopped_one() -> None:
    clients = _Clients(100)
    slow, stopped = clients.add("slow"), clients.add("stopped")
    slow.offer(60, now_s=0.0)
    stopped.offer(10, now_s=5.0)
    slow.take(1, now_s=9.9)  # its other tokens have waited since 0.0
    slow.offer(35, now_s=10.0)
    assert clients.ended == [("stopped", True)]


def test_no_reading_client_with_little_is_ended_for_one_with_much() -> None:
    clients = _Clients(100)
    for number in range(10):
        clients.add(f"small{number}").offer(2, now_s=0.0)
    clients.add("large").offer(90, now_s=STOPPED_S / 2)
    assert clients.ended == [("large", False)]
    assert clients.buffers.num_tokens == 20


def test_what_cannot_be_taken_yet_does_not_make_a_client_stopped() -> None:
    clients = _Clients(100)
    clients.add("whole").keep(50, now_s=0.0)
    clients.add("reading").offer(60, now_s=100.0)
    assert clients.ended == [("reading", False)]


def test_the_bound_holds_whatever_is_offered_taken_and_left() -> None:
    dice = random.Random(5)
    clients = _Clients(50)
    for number in range(20):
        clients.add(str(number))
    for step in range(5000):
        share = clients.shares[dice.choice(list(clients.shares))]
        match dice.randrange(4):
            case 0:
                share.offer(dice.randrange(9), step * 0.05)
            case 1:
                share.keep(dice.randrange(9), step * 0.05)
            case 2:
                share.take(dice.randint(0, share.num_tokens), step * 0.05)
            case 3:
                share.clear()
        clients.buffers.check()
        assert clients.buffers.num_tokens <= 50
    assert {is_stopped for _, is_stopped in clients.ended} == {True, False}
