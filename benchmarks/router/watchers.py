"""What watches the router of the arm with everything on: a receiver of spans, Prometheus' scrapes, and an open page."""

import asyncio
import json
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from benchmarks.router.parties import Router

_SCRAPE_S, _PAGE_S = 5.0, 1.0
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


@asynccontextmanager
async def watching(routers: Sequence[Router]) -> AsyncIterator[None]:
    """Scrape these routers and ask them for the overview, as Prometheus and an open page do."""
    asking = [_scrape(router) for router in routers] + [_follow(router) for router in routers]
    tasks = [asyncio.create_task(each) for each in asking]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _scrape(router: Router) -> None:
    while True:
        await asyncio.to_thread(_read, f"http://{router.http}/metrics")
        await asyncio.sleep(_SCRAPE_S)


async def _follow(router: Router) -> None:
    """Ask as the page does: for what is new since its last answer."""
    seen: list[str] = []
    while True:
        query = urllib.parse.urlencode([("seen", each) for each in seen])
        answer = json.loads(await asyncio.to_thread(_read, f"http://{router.http}/admin/overview?{query}"))
        positions = [(each["router"], each["position"]) for each in answer["routers"] if each.get("position")]
        seen = [f"{name}:{at['ended']}:{at['events']}:{at['samples']}" for name, at in positions]
        await asyncio.sleep(_PAGE_S)


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        answer: bytes = response.read()
        return answer
