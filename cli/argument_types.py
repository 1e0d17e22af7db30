"""Types of arguments for argparse: numbers that messages and timeouts can hold."""

import argparse
import math
from collections.abc import Callable

_LONGEST_S = 1e9  # an infinite timeout: neither gRPC nor sockets have one


def seconds(text: str) -> float:
    """Return a positive number of seconds. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return min(number, _LONGEST_S)


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return the type of the whole numbers from `least` to `most`. It raises ArgumentTypeError for others."""

    def number(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text!r}")
        return found

    return number
