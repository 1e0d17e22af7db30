"""Random arrivals, with the same seed in every run."""

import random
from collections.abc import Iterator


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times in seconds, `rate` per second, without end."""
    dice, now_s = random.Random(seed), 0.0
    while True:
        now_s += dice.expovariate(rate)
        yield now_s


def one_in(num: int, seed: int) -> Iterator[bool]:
    """Yield true with probability 1 / `num`."""
    dice = random.Random(seed)
    while True:
        yield dice.random() * num < 1
