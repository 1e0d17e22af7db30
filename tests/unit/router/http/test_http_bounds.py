"""HTTP clients that do not read, do not send their request, or open too many connections: each uses a bounded time and
place.

The tests run the router's own HTTP server and edge over an application that streams without end.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing

import pytest
from starlette.types import Receive, Scope, Send

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Gate
from cluster.accounts.usage import TenantLimits
from cluster.errors import Overloaded
from cluster.observe.telemetry import Telemetry
from router.http.connection import HttpLimits
from router.http.edge import Edge, while_connected
from router.http.server import HttpServer
from tests.input import readable

pytestmark = pytest.mark.uvloop  # the event loop of a router
_MAX_BYTES = 10_000
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
_GET = b"GET /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


class _Endless:
    """An application that answers with an endless stream."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        self.num_inside += 1
        try:
            await while_connected(scope, receive, self._stream(send))
        finally:
            self.num_inside -= 1
            self.left.set()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
            await asyncio.sleep(0)


@asynccontextmanager
async def _served(
    *, client_stall_s: float = 60.0, max_connections: int = 100, limits: HttpLimits | None = None
) -> AsyncIterator[tuple[_Endless, Telemetry, Callable[[], socket.socket]]]:
    """Serve the app. Yield its figures, and a function that connects a client with a tiny buffer."""
    server, stop, endless, telemetry = (
        HttpServer(host="127.0.0.1", port=0, limits=limits),
        asyncio.Event(),
        _Endless(),
        Telemetry(),
    )
    app = Edge(
        endless,
        gate=Gate(),
        audit=Audit(),
        limits=TenantLimits(),
        max_message_bytes=_MAX_BYTES,
        client_stall_s=client_stall_s,
        telemetry=telemetry,
    )

    def connect() -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(("127.0.0.1", server.port))
        return client

    serving = asyncio.create_task(
        server.serve(app, max_connections=max_connections, telemetry=telemetry, stop=stop, grace_s=1.0)
    )
    server._socket.listen()  # so that clients need not wait for it
    try:
        yield endless, telemetry, connect
    finally:
        stop.set()
        async with asyncio.timeout(20):
            await serving


async def test_a_client_that_does_not_read_times_out_and_its_connection_is_closed() -> None:
    async with _served(client_stall_s=0.3) as (endless, telemetry, connect):
        with closing(connect()) as client:
            client.sendall(_GET)
            async with asyncio.timeout(20):
                await endless.left.wait()
            assert telemetry.value("tandem_stalled_clients_total", surface="http") == 1
            await asyncio.to_thread(_read_to_its_end, client)
        assert endless.num_inside == 0


def _read_to_its_end(client: socket.socket) -> None:
    """Read the remaining bytes, then the end of the connection."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass


async def test_an_incomplete_request_times_out_and_its_connection_is_closed() -> None:
    async with _served(limits=HttpLimits(head_s=1.0, request_s=1.0)) as (endless, _, connect):
        with closing(connect()) as silent, closing(connect()) as slow:
            slow.sendall(_HEAD + b"content-length: 500\r\n\r\nabc")
            for client in (silent, slow):
                await asyncio.to_thread(_read_to_its_end, client)
            async with asyncio.timeout(20):
                await endless.left.wait()
        assert endless.num_inside == 0


async def test_connections_above_the_bound_are_closed_and_counted_and_the_others_continue() -> None:
    async with _served(max_connections=2) as (_, telemetry, connect):
        with closing(connect()) as first, closing(connect()) as second:
            for client in (first, second):
                client.sendall(_GET)
                assert await asyncio.to_thread(client.recv, 15) == b"HTTP/1.1 200 OK"
            with closing(connect()) as third:
                await asyncio.to_thread(_read_to_its_end, third)
            assert telemetry.value("tandem_http_connections_refused_total") == 1
            assert await asyncio.to_thread(first.recv, 10)


async def test_request_bodies_in_progress_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.edge._MAX_BODIES", 1)
    async with _served() as (_, _, connect):
        with closing(connect()) as first, closing(connect()) as second:
            first.sendall(_HEAD + b"content-length: 9000\r\n\r\n" + bytes(8000))
            second.sendall(_HEAD + b"content-length: 9000\r\n\r\n" + bytes(8000))
            (refused,) = await asyncio.to_thread(readable, [first, second], 20)
            answer = await asyncio.to_thread(refused.recv, 4096)
            assert answer.startswith(b"HTTP/1.1 429") and b"retry-after: 1\r\n" in answer
            assert Overloaded.reason.encode() in answer
            other = first if refused is second else second
            other.sendall(bytes(1000))
            assert b"200 OK" in await asyncio.to_thread(other.recv, 100)


async def test_a_body_with_too_many_brackets_is_refused_before_parsing() -> None:
    async with _served() as (_, _, connect):
        with closing(connect()) as client:
            client.sendall(_HEAD + b"content-length: 9000\r\n\r\n" + b"[" * 9000)
            assert b"200 OK" in await asyncio.to_thread(client.recv, 100)  # few enough
        with pytest.MonkeyPatch.context() as patched, closing(connect()) as client:
            patched.setattr("router.http.edge._MAX_STRUCTURE", 8000)
            client.sendall(_HEAD + b"content-length: 9000\r\n\r\n" + b"[" * 9000)
            assert (await asyncio.to_thread(client.recv, 100)).startswith(b"HTTP/1.1 400")
