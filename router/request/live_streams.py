"""The streams that this router serves, by the stream id of their acceptances.

A client whose link broke resumes its request before this router has seen its first stream end: the router then ends the
first stream. Only the acceptance of that very stream ends it; a request id never does. Owns which streams are live and
how they are ended; admission owns how many may be.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.errors import Cancelled, TandemError
from router.request.outbox import Outbox


@dataclass(slots=True)
class _Stream:
    outbox: Outbox
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LiveStreams:
    def __init__(self) -> None:
        self._streams: dict[bytes, _Stream] = {}

    def __contains__(self, stream_id: bytes) -> bool:
        return stream_id in self._streams

    @contextmanager
    def listed(self, stream_id: bytes, outbox: Outbox) -> Iterator[None]:
        """An admitted request. `stream_id` is random, or of a request whose earlier stream here has ended."""
        assert stream_id not in self._streams, f"stream {stream_id.hex()} is listed twice"
        stream = self._streams[stream_id] = _Stream(outbox)
        try:
            yield
        finally:
            del self._streams[stream_id]
            stream.ended.set()

    def end_all(self, error: TandemError) -> None:
        """Every stream ends with this."""
        for stream in tuple(self._streams.values()):
            stream.outbox.give_up(error)

    async def end(self, stream_id: bytes) -> None:
        """Returns once no stream of this id is live here; its workers have been told to stop by then."""
        while (stream := self._streams.get(stream_id)) is not None:
            stream.outbox.give_up(Cancelled("the client has come back for this request on another stream"))
            await stream.ended.wait()
