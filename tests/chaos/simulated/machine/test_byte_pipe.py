"""A simulated TCP connection's direction keeps TCP's promises whatever is drawn, and breaks where it is told to."""

from collections.abc import Callable
from random import Random

import pytest

from tests.chaos.simulated.machine.byte_pipe import BytePipe


def _pipe(*, window_bytes: int = 1 << 20, cut: Callable[[int], int] = int, latency_s: float = 1.0) -> BytePipe:
    return BytePipe(window_bytes=window_bytes, cut=cut, latency_s=lambda: latency_s)


@pytest.mark.parametrize("seed", range(50))
def test_bytes_arrive_once_and_in_order_however_they_are_cut_and_held(seed: int) -> None:
    dice = Random(seed)
    pipe = BytePipe(
        window_bytes=dice.choice((1, 7, 1000)), cut=lambda number: dice.randint(1, number), latency_s=dice.random
    )
    written, received, now_s, is_cut = dice.randbytes(500), b"", 0.0, False
    rest = written
    while len(received) < len(written):
        size = dice.randint(0, 40)
        pipe.write(rest[:size])
        rest = rest[size:]
        pipe.send(now_s, is_cut=is_cut)
        if dice.random() < 0.2:
            is_cut = not is_cut
            if not is_cut:
                pipe.heal(now_s)
        now_s += dice.random()
        received += pipe.read(now_s)
        assert written.startswith(received)
    assert not pipe.has_ended
    pipe.heal(now_s)
    pipe.finish(now_s)
    assert pipe.read(now_s + 10.0) == b"" and pipe.has_ended


def test_nothing_arrives_before_its_time_or_before_what_was_sent_earlier() -> None:
    latencies_s = iter((2.0, 0.5))
    pipe = BytePipe(window_bytes=100, cut=int, latency_s=lambda: next(latencies_s))
    pipe.write(b"slow")
    assert pipe.send(0.0) == [2.0]
    pipe.write(b"fast")
    assert pipe.send(0.0) == [2.0]
    assert pipe.read(1.9) == b"" and not pipe.is_readable(1.9)
    assert pipe.read(2.0) == b"slowfast"


def test_a_reader_that_does_not_read_stops_the_sender() -> None:
    pipe = _pipe(window_bytes=4)
    pipe.write(b"abcdef")
    assert pipe.send(0.0) == [1.0]
    assert pipe.num_unsent == 2
    assert pipe.send(5.0) == []
    assert pipe.read(5.0) == b"abcd"
    assert pipe.send(5.0) == [6.0]
    assert pipe.num_unsent == 0


def test_a_cut_link_holds_back_what_is_sent_and_what_had_left_arrives() -> None:
    pipe = _pipe()
    pipe.write(b"before ")
    pipe.send(0.0)
    pipe.write(b"during")
    assert pipe.send(0.5, is_cut=True) == []
    assert pipe.num_unsent == 0
    assert pipe.finish(0.6) == []  # behind what is held
    assert pipe.read(9.0) == b"before " and not pipe.has_ended
    assert pipe.heal(9.0) == [10.0, 10.0]
    assert pipe.read(10.0) == b"during" and pipe.has_ended


def test_a_connection_dies_between_any_two_bytes() -> None:
    for number in range(6):
        pipe = _pipe(cut=lambda number: min(number, 2))
        pipe.write(b"abcdef")
        pipe.send(0.0)
        pipe.die_after(number)
        received = b"".join(pipe.read(1.0) for _ in range(6))
        assert (received, pipe.is_dead) == (b"abcdef"[:number], True)


def test_the_end_follows_sent_messages_and_drops_unsent_ones() -> None:
    pipe = _pipe(window_bytes=3)
    pipe.write(b"abcdef")
    pipe.send(0.0)
    assert pipe.finish(0.0) == [1.0]
    assert pipe.finish(0.0) == []
    assert pipe.num_unsent == 0
    assert pipe.read(1.0) == b"abc" and pipe.has_ended
