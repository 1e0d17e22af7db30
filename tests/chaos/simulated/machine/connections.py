"""Simulated TCP connections: listening sockets, and transports that carry bytes between two processes.

Replaces sockets below asyncio's protocols, so the frames of members' calls are production code at both ends. A kernel
goes on while its process is stopped: it accepts, keeps what arrives until the window is full, and closes the
connections of a process that dies.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from tests.chaos.simulated.machine.byte_pipe import BytePipe
from tests.chaos.simulated.machine.loop import Process, current
from tests.chaos.simulated.machine.network import Network
from tests.chaos.simulated.schedules.mix import Wires

_LOW_SHARE = 4  # of the bound above which writing pauses; below it, writing resumes


class Listening:
    """A listening socket, and the server that asyncio returns for it."""

    def __init__(self, connections: "Connections", host: str) -> None:
        self.process = current()
        self._connections, self._host = connections, host
        self._port = connections.network.listen(host, 0, self)
        self.factory: Callable[[], asyncio.BaseProtocol] | None = None  # None: no one accepts yet

    def getsockname(self) -> tuple[str, int]:
        return self._host, self._port

    def setsockopt(self, *_: object) -> None:
        """Do nothing: a simulated connection delays no bytes on purpose."""

    def close(self) -> None:
        self._connections.network.close(self)


class Connections:
    """Opens the connections of one world."""

    def __init__(self, network: Network, dice: Random, wires: Wires) -> None:
        self.network, self._dice, self.wires = network, dice, wires
        network.loop.connect = self.open

    @property
    def ends(self) -> "list[End]":
        """Return both ends of each connection that is not closed at both."""
        return [end for link in self.network.connections if isinstance(link, Connection) for end in link.ends]

    def listen(self, address: tuple[str, int], **_: object) -> Listening:
        return Listening(self, address[0])

    async def open(self, factory: Callable[[], Any], address: str) -> tuple[asyncio.Transport, Any]:
        """Connect, as asyncio's `create_connection` does. Raises ConnectionRefusedError."""
        listener = await self.network.connect(address)
        protocol = factory()
        if not isinstance(listener, Listening):
            transport: asyncio.Transport = _Probe(protocol)
        elif self._dice.random() < self.wires.blocked_share:
            await asyncio.get_running_loop().create_future()  # a firewall drops the first packet
        else:
            connection = Connection(self, current(), listener)
            transport = connection.client_end
            transport.set_protocol(protocol)
        protocol.connection_made(transport)
        return transport, protocol

    def pipe(self) -> BytePipe:
        return BytePipe(window_bytes=self.wires.window_bytes, cut=self._cut, latency_s=self.network.latency_s)

    def _cut(self, number: int) -> int:
        if number > 1 and self._dice.random() < self.wires.cut_share:
            return self._dice.randint(1, number)
        return number

    def is_reset_by_death(self) -> bool:
        """Return whether a dying process leaves unread bytes, for which its kernel resets the connection."""
        return self._dice.random() < 0.5


class Connection:
    """A connection between two processes."""

    def __init__(self, connections: Connections, client: Process, listener: Listening) -> None:
        self.network, self.client, self.server = connections.network, client, listener.process
        self._connections = connections
        to_server, to_client = connections.pipe(), connections.pipe()
        high = connections.wires.high_water_bytes
        self.client_end = End(self, client, to_client, to_server, high)
        self.server_end = End(self, self.server, to_server, to_client, high)
        self.client_end.peer, self.server_end.peer = self.server_end, self.client_end
        self.is_silent = False  # half open for good: nothing arrives, and no end is told
        self._broken_while_cut: list[End] = []
        self.network.connections[self] = None
        loop = self.network.loop
        loop.call_soon(self._accept, listener, context=self.server.context)

    @property
    def is_cut(self) -> bool:
        return self.is_silent or self.network.is_cut(self.client.place, self.server.place)

    @property
    def ends(self) -> "tuple[End, End]":
        return self.client_end, self.server_end

    def end_of(self, process: Process) -> "End":
        return self.client_end if process is self.client else self.server_end

    def flush(self) -> None:
        """Send again what a cut link held back."""
        if self.is_cut:
            return
        for end in self.ends:
            end.resend()
        broken, self._broken_while_cut = self._broken_while_cut, []
        for end in broken:
            self._reset(end)

    def break_at(self, process: Process) -> None:
        """Tell the end of this process that the connection is broken."""
        self.reset(self.end_of(process))

    def reset(self, end: "End") -> None:
        if self.is_cut:
            self._broken_while_cut.append(end)
        else:
            self._reset(end)

    def die_with(self, process: Process) -> None:
        """Close the end of a dead process, as its kernel does."""
        end = self.end_of(process)
        if not end.is_over:
            end.is_over = True
            if self._connections.is_reset_by_death():
                self.reset(end.peer)
            else:
                end.finish()
        self.forget()

    def forget(self) -> None:
        if self.client_end.is_over and self.server_end.is_over:
            self.network.connections.pop(self, None)

    def _reset(self, end: "End") -> None:
        loop = self.network.loop
        loop.call_later(self.network.latency_s(), end.on_reset, context=end.process.context)

    def _accept(self, listener: Listening) -> None:
        if listener.factory is None:  # closed before it accepted
            self.server_end.is_over = True
            self.reset(self.client_end)
            return
        protocol = listener.factory()
        self.server_end.set_protocol(protocol)
        protocol.connection_made(self.server_end)


class End(asyncio.Transport):
    """One end of a connection, as its process uses it. Everything but `finish` and `resend`, which the kernel does,
    runs in that process."""

    peer: "End"

    def __init__(
        self, connection: Connection, process: Process, incoming: BytePipe, outgoing: BytePipe, high_bytes: int
    ) -> None:
        super().__init__()
        self.connection, self.process = connection, process
        self.incoming, self.outgoing = incoming, outgoing
        self._high_bytes = high_bytes
        self._loop = connection.network.loop
        self._protocol: Any = None
        self._is_closing = False
        self._is_paused = False
        self.is_deaf = False  # its process reads nothing
        self.is_over = False  # closed, and its process was told

    @property
    def is_silent(self) -> bool:
        """Return whether nothing arrives here any more, and this process does not know it yet."""
        return self.connection.is_silent and not self.is_over

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.peer.process.place, 0) if name == "peername" else default

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return self.outgoing.num_unsent

    def write(self, data: Any) -> None:
        if self._is_closing:
            return
        self.outgoing.write(data)
        self._send()
        if not self._is_paused and self.outgoing.num_unsent > self._high_bytes:
            self._is_paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """Close the connection once everything is sent. The kernel of a process that has ended refuses what it gets."""
        if not self._is_closing:
            self._is_closing = True
            if not self.outgoing.num_unsent:
                self._end(None)
            elif self.peer.is_over:
                self.connection.reset(self)

    def abort(self) -> None:
        self._abort(None)

    def on_reset(self) -> None:
        """Receive the other kernel's news that there is no connection."""
        self._abort(ConnectionResetError())

    def listen_again(self) -> None:
        self.is_deaf = False
        self.receive()

    def receive(self) -> None:
        """Read what has arrived, or a part of it."""
        if self.is_deaf or self.is_over or self._protocol is None:
            return
        now_s = self._loop.now_s
        data = self.incoming.read(now_s)
        if self._is_closing:
            return
        if data:
            self._protocol.data_received(data)
            self.peer.open_window()
        if self.incoming.is_dead:
            for end in (self, self.peer):
                self.connection.reset(end)
        elif self.incoming.has_ended and not self._is_closing:
            self._protocol.eof_received()
            self.close()
        elif self.incoming.is_readable(now_s):
            self._loop.call_soon(self.receive, context=self.process.context)

    def open_window(self) -> None:
        """Let this end send more, in its process, because the other end has read."""
        if self.outgoing.num_unsent and not self.is_over:
            self._loop.call_soon(self._on_writable, context=self.process.context)

    def finish(self) -> None:
        self._arrive_at(self.outgoing.finish(self._loop.now_s, is_cut=self.connection.is_cut))

    def resend(self) -> None:
        self._arrive_at(self.outgoing.heal(self._loop.now_s))

    def _on_writable(self) -> None:
        if self.is_over:
            return
        self._send()
        if self._is_paused and self.outgoing.num_unsent <= self._high_bytes // _LOW_SHARE:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_closing and not self.outgoing.num_unsent:
            self._end(None)

    def _send(self) -> None:
        self._arrive_at(self.outgoing.send(self._loop.now_s, is_cut=self.connection.is_cut))

    def _arrive_at(self, times_s: list[float]) -> None:
        peer = self.peer
        for at_s in times_s:
            self._loop.call_at(at_s, peer.receive, context=peer.process.context)

    def _abort(self, error: Exception | None) -> None:
        if self.is_over or (self._is_closing and not self.outgoing.num_unsent):
            return
        self._is_closing = True
        self.outgoing.discard_unsent()
        if error is None:
            self.connection.reset(self.peer)
        self._lose_soon(error)

    def _end(self, error: Exception | None) -> None:
        self.finish()
        self._lose_soon(error)

    def _lose_soon(self, error: Exception | None) -> None:
        self._loop.call_soon(self._lose, error, context=self.process.context)

    def _lose(self, error: Exception | None) -> None:
        if not self.is_over:
            self.is_over = True
            if self._protocol is not None:
                self._protocol.connection_lost(error)
            self.connection.forget()


class _Probe(asyncio.Transport):
    """The transport of a connection that carries no data, of a caller that checks whether a process listens."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._protocol = protocol

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return False
