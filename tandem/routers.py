"""The routers that a client knows: the given addresses, and the addresses that routers name in their responses.

This module owns the channels and opens each at its first use. If a router is reached at another address than its own (a
load balancer, a tunnel), its own address is not dialled after a response has shown that both are the same router.
"""

import random
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, Generic, TypeVar

import grpc

from tandem.errors import Cancelled
from tandem.keepalive import KEEPALIVE_KEY, keepalive_timeout_s
from tandem.v1 import inference_pb2_grpc

ROUTERS_KEY = "tandem-routers"  # initial metadata: addresses separated by commas; the first is the router that responds
_MAX_CHANNELS = 64  # above it, channels to routers that no response names are closed
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")  # of gRPC's names
_NAME = re.compile(r"[^\s/:@\[\]]+")  # of a host, or its IPv4 address
_MAX_DIGITS = 5  # of a port
_LOOPBACK = ("127.", "localhost:", "[::1]:")

Channel = TypeVar("Channel", grpc.Channel, grpc.aio.Channel)


def addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a text, separated by commas, or of a list. Raises ValueError if there is none, or for one
    that is neither host:port nor a name of another of gRPC's schemes, such as dns:///host:port."""
    listed = given.split(",") if isinstance(given, str) else given
    found = tuple(address.strip() for address in listed if address.strip())
    if not found:
        raise ValueError("give the address of at least one router: host:port")
    for address in found:
        if not (address.startswith(_SCHEMES) or is_host_and_port(address)):
            raise ValueError(f"an address must be host:port, such as 127.0.0.1:50051 or [::1]:50051, not {address!r}")
    return found


def is_host_and_port(address: str) -> bool:
    """Return whether this is the address of one TCP port. gRPC would take the port modulo 65536, or 443 without one."""
    host, _, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= _MAX_DIGITS and 0 < int(port) < 1 << 16
    return is_number and (_NAME.fullmatch(host) is not None or (host[:1], host[-1:]) == ("[", "]"))


def is_reachable(found: str, asked: str) -> bool:
    """Return whether an address that a router names can be dialled: a loopback address of another machine cannot."""
    return asked.startswith(_LOOPBACK) or not found.startswith(_LOOPBACK)


class Routers(Generic[Channel]):
    """The routers of one client. `first` is the address that responded last, where the next call starts.

    Several threads may use it."""

    def __init__(
        self,
        given: Sequence[str],
        dial: Callable[[str], Channel],
        *,
        discover: bool,
        shuffle: Callable[[MutableSequence[Any]], None] = random.shuffle,
    ) -> None:
        """`discover`: use the routers that the given ones name too."""
        self.first = given[0]
        self.is_reached = False  # a router has responded
        self.is_closed = False  # the client was closed
        self._given = tuple(dict.fromkeys(given))
        self._found: tuple[str, ...] = ()
        self._discover = discover
        self._dial: Callable[[str], Channel] = dial
        self._shuffle = shuffle
        self._keepalive_timeouts_s: dict[str, float] = {}  # of the routers that send keep-alive messages
        self._reached_as: dict[str, str] = {}  # a router's own address -> the address at which it responded
        self._channels: dict[str, Channel] = {}
        self._lock = threading.Lock()

    def known(self) -> tuple[str, ...]:
        """Return the given routers in their order, then the found ones in a random order, so that the clients of a lost
        router do not all connect to the same one."""
        return (*self._given, *self._found)

    def in_turn(self) -> Iterator[str]:
        """Return each known address once, starting with `first`."""
        known = self.known()
        start = known.index(self.first) if self.first in known else 0
        yield from known[start:] + known[:start]

    def on_response(self, address: str) -> None:
        """Record that the router at `address` responded; the next call starts there."""
        self.first, self.is_reached = address, True

    def stub(self, address: str) -> inference_pb2_grpc.InferenceStub:
        """Return the stub of the router at `address`. Raises Cancelled after `close`."""
        with self._lock:
            if self.is_closed:
                raise Cancelled("this client was closed", reason="cancelled")
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = self._dial(address)
        return inference_pb2_grpc.InferenceStub(channel)

    def keepalive_timeout_s(self, address: str) -> float | None:
        """Return the keep-alive timeout of a router, None if it sends no keep-alive messages."""
        return self._keepalive_timeouts_s.get(address)

    def on_metadata(self, address: str, metadata: Collection[tuple[str, Any]] | None, timeout_s: float) -> None:
        """Store whether the router at `address` sends keep-alive messages, from the initial metadata of its response.
        `timeout_s` is the least keep-alive timeout."""
        interval = next((str(value) for key, value in metadata or () if key == KEEPALIVE_KEY), None)
        with self._lock:
            self.is_reached = self.is_reached or bool(metadata)
            if interval is None:
                self._keepalive_timeouts_s.pop(address, None)
            else:
                self._keepalive_timeouts_s[address] = keepalive_timeout_s(timeout_s, interval)

    def learn(self, asked: str, metadata: Iterable[tuple[str, Any]] | None) -> list[Channel]:
        """Store the routers that the initial metadata of a response from the router at `asked` names. Returns channels
        that the caller must close."""
        names = next((str(value) for key, value in metadata or () if key == ROUTERS_KEY), "")
        if not names or not self._discover:
            return []
        with self._lock:
            itself, *others = names.split(",")
            self._reached_as = {own: known for own, known in self._reached_as.items() if own in others}
            self._reached_as[itself] = asked
            found = [self._reached_as.get(own, own) for own in (itself, *others)]
            found = [one for one in dict.fromkeys(found) if one not in self._given and is_reachable(one, asked)]
            if set(found) != set(self._found):
                self._shuffle(found)
                self._found = tuple(found)
            return self._pop_unnamed()

    def close(self) -> list[Channel]:
        """Open no further channels. Returns the open ones, which the caller must close."""
        with self._lock:
            self.is_closed = True
            channels, self._channels = list(self._channels.values()), {}
            return channels

    def _pop_unnamed(self) -> list[Channel]:
        """Remove and return the oldest channels to routers that no response names. A newer one may have a stream."""
        unknown = [address for address in self._channels if address not in self.known()]
        excess = max(0, len(self._channels) - _MAX_CHANNELS)
        for address in unknown[:excess]:
            self._keepalive_timeouts_s.pop(address, None)
        return [self._channels.pop(address) for address in unknown[:excess]]
