"""The streams that this router serves, by the stream id of their acceptances.

A client whose link broke resumes its request before this router has seen the earlier stream end: the router then ends
the earlier stream. Only the acceptance of that very stream ends it; a request id never does. A client numbers its
resumptions, because the network may deliver a call after a newer one: a call never ends a stream of its own or of a
higher number. Owns which streams are live and how they are ended; admission owns how many may be.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.errors import Cancelled, ResumeSuperseded, TandemError
from router.request.outbox import Outbox


@dataclass(slots=True)
class _Stream:
    outbox: Outbox
    resume_number: int  # of the call that it answers; 0: the request's first call
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LiveStreams:
    def __init__(self) -> None:
        self._streams: dict[bytes, _Stream] = {}

    def may_be_taken_over(self, stream_id: bytes, resume_number: int) -> bool:
        """Whether a stream of this id is live here, and older than the call of that number."""
        stream = self._streams.get(stream_id)
        return stream is not None and stream.resume_number < resume_number

    @contextmanager
    def listed(self, stream_id: bytes, outbox: Outbox, resume_number: int) -> Iterator[None]:
        """An admitted request. `stream_id` is random, or of a request whose earlier stream here has ended."""
        assert stream_id not in self._streams, f"stream {stream_id.hex()} is listed twice"
        stream = self._streams[stream_id] = _Stream(outbox, resume_number)
        try:
            yield
        finally:
            del self._streams[stream_id]
            stream.ended.set()

    def end_all(self, error: TandemError) -> None:
        """Every stream ends with this."""
        for stream in tuple(self._streams.values()):
            stream.outbox.give_up(error)

    async def take_over(self, stream_id: bytes, resume_number: int) -> None:
        """Returns once no stream of this id is live here; its workers have been told to stop by then.

        Raises ResumeSuperseded if the live stream, or one that began during the wait, has this number or a higher one.
        """
        while (stream := self._streams.get(stream_id)) is not None:
            if stream.resume_number >= resume_number:
                raise ResumeSuperseded(
                    f"this is resumption {resume_number} of the request, and a newer stream of it is live here, of"
                    f" resumption {stream.resume_number}; give each call a higher resume_from.resume_number"
                )
            stream.outbox.give_up(Cancelled("the client has come back for this request on another stream"))
            await stream.ended.wait()
