"""Which stream serves which request id here, so that a client that comes back for its request gets it.

A client whose link broke asks again before this router has seen its first stream end: that one is ended then. Owns who
is live and how it is ended; admission owns how many may be.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.errors import Cancelled, TandemError
from router.outbox import Outbox


@dataclass(slots=True)
class _Stream:
    outbox: Outbox
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LiveStreams:
    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    @contextmanager
    def listed(self, request_id: str, outbox: Outbox) -> Iterator[None]:
        """An admitted request: nobody else has its id."""
        assert request_id not in self._streams, f"request id {request_id!r} is listed twice"
        stream = self._streams[request_id] = _Stream(outbox)
        try:
            yield
        finally:
            del self._streams[request_id]
            stream.ended.set()

    def end_all(self, error: TandemError) -> None:
        """Every stream ends with this."""
        for stream in tuple(self._streams.values()):
            stream.outbox.give_up(error)

    async def end(self, request_id: str) -> None:
        """Returns once no stream here serves it; its workers have been told to stop by then."""
        while (stream := self._streams.get(request_id)) is not None:
            stream.outbox.give_up(Cancelled("the client has come back for this request on another stream"))
            await stream.ended.wait()
