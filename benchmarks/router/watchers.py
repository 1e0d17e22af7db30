"""What watches a router: a receiver of spans, Prometheus' scrapes, and an open page."""

import asyncio
import json
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from benchmarks.router.parties import Router

SCRAPE_S, PAGE_S = 5.0, 1.0  # between scrapes of Prometheus, and between polls of the page
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"


@asynccontextmanager
async def receiver() -> AsyncIterator[str]:
    """Take spans over HTTP, and yield the endpoint."""
    server = await asyncio.start_server(_receive, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            writer.write(_ANSWER)
            await writer.drain()


async def scrape(router: Router) -> str:
    """Return the metrics, as Prometheus reads them."""
    return (await asyncio.to_thread(_read, f"http://{router.http}/metrics")).decode()


class Page:
    """An open page of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._seen: list[str] = []

    async def poll(self) -> None:
        """Ask for what is new since the last answer."""
        query = urllib.parse.urlencode([("seen", each) for each in self._seen])
        answer = json.loads(await asyncio.to_thread(_read, f"http://{self._router.http}/admin/overview?{query}"))
        positions = [(each["router"], each["position"]) for each in answer["routers"] if each.get("position")]
        self._seen = [f"{name}:{at['ended']}:{at['events']}:{at['samples']}" for name, at in positions]


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        answer: bytes = response.read()
        return answer
