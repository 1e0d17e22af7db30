"""The routers that a client knows, in the order in which it asks them."""

from collections.abc import Iterator, Sequence

import grpc

from tandem.v1 import inference_pb2_grpc


def addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """One, several with commas between them, or a list. Raises ValueError where there is none."""
    listed = given.split(",") if isinstance(given, str) else given
    found = tuple(address.strip() for address in listed if address.strip())
    if not found:
        raise ValueError("give a router's address, host:port, or several")
    return found


class Routers:
    """One stub per address. `first` is the one that answered last: the next call starts there."""

    def __init__(self, channels: Sequence[grpc.Channel | grpc.aio.Channel]) -> None:
        self.stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        self.first = 0
        self.is_closed = False  # by their client

    def in_turn(self) -> Iterator[int]:
        """Each once."""
        first = self.first
        yield from (number % len(self.stubs) for number in range(first, first + len(self.stubs)))
