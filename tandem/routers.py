"""The routers that a client knows: those it was given, and those that they name in their answers.

Owns the channels, each opened when it is first used. Where a router stands behind another address than its own (a load
balancer, a tunnel) its own is not dialled, once an answer has shown that both are the same.
"""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, Generic, TypeVar

import grpc

from tandem.silence import ALIVE_KEY, borne_s
from tandem.v1 import inference_pb2_grpc

ROUTERS_KEY = "tandem-routers"  # initial metadata: the router that answers, then the others, with commas
_MAX_CHANNELS = 64  # beyond it those of routers that are long gone are closed
_LOOPBACK = ("127.", "localhost:", "[::1]:")

Channel = TypeVar("Channel", grpc.Channel, grpc.aio.Channel)


def addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """One, several with commas between them, or a list. Raises ValueError where there is none."""
    listed = given.split(",") if isinstance(given, str) else given
    found = tuple(address.strip() for address in listed if address.strip())
    if not found:
        raise ValueError("give a router's address, host:port, or several")
    return found


class Routers(Generic[Channel]):
    """`first` is the address that answered last: the next call starts there. Safe to use from several threads."""

    def __init__(
        self,
        given: Sequence[str],
        dial: Callable[[str], Channel],
        *,
        discover: bool,
        shuffle: Callable[[MutableSequence[Any]], None] = random.shuffle,
    ) -> None:
        """`discover`: those that the given ones name are known too."""
        self.first = given[0]
        self.is_closed = False  # by their client
        self._given = tuple(dict.fromkeys(given))
        self._found: tuple[str, ...] = ()
        self._discover = discover
        self._dial: Callable[[str], Channel] = dial
        self._shuffle = shuffle
        self._borne_s: dict[str, float] = {}  # of those that promised signs of life: how long they may say nothing
        self._reached_as: dict[str, str] = {}  # a router's own address -> the one under which it answered
        self._channels: dict[str, Channel] = {address: dial(address) for address in self._given}
        self._lock = threading.Lock()

    def known(self) -> tuple[str, ...]:
        """The given ones in their order, then the found ones in an order of this client's own: the clients of a dead
        router do not all go to the same one."""
        return (*self._given, *self._found)

    def in_turn(self) -> Iterator[str]:
        """Each once, from the first."""
        known = self.known()
        start = known.index(self.first) if self.first in known else 0
        yield from known[start:] + known[:start]

    def stub(self, address: str) -> inference_pb2_grpc.InferenceStub:
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = self._dial(address)
        return inference_pb2_grpc.InferenceStub(channel)

    def borne_s(self, address: str) -> float | None:
        """How long it may say nothing to one who waits; None: as long as it is connected."""
        return self._borne_s.get(address)

    def promised(self, asked: str, metadata: Iterable[tuple[str, Any]] | None, silence_s: float) -> None:
        """From the initial metadata of an answer of `asked`, which is borne for `silence_s` at least. One that says
        nothing of it may be of a version that gives no signs."""
        told = next((str(value) for key, value in metadata or () if key == ALIVE_KEY), None)
        with self._lock:
            if told is None:
                self._borne_s.pop(asked, None)
            else:
                self._borne_s[asked] = borne_s(silence_s, told)

    def learn(self, asked: str, metadata: Iterable[tuple[str, Any]] | None) -> list[Channel]:
        """From the initial metadata of an answer of `asked`. What it answers is to be closed."""
        told = next((str(value) for key, value in metadata or () if key == ROUTERS_KEY), "")
        if not told or not self._discover:
            return []
        with self._lock:
            itself, *others = told.split(",")
            self._reached_as = {own: known for own, known in self._reached_as.items() if own in others}
            self._reached_as[itself] = asked
            found = [self._reached_as.get(own, own) for own in (itself, *others)]
            found = [one for one in dict.fromkeys(found) if one not in self._given and _is_reachable(one, asked)]
            if set(found) != set(self._found):
                self._shuffle(found)
                self._found = tuple(found)
            return self._long_gone()

    def close(self) -> list[Channel]:
        """What it answers is to be closed."""
        with self._lock:
            self.is_closed = True
            return list(self._channels.values())

    def _long_gone(self) -> list[Channel]:
        """The oldest channels to what nobody names any more; a stream may still be on a younger one."""
        unknown = [address for address in self._channels if address not in self.known()]
        excess = max(0, len(self._channels) - _MAX_CHANNELS)
        for address in unknown[:excess]:
            self._borne_s.pop(address, None)
        return [self._channels.pop(address) for address in unknown[:excess]]


def _is_reachable(found: str, asked: str) -> bool:
    """Another machine's loopback is not ours."""
    return asked.startswith(_LOOPBACK) or not found.startswith(_LOOPBACK)
