"""Clients that connect and send no request, over HTTP and gRPC, plain and TLS: each has a limited time, and all
together a bound. The tests use real sockets only, so the promise holds for any server behind HttpServer.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing, suppress

import pytest
from starlette.types import Receive, Scope, Send

from cluster.observe.telemetry import Telemetry
from cluster.serving import serving
from cluster.serving.serving import _SERVER_OPTIONS
from router.http.connection import HttpLimits
from router.http.server import HttpServer
from tests.certificates import certificates_of_the_run
from tests.input import readable

pytestmark = pytest.mark.uvloop  # the event loop of a router
_DEADLINE_S = 60.0
_BOUND = 5
_GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
_SURFACES = pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def _served(is_tls: bool, limits: HttpLimits, max_connections: int) -> AsyncIterator[tuple[int, Telemetry]]:
    tls, telemetry, stop = certificates_of_the_run().loaded() if is_tls else None, Telemetry(), asyncio.Event()
    server = HttpServer(host="127.0.0.1", port=0, tls=tls, limits=limits)
    serving = asyncio.create_task(
        server.serve(_app, max_connections=max_connections, telemetry=telemetry, stop=stop, grace_s=1.0)
    )
    try:
        async with asyncio.timeout(_DEADLINE_S):
            while not await asyncio.to_thread(_listens, server.port):
                pass
        yield server.port, telemetry
    finally:
        stop.set()
        async with asyncio.timeout(_DEADLINE_S):
            await serving


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S)


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def _shaken(client: socket.socket) -> socket.socket:
    context = ssl.create_default_context(cafile=str(certificates_of_the_run().authority.cert))
    return context.wrap_socket(client, server_hostname="127.0.0.1")


def _is_open(client: socket.socket) -> bool:
    """Read all bytes that the server has sent, and return whether the connection is still open."""
    while readable([client], 0):
        try:
            if not client.recv(1 << 16):
                return False
        except OSError:
            return False
    return True


def _ask(port: int, is_tls: bool) -> bytes:
    """Send a request and return the response; empty: the connection was closed."""
    with closing(_connected(port)) as client:
        try:
            asking = _shaken(client) if is_tls else client
            asking.sendall(_GET)
            return asking.recv(15)
        except OSError:
            return b""


async def _num_open(clients: list[socket.socket]) -> int:
    """Wait until the number of open connections is within the bound, and return it."""
    async with asyncio.timeout(_DEADLINE_S):
        while (num_open := sum(map(_is_open, clients))) > _BOUND:  # noqa: ASYNC110 -- sockets of this process
            await asyncio.sleep(0.01)
    return num_open


@_SURFACES
@pytest.mark.parametrize("says", ["nothing", "a part"])
async def test_silent_connections_are_bounded_while_other_clients_are_served(is_tls: bool, says: str) -> None:
    said = b"" if says == "nothing" else _client_hello()[:50] if is_tls else _GET[:10]
    async with _served(is_tls, HttpLimits(_DEADLINE_S, _DEADLINE_S, _DEADLINE_S), _BOUND) as (port, telemetry):
        with ExitStack() as open_clients:
            silent = []
            for _ in range(10 * _BOUND):
                client = open_clients.enter_context(closing(await asyncio.to_thread(_connected, port)))
                with suppress(OSError):  # it was refused already
                    client.sendall(said)
                silent.append(client)
            assert 0 < await _num_open(silent) <= _BOUND
            async with asyncio.timeout(_DEADLINE_S):
                while not (answer := await asyncio.to_thread(_ask, port, is_tls)):
                    pass
            assert answer == b"HTTP/1.1 200 OK"
            assert any(map(_is_open, silent)), "the others are still there: no timeout has ended them"
        refused = telemetry.value("tandem_http_connections_refused_total")
        assert refused + telemetry.value("tandem_http_connections_closed_total", reason="replaced") >= 9 * _BOUND


@_SURFACES
async def test_every_wait_for_a_clients_bytes_times_out(is_tls: bool) -> None:
    hello = _client_hello()
    silences: dict[str, Callable[[socket.socket], socket.socket]] = {"says nothing": lambda client: client}
    said = {"half a request line": _GET[:10], "a head without an end": _GET[:-2]}
    if is_tls:
        silences |= {"half a handshake": lambda client: _sent(client, hello[:50])}
        silences |= {"a handshake, unfinished": lambda client: _sent(client, hello)}
        silences |= {"a handshake, then nothing": _shaken}
    for name, part in said.items():
        silences[name] = lambda client, part=part: _sent(_shaken(client) if is_tls else client, part)  # type: ignore[misc]
    limits = HttpLimits(handshake_s=0.5, head_s=0.5, request_s=0.5)
    async with _served(is_tls, limits, 100) as (port, _):
        ended = await asyncio.gather(
            *(asyncio.to_thread(_end_of, port, silence) for silence in silences.values()),
            asyncio.to_thread(_end_of_dripping, port, hello if is_tls else _GET),
        )
        assert ended == [True] * (len(silences) + 1)


def _sent(client: socket.socket, data: bytes) -> socket.socket:
    client.sendall(data)
    return client


def _end_of(port: int, silence: Callable[[socket.socket], socket.socket]) -> bool:
    """Wait for the end of the connection."""
    with closing(_connected(port)) as client:
        with suppress(ConnectionError, ssl.SSLError):  # a busy machine may end a handshake that is not over in time
            with closing(silence(client)) as silent:
                while silent.recv(1 << 16):
                    pass
    return True


def _end_of_dripping(port: int, data: bytes) -> bool:
    """Send single bytes, far more slowly than the limit allows in all, until the connection ends."""
    with closing(_connected(port)) as client:
        client.settimeout(0.1)
        for byte in data + bytes(1000):
            try:
                client.sendall(bytes([byte]))
                if not client.recv(1 << 16):
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
    return False


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("handshake_ms", [300, 60_000])
async def test_silent_grpc_connections_are_bounded_and_closed(
    is_tls: bool, handshake_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "grpc.server_handshake_timeout_ms" in dict(_SERVER_OPTIONS)
    options = dict(_SERVER_OPTIONS) | {"grpc.server_handshake_timeout_ms": handshake_ms}
    monkeypatch.setattr(serving, "_SERVER_OPTIONS", tuple(options.items()))
    credentials = certificates_of_the_run().loaded().public_credentials() if is_tls else None
    server = serving.GrpcServer(
        service_names=["tandem.v1.Inference"], telemetry=Telemetry(), credentials=credentials, max_calls=_BOUND
    )
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        with ExitStack() as open_clients:
            silent = []
            for number in range(6 * _BOUND):
                client = open_clients.enter_context(closing(await asyncio.to_thread(_connected, port)))
                with suppress(OSError):
                    client.sendall(_client_hello()[:50] if is_tls and number % 2 else b"")
                silent.append(client)
            num_open = await _num_open(silent)
            if handshake_ms < 1000:
                await asyncio.gather(*(asyncio.to_thread(_until_ended, client) for client in silent))
            else:
                assert 0 < num_open <= _BOUND
    finally:
        await server.stop(0)


def _until_ended(client: socket.socket) -> None:
    with suppress(ConnectionError):
        while client.recv(1 << 16):
            pass
