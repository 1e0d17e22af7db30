"""The simulated network: who listens where, which links are cut, and how messages arrive or are lost.

Calls of simulated gRPC are conversations, which carry messages; connections.py has the connections that carry bytes.
Messages of one conversation arrive in order. A cut link holds everything back until it is healed, as TCP does. The end
of a process breaks its connections at the other side once that side is reachable; a client detects a silent server by
gRPC's keepalive.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from tests.chaos.simulated.machine.loop import Process, SimulatedLoop, current

_KEEPALIVE_S = (10.0, 15.0)  # as cluster/serving/serving.py: the time until a ping, and the timeout of its answer
_RESET_S = 0.3
_CONNECT_S = 20.0  # gRPC's own timeout for a host that does not answer


class Listener(Protocol):
    """A server, at one address."""

    process: Process


class Link(Protocol):
    """A connection between two processes, which the network may cut, break or end."""

    client: Process
    server: Process

    def flush(self) -> None:
        """Send again what a cut link held back."""

    def break_at(self, end: Process) -> None:
        """Tell this end that the link is broken."""

    def die_with(self, process: Process) -> None:
        """Close the end of a dead process, as its kernel does."""


class Conversation:
    """A call between two processes. Each end receives messages in the order in which the other end sent them."""

    def __init__(self, network: "Network", client: Process, server: Process) -> None:
        self.network, self.client, self.server = network, client, server
        self.held: list[tuple[Process, Callable[..., None], tuple[Any, ...]]] = []  # while the link is cut
        self._arrives_s = {client: 0.0, server: 0.0}
        self.on_broken: dict[Process, Callable[[], None]] = {}  # by end
        self._open_ends = {client.place, server.place}

    def say(self, to: Process, receive: Callable[..., None], *what: Any) -> None:
        """Send a message: `receive` is called at the other end, unless that end dies or the conversation breaks
        first."""
        if self.network.is_cut(self.client.place, self.server.place):
            self.held.append((to, receive, what))
            return
        loop = self.network.loop
        at_s = max(self._arrives_s[to], loop.now_s + self.network.latency_s())
        self._arrives_s[to] = at_s
        loop.call_at(at_s, receive, *what, context=to.context)

    def flush(self) -> None:
        held, self.held = self.held, []
        for to, receive, what in held:
            self.say(to, receive, *what)
        self._forget()

    def break_at(self, end: Process) -> None:
        """Tell this end that the connection is broken: it receives nothing more."""
        receive = self.on_broken.pop(end, None)
        if receive is not None:
            self.say(end, receive)

    def die_with(self, process: Process) -> None:
        self.break_at(self.client if process is self.server else self.server)

    def end(self, end: Process) -> None:
        """Close this end: it sends and receives nothing more."""
        self.on_broken.pop(end, None)
        self._open_ends.discard(end.place)
        self._forget()

    def _forget(self) -> None:
        if not self._open_ends and not self.held:
            self.network.conversations.pop(self, None)


class Network:
    def __init__(self, loop: SimulatedLoop, dice: Random, *, latency_s: float) -> None:
        """`latency_s`: the longest latency of a message; most are much shorter."""
        self.loop, self._dice, self._latency_s = loop, dice, latency_s
        self.listeners: dict[str, Listener] = {}
        self._places: dict[str, str] = {}  # by address: the place that listens there
        self.conversations: dict[Conversation, None] = {}
        self.connections: dict[Link, None] = {}  # that carry bytes
        self._cuts: dict[frozenset[str], int] = {}
        self._num_cuts = 0
        self._next_port = 20_000
        self._changed = asyncio.Event()

    @property
    def links(self) -> tuple[Link, ...]:
        return (*self.conversations, *self.connections)

    def latency_s(self) -> float:
        return 0.00005 + self.loop.soon_s(self._latency_s)

    def listen(self, host: str, port: int, listener: Listener) -> int:
        """Start listening and return the port. `port` 0: choose a free one."""
        if not port:
            self._next_port += 1
            port = self._next_port
        self.listeners[f"{host}:{port}"] = listener
        self._places[f"{host}:{port}"] = listener.process.place
        return port

    def place_of(self, address: str) -> str:
        """Return the place whose process listened at this address last."""
        return self._places.get(address, "")

    def refusal_s(self, address: str) -> float:
        """Return how long a call to an address without a listener takes to fail."""
        return _CONNECT_S if self.is_cut(current().place, self._places.get(address, "")) else self.latency_s()

    def is_cut(self, place: str, other: str) -> bool:
        if not self._cuts:
            return False
        return any(frozenset(ends) in self._cuts for ends in ((place, other), (place,), (other,)))

    async def connect(self, address: str) -> Listener:
        """Wait until a kernel answers at the address, also that of a stopped process, and return who listens there.
        Raises ConnectionRefusedError."""
        await asyncio.sleep(self.latency_s())
        while self.is_cut(current().place, self._places.get(address, "")):
            await self.until_changed()
        if address not in self.listeners:
            raise ConnectionRefusedError(address)
        return self.listeners[address]

    def close(self, listener: Listener) -> None:
        """Stop listening at every address of this listener."""
        for address in [a for a, other in self.listeners.items() if other is listener]:
            del self.listeners[address]

    def open(self, address: str) -> "Conversation | None":
        """Start a conversation with the process that listens at the address. Return None if the connection is
        refused."""
        listener = self.listeners.get(address)
        if listener is None or not listener.process.is_alive:
            return None
        conversation = Conversation(self, current(), listener.process)
        self.conversations[conversation] = None
        if self.is_cut(conversation.client.place, conversation.server.place) or listener.process.is_stopped:
            self._expect_keepalive([conversation])
        return conversation

    def cut(self, ends: frozenset[str]) -> None:
        """Cut the link between two places or, for one place, between it and all others."""
        self._num_cuts += 1
        self._cuts[ends] = self._num_cuts
        self._expect_keepalive([c for c in self.conversations if self.is_cut(c.client.place, c.server.place)])

    def heal(self, ends: frozenset[str]) -> None:
        self._cuts.pop(ends, None)
        for link in self.links:
            if not self.is_cut(link.client.place, link.server.place):
                link.flush()
        self.on_change()

    async def until_changed(self) -> None:
        """Wait until a link is healed, or a process is woken or dies."""
        await self._changed.wait()

    def on_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def reset(self, ends: frozenset[str]) -> None:
        """Break every connection between two places, at both ends."""
        for link in self.links:
            if frozenset((link.client.place, link.server.place)) == ends:
                for end in (link.client, link.server):  # one may learn it long before the other
                    delay_s = self._dice.choice((0.0, self._dice.random() * _RESET_S))
                    self.loop.call_later(delay_s, link.break_at, end, context=end.context)

    def on_stopped(self, process: Process) -> None:
        self._expect_keepalive([c for c in self.conversations if c.server is process])

    def on_dead(self, process: Process) -> None:
        """Close the connections of a dead process, as its kernel does."""
        self.on_change()
        for address in [a for a, listener in self.listeners.items() if listener.process is process]:
            del self.listeners[address]
        for link in self.links:
            if process in (link.client, link.server):
                link.die_with(process)

    def _expect_keepalive(self, conversations: list[Conversation]) -> None:
        """Break the connection at the client if the server is still silent after the client's keepalive timeout."""
        for conversation in conversations:
            delay_s = self._dice.uniform(*_KEEPALIVE_S)
            self.loop.call_later(delay_s, self._keepalive, conversation, delay_s, context=conversation.client.context)

    def _keepalive(self, conversation: Conversation, delay_s: float) -> None:
        if conversation not in self.conversations:
            return
        is_cut = self.is_cut(conversation.client.place, conversation.server.place)
        if is_cut or (conversation.server.is_stopped and conversation.server.is_alive):
            receive = conversation.on_broken.pop(conversation.client, None)
            if receive is not None:
                receive()
            conversation.break_at(conversation.server)
