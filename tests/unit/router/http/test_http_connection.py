"""The HTTP connection over real sockets: its memory per request is bounded, and every request on it is answered."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.observe.telemetry import Telemetry
from router.http.connection import HttpLimits, take_streamed_body
from router.http.server import HttpServer

pytestmark = pytest.mark.uvloop  # the event loop of a router
_HEAD = b"POST /a HTTP/1.1\r\nhost: x\r\n"
_OK = b"HTTP/1.1 200 OK\r\n"
_DEADLINE_S = 60.0
_PATIENT = HttpLimits(head_s=600.0, request_s=600.0)  # not the timeouts end these connections
_ENDLESS_BYTES = 4 << 20  # many reads of the server


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the path and the body, as a stream."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    direct = take_streamed_body(scope)
    assert direct is not None
    direct.write(scope["path"].encode())
    direct.write(b"=" + body)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def _connected(
    limits: HttpLimits | None = None, app: ASGIApp = _app
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server, stop = HttpServer(host="127.0.0.1", port=0, limits=limits), asyncio.Event()
    serving = asyncio.create_task(server.serve(app, max_connections=10, telemetry=Telemetry(), stop=stop, grace_s=1.0))
    server._socket.listen()  # so that the client need not wait for it
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            yield reader, writer
    finally:
        writer.close()
        stop.set()
        async with asyncio.timeout(_DEADLINE_S):
            await serving


@asynccontextmanager
async def _sharing(port: int, name: bytes) -> AsyncIterator[HttpServer]:
    """Run a server on a shared port that answers with its name."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": name})

    server, stop = HttpServer(host="127.0.0.1", port=port, shares_port=True), asyncio.Event()
    serving = asyncio.create_task(server.serve(app, max_connections=100, telemetry=Telemetry(), stop=stop, grace_s=1.0))
    server._socket.listen(100)
    try:
        yield server
    finally:
        stop.set()
        async with asyncio.timeout(_DEADLINE_S):
            await serving


async def _names(port: int, num_connections: int) -> set[bytes]:
    """Return the names of the servers that answer new connections."""
    names = set()
    for _ in range(num_connections):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        names.add((await _response(reader))[1])
        writer.close()
    return names


async def _response(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return the status line and the body of a response in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return head.partition(b"\r\n")[0] + b"\r\n", body


async def _until_closed(reader: asyncio.StreamReader) -> None:
    """Wait until the server has closed the connection; bytes that it had not read reset it."""
    with contextlib.suppress(ConnectionResetError):
        await reader.read()


async def test_chunks_that_go_directly_to_the_socket_are_between_head_and_end() -> None:
    async with _connected() as (reader, writer):
        writer.write(_HEAD + b"content-length: 3\r\n\r\nabc")
        assert await _response(reader) == (_OK, b"/a=abc")


async def test_a_client_of_http_1_0_receives_a_stream_without_chunks_until_the_connection_ends() -> None:
    async with _connected() as (reader, writer):
        writer.write(b"POST /a HTTP/1.0\r\ncontent-length: 3\r\n\r\nabc")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and body == b"/a=abc"


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with _connected() as (reader, writer):
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(4)))
        for number in range(4):
            assert await _response(reader) == (_OK, b"/%d=" % number)


async def test_a_client_that_leaves_is_noticed_although_its_next_request_waits_for_the_answer() -> None:
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        direct = take_streamed_body(scope)
        assert direct is not None
        with direct.calling_when_left(left.set):
            direct.write(b"x")
            await left.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with _connected(_PATIENT, app) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"x\r\n")
        writer.write(b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.close()
        await left.wait()


async def test_a_request_that_offers_an_upgrade_is_answered_and_so_is_the_next_one() -> None:
    upgrade = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    async with _connected() as (reader, writer):
        for _ in range(2):
            writer.write(_HEAD + upgrade + b"content-length: 3\r\n\r\nabc")
            assert await _response(reader) == (_OK, b"/a=abc")


@pytest.mark.parametrize(
    "beginning",
    [
        b"GET /",
        _HEAD + b"x: ",
        _HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
        _HEAD + b"transfer-encoding: chunked\r\n\r\n1;",
    ],
    ids=["path", "header", "trailer", "chunk extension"],
)
async def test_an_endless_part_of_a_request_is_refused(beginning: bytes) -> None:
    async with _connected(_PATIENT) as (reader, writer):
        writer.write(beginning + b"a" * _ENDLESS_BYTES)
        await _until_closed(reader)


async def test_endless_headers_are_refused() -> None:
    async with _connected(_PATIENT) as (reader, writer):
        writer.write(_HEAD + b"x: 12345678\r\n" * (_ENDLESS_BYTES // 10))
        await _until_closed(reader)


@pytest.mark.parametrize(
    ("request_bytes", "status", "code", "words"),
    [
        (_HEAD + b"x: 12345678\r\n" * 2000 + b"\r\n", 431, "request_header_fields_too_large", "16384 bytes"),
        (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", 400, "bad_request", "no valid HTTP/1.1 request"),
    ],
    ids=["head above 16 KiB", "TLS"],
)
async def test_a_request_that_cannot_be_read_is_refused_as_every_other(
    request_bytes: bytes, status: int, code: str, words: str
) -> None:
    async with _connected(_PATIENT) as (reader, writer):
        writer.write(request_bytes)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"content-type: application/json" in head
    assert b"connection: close" in head and b"date: " in head and b"content-length: %d" % len(body) in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code) and words in error["message"]


async def test_a_large_body_in_small_chunks_is_accepted() -> None:
    async with _connected() as (reader, writer):
        writer.write(_HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n")
        assert await _response(reader) == (_OK, b"/a=" + b"a" * 20_000)


async def test_a_connection_with_too_many_pipelined_requests_is_closed() -> None:
    async with _connected() as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
        assert (await reader.read()).count(_OK) < 20


async def test_a_client_that_sends_half_of_a_pipelined_request_times_out() -> None:
    async with _connected(HttpLimits(head_s=0.3, request_s=0.3)) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" + _HEAD)
        assert await _response(reader) == (_OK, b"/a=")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await _response(reader)


async def test_servers_that_share_a_port_both_get_connections_until_one_leaves() -> None:
    async with _sharing(0, b"first") as first, _sharing(first.port, b"second"):
        assert await _names(first.port, 64) == {b"first", b"second"}  # all at one: 2 in 2**64
        reader, writer = await asyncio.open_connection("127.0.0.1", first.port)
        first.leave_port()
        is_closed = False
        while not is_closed:  # the kernel resets what arrives between the last look and the close
            with contextlib.suppress(ConnectionResetError):
                is_closed = await _names(first.port, 16) == {b"second"} and first._socket.fileno() < 0
        assert await _names(first.port, 64) == {b"second"}
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")  # a connection from before is still served
        assert (await _response(reader))[0] == _OK
        writer.close()
