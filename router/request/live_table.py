"""The table of live requests: their places, ids and streams, and the tokens that are buffered for their clients. Pure.

A request occupies a place from its arrival until its client has left. While it is served it also holds its request id
and its stream id. `ClientBuffers` bounds the tokens that the router keeps for all clients together. A client has
stopped when it has read nothing for `STOPPED_S` while tokens waited for it. Above the bound the router ends the client
that stopped first, however few tokens it has; when no client has stopped, it ends the client with the most tokens. A
client that reads is therefore never ended because of one that does not.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import DuplicateRequest
from router.policies.admission import AdmissionControl, TenantPlaces

STOPPED_S = 0.5  # a client that reads takes something within this time, on a busy machine too


@dataclass(slots=True, eq=False)
class LiveRow:
    """The row of a live request. Only the table changes it."""

    number: int  # unique in this router
    arrived_s: float
    request_id: str
    is_resumed: bool
    num_choices: int = 1
    tenant: str = ""
    weight: int = 1  # the tenant's
    stream_id: bytes | None = None  # None: the request is not served yet, or no more
    resume_number: int = 0  # of the call that the stream answers; 0: the first call of the request


class LiveTable:
    """All live requests of a router, the oldest first."""

    def __init__(self, admission: AdmissionControl) -> None:
        self._admission = admission
        self._numbers = itertools.count()
        self._rows: dict[int, LiveRow] = {}
        self._streams: dict[bytes, LiveRow] = {}
        self._num_sequences = 0  # the choices of all rows
        self._tenants: dict[str, list[LiveRow]] = {}  # the rows of tenants that have a name
        self._ids: Counter[str] = Counter()  # a resumed request may share the id of a live one

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_served(self) -> int:
        return len(self._streams)

    def add(
        self,
        request_id: str,
        now_s: float,
        *,
        is_resumed: bool,
        takes_over: bool,
        num_choices: int = 1,
        tenant: str = "",
        weight: int = 1,
    ) -> LiveRow:
        """Occupy a place per choice. `takes_over`: it resumes a stream that is live here. Raises Overloaded."""
        places = self._places(tenant, weight) if tenant and not is_resumed else None
        self._admission.check_place(self._num_sequences, num_choices, takes_over=takes_over, tenant=places)
        row = LiveRow(next(self._numbers), now_s, request_id, is_resumed, num_choices, tenant, weight)
        self._rows[row.number] = row
        self._num_sequences += num_choices
        if tenant:
            self._tenants.setdefault(tenant, []).append(row)
        return row

    def _places(self, tenant: str, weight: int) -> TenantPlaces:
        own = sum(row.num_choices for row in self._tenants.get(tenant, ()))
        others = sum(rows[-1].weight for name, rows in self._tenants.items() if name != tenant)
        return TenantPlaces(own, weight, others)

    def begin_stream(self, row: LiveRow, stream_id: bytes, resume_number: int) -> None:
        """Reserve the request's id and list its stream. Raises DuplicateRequest.

        A new request needs an id that no live request holds. A resumed request does not: its acceptance names its
        stream, so another client that chose the same id cannot keep it out. `stream_id` is random, or belongs to a
        stream that has ended here.
        """
        if self._ids[row.request_id] and not row.is_resumed:
            raise DuplicateRequest(f"request id {row.request_id!r} belongs to a live request; choose another, or none")
        assert stream_id not in self._streams, f"stream {stream_id.hex()} is listed twice"
        self._ids[row.request_id] += 1
        self._streams[stream_id] = row
        row.stream_id, row.resume_number = stream_id, resume_number

    def end_stream(self, row: LiveRow) -> None:
        assert row.stream_id is not None, "the request has no stream"
        del self._streams[row.stream_id]
        row.stream_id = None
        self._ids[row.request_id] -= 1
        if not self._ids[row.request_id]:
            del self._ids[row.request_id]

    def remove(self, row: LiveRow, now_s: float) -> None:
        """Free the request's place; its client has left."""
        assert row.stream_id is None, "a request that is served cannot be removed"
        del self._rows[row.number]
        self._num_sequences -= row.num_choices
        if row.tenant:
            self._tenants[row.tenant].remove(row)
            if not self._tenants[row.tenant]:
                del self._tenants[row.tenant]
        self._admission.record_end(now_s, now_s - row.arrived_s)

    def stream(self, stream_id: bytes) -> LiveRow | None:
        return self._streams.get(stream_id)

    def may_take_over(self, stream_id: bytes, resume_number: int) -> bool:
        """Return whether a stream with this id is live here and older than the call with this number."""
        row = self._streams.get(stream_id)
        return row is not None and row.resume_number < resume_number

    def check(self) -> None:
        """Raise AssertionError if ids, streams and rows disagree."""
        served = [row for row in self._rows.values() if row.stream_id is not None]
        assert self._streams == {row.stream_id: row for row in served}, "a stream without a live request, or unlisted"
        assert self._ids == Counter(row.request_id for row in served), "the ids are not those of the served requests"
        assert self._num_sequences == sum(row.num_choices for row in self._rows.values()), "places are counted wrong"
        named = sorted(row.number for row in self._rows.values() if row.tenant)
        assert named == sorted(row.number for rows in self._tenants.values() for row in rows), "a tenant's row is lost"
        assert all(number == row.number for number, row in self._rows.items()), "a row stands under another number"


EndClient = Callable[[str, bool], object]  # a description of what was buffered; whether the client had stopped


class BufferShare:
    """The tokens that are buffered for one client."""

    def __init__(self, buffers: "ClientBuffers", end: EndClient) -> None:
        self._buffers, self.end = buffers, end
        self.num_tokens = 0
        self.unread_since_s: float | None = None  # None: the client has read everything that it could read

    def add_readable(self, num_tokens: int, now_s: float) -> None:
        """Count tokens that the client can read now. Ends clients above the bound."""
        if self.unread_since_s is None:
            self.unread_since_s = now_s
        self.num_tokens += num_tokens  # as `add_unreadable`, which would cost one more call for each token
        self._buffers.add_tokens(num_tokens, now_s)

    def add_unreadable(self, num_tokens: int, now_s: float) -> None:
        """Count tokens that the client cannot read yet. Ends clients above the bound."""
        self.num_tokens += num_tokens
        self._buffers.add_tokens(num_tokens, now_s)

    def subtract_read(self, num_tokens: int, now_s: float, *, can_read_more: bool = True) -> None:
        """Record that the client has read tokens, and whether it can read the others."""
        self._count(-num_tokens)
        self.unread_since_s = now_s if self.num_tokens and can_read_more else None

    def subtract_last_read(self, num_tokens: int) -> None:
        """Record that the client has read the last tokens that it could read."""
        self.num_tokens -= num_tokens  # as `_count`, which would cost one more call for each token
        self._buffers.num_tokens -= num_tokens
        self.unread_since_s = None

    def clear(self) -> None:
        self._count(-self.num_tokens)
        self.unread_since_s = None

    def stopped_s(self, now_s: float) -> float:
        """Return the seconds for which the client has read nothing while tokens waited for it."""
        return 0.0 if self.unread_since_s is None else now_s - self.unread_since_s

    def _count(self, change: int) -> None:
        self.num_tokens += change
        self._buffers.num_tokens += change


class ClientBuffers:
    """The shares of all clients of a router."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._shares: set[BufferShare] = set()
        self.num_tokens = 0

    def set_limit(self, max_tokens: int) -> None:
        """Change the bound. It holds from the next token that is buffered."""
        self._max_tokens = max_tokens

    def __contains__(self, share: BufferShare) -> bool:
        return share in self._shares

    def add(self, end: EndClient) -> BufferShare:
        """Add a client. `end` must clear the share."""
        share = BufferShare(self, end)
        self._shares.add(share)
        return share

    def remove(self, share: BufferShare) -> None:
        share.clear()
        self._shares.remove(share)
        share.end = _end_nobody  # the client refers to its share

    def add_tokens(self, num_tokens: int, now_s: float) -> None:
        """Count tokens that a share has counted. Ends clients above the bound."""
        self.num_tokens += num_tokens
        while self.num_tokens > self._max_tokens:
            victim = max((share for share in self._shares if share.num_tokens), key=lambda share: _rank(share, now_s))
            stopped_s = victim.stopped_s(now_s)
            has_stopped = stopped_s >= STOPPED_S
            description = f"{victim.num_tokens} tokens were kept for this client"
            description += f", which took none for {stopped_s:.1f} s" if has_stopped else ""
            description += f", and {self.num_tokens} for all clients, more than {self._max_tokens}"
            victim.end(description, has_stopped)
            assert victim.num_tokens == 0, "the share of a client that was ended must be cleared"

    def check(self) -> None:
        assert self.num_tokens == sum(share.num_tokens for share in self._shares), "buffered tokens do not add up"


def _end_nobody(_description: str, _has_stopped: bool) -> None:
    pass


def _rank(share: BufferShare, now_s: float) -> tuple[float, int]:
    """Return the rank of a client. The client with the highest rank is ended first."""
    stopped_s = share.stopped_s(now_s)
    return (stopped_s if stopped_s >= STOPPED_S else 0.0, share.num_tokens)
