"""All requests that a router has received and that have not ended: the one place where they are listed.

Owns the table of live requests (live_table.py) and each request's outbox, account and stream. A client whose connection
broke resumes its request before this router has seen the earlier stream end: the router then ends the earlier stream.
Only the acceptance of that very stream ends it; a request id never does. The client numbers its resumptions, because
the network may deliver a call after a newer one: a call never ends a stream with its own or a higher number.
"""

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice

from cluster.accounts.usage import KINDS, Reservation, TenantLimits, Usage, UsageMeter
from cluster.clock import Clock
from cluster.errors import Cancelled, LimitReached, ResumeSuperseded, TandemError
from cluster.observe.telemetry import Telemetry
from cluster.observe.trace_context import RequestTrace
from router.policies.admission import AdmissionControl
from router.policies.candidates import NO_TARGETS, SloTargets
from router.request.account import RequestAccount
from router.request.explanations import Explanation, Explanations, RequestLog, is_named
from router.request.live_table import ClientBuffers, LiveRow, LiveTable
from router.request.outbox import Outbox, OutboxFlush, WholeAnswer
from router.request.traces import Traces
from router.requests import Accepted, GenerateRequest


@dataclass(frozen=True, slots=True, eq=False)
class LiveRequest:
    """A request from its arrival until its client has left."""

    request: GenerateRequest
    request_id: str
    account: RequestAccount
    outbox: Outbox
    row: LiveRow
    reservation: Reservation | None  # None: the caller is not counted, and has no limits
    accepted: asyncio.Future[Accepted]  # done once the request is admitted, before its first delta
    served: asyncio.Event = field(default_factory=asyncio.Event)  # set when its stream has ended


class LiveRequests:
    def __init__(
        self,
        *,
        max_live_requests: int,
        max_buffered_tokens: int,
        clock: Clock,
        telemetry: Telemetry,
        targets: SloTargets = NO_TARGETS,
        traces: Traces | None = None,
    ) -> None:
        """`targets`: the latency targets of requests that set none. `traces`: None: no spans are made."""
        self._traces = traces
        self._targets = targets
        self.admission = AdmissionControl(max_live_requests)
        self._table = LiveTable(self.admission)
        self.buffers = ClientBuffers(max_buffered_tokens)
        self._clock = clock
        self._flush = OutboxFlush(clock)
        self._telemetry = telemetry
        self._log = RequestLog()
        self.limits = TenantLimits()
        self.usage = UsageMeter()
        self._live: dict[int, LiveRequest] = {}  # by the number of the row, the oldest first
        self.explanations = Explanations()  # of requests that have ended
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterate over the live requests, the oldest first."""
        return iter(tuple(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_served(self) -> int:
        """Return the number of requests that were admitted and have not ended."""
        return self._table.num_served

    @property
    def num_buffered_tokens(self) -> int:
        return self.buffers.num_tokens

    def explain(self, name: str) -> list[Explanation]:
        """Return the live and recently ended requests with this id, label or trace id, the newest first."""
        named = [live for live in self if is_named(name, live.request_id, live.request.label, live.account.trace_id)]
        return self.explanations.find(name, self._explained(named))

    def explain_oldest(self, most: int) -> list[Explanation]:
        """Return the oldest live requests, at most `most`."""
        return self._explained(islice(self._live.values(), most))

    def _explained(self, requests: Iterable[LiveRequest]) -> list[Explanation]:
        now_s = self._clock.now_s()
        return [live.account.explanation(live.request_id, now_s) for live in requests]

    def begin_trace(self, trace_parent: str) -> RequestTrace | None:
        """Return the place in traces of a request that arrives; None: this router makes no spans. `trace_parent`: the
        client's; it may be malformed or empty."""
        return self._traces.begin(trace_parent) if self._traces is not None else None

    async def close(self) -> None:
        """Send the spans that are left."""
        if self._traces is not None:
            await self._traces.close()

    async def until_none_left(self) -> None:
        await self._none_left.wait()

    @contextmanager
    def arrived(self, request: GenerateRequest, *, takes_over: bool = False) -> Iterator[LiveRequest]:
        """List a request until the `with` block ends. `takes_over`: it resumes a stream that is live here.

        Raises Overloaded, LimitReached. Every request is counted once by its outcome, also one that was refused.
        """
        request_id = request.request_id or f"req-{secrets.token_hex(12)}"
        targets = self._targets.preferring(SloTargets.of_request(request.slo_ttft_s, request.slo_tpot_s))
        account = RequestAccount(
            self._telemetry, self._clock.now_s(), label=request.label, targets=targets, is_batch=request.is_batch
        )
        account.trace = request.trace
        outcome = "cancelled"
        try:
            with self._listed(request, request_id, account, takes_over=takes_over) as live:
                yield live
            outcome = "ok"
        except TandemError as error:
            outcome = error.reason
            if isinstance(error, LimitReached):
                tenant = request.caller.tenant
                self._telemetry.count("tandem_limits_reached_total", tenant=tenant, limit=error.param)
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            now_s = self._clock.now_s()
            ended = account.explanation(request_id, now_s, outcome)
            account.publish(ended)
            self.explanations.add(ended)
            if self._traces is not None:
                self._traces.end(request, account, ended, now_s)
            self._log.write(ended, now_s)
            self._on_change()

    @contextmanager
    def streaming(self, live: LiveRequest, stream_id: bytes) -> Iterator[None]:
        """List an admitted request's id and stream until the `with` block ends. Raises DuplicateRequest."""
        self._table.begin_stream(live.row, stream_id, live.request.resume_number)
        try:
            yield
        finally:
            self._table.end_stream(live.row)
            live.served.set()

    def may_take_over(self, stream_id: bytes, resume_number: int) -> bool:
        """Return whether a stream with this id is live here and older than the call with this number."""
        return self._table.may_take_over(stream_id, resume_number)

    async def take_over(self, stream_id: bytes, resume_number: int) -> None:
        """Return once no stream with this id is live here; the router has cancelled it on every worker by then.

        Raises ResumeSuperseded if the live stream, or one that began during the wait, has this number or a higher one.
        """
        while (row := self._table.stream(stream_id)) is not None:
            if row.resume_number >= resume_number:
                raise ResumeSuperseded(
                    f"this is resumption {resume_number} of the request, and a newer stream of it is live here, of"
                    f" resumption {row.resume_number}; give each call a higher resume_from.resume_number"
                )
            earlier = self._live[row.number]
            earlier.outbox.fail(Cancelled("the client has resumed this request on another stream"))
            await earlier.served.wait()

    def end_streams(self, error: TandemError) -> None:
        """End every stream with this error."""
        for live in self:
            if live.row.stream_id is not None:
                live.outbox.fail(error)

    @contextmanager
    def whole_answer(self) -> Iterator[WholeAnswer]:
        """Collect an answer that is not streamed; its tokens count as buffered until the `with` block ends."""
        answer = WholeAnswer(self.buffers, self._clock)
        try:
            yield answer
        finally:
            self.buffers.remove(answer.share)

    def check(self) -> None:
        """Raise AssertionError if requests, ids, streams and buffered tokens disagree."""
        self._table.check()
        self.buffers.check()
        if not self._live:
            self.limits.check()
        assert len(self._table) == len(self._live), "a request without a place, or a place without a request"
        assert all(live.row.number == number for number, live in self._live.items()), "a request has another's place"
        assert all(live.outbox.share in self.buffers for live in self), "an outbox is not counted"
        assert self._none_left.is_set() == (not self._live), "a drain would miss a live request"

    @contextmanager
    def _listed(
        self, request: GenerateRequest, request_id: str, account: RequestAccount, *, takes_over: bool
    ) -> Iterator[LiveRequest]:
        caller, is_resumed, now_s = request.caller, request.resume_from is not None, self._clock.now_s()
        with (
            self.limits.place(caller, now_s, request.num_bytes, is_resumed=is_resumed)
            if caller.is_counted
            else nullcontext() as reservation,
            self._placed(request_id, request, now_s, takes_over=takes_over) as row,
        ):
            outbox = Outbox(self.buffers, self._clock, self._flush, request.stream_interval)
            accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
            live = LiveRequest(request, request_id, account, outbox, row, reservation, accepted)
            self._live[row.number] = live
            self._on_change()
            try:
                yield live
            finally:
                outbox.close()
                self.buffers.remove(outbox.share)
                del self._live[row.number]
                self._meter(live)

    @contextmanager
    def _placed(
        self, request_id: str, request: GenerateRequest, now_s: float, *, takes_over: bool
    ) -> Iterator[LiveRow]:
        row = self._table.add(
            request_id,
            now_s,
            is_resumed=request.resume_from is not None,
            takes_over=takes_over,
            num_choices=max(1, request.n),  # it is checked later
            tenant=request.caller.tenant,
            weight=request.caller.weight,
        )
        try:
            yield row
        finally:
            self._table.remove(row, self._clock.now_s())

    def _meter(self, live: LiveRequest) -> None:
        """Count the usage of the request here. Its prompt counts at the router where the request was new, and not again
        where it is resumed.
        """
        caller, account = live.request.caller, live.account
        if live.reservation is None:
            return
        is_new = live.request.resume_from is None
        used = Usage(
            requests=int(is_new),
            prompt_tokens=account.num_prompt_tokens * is_new,
            cached_tokens=(account.num_cached or 0) * is_new,
            output_tokens=account.num_tokens,
        )
        live.reservation.settle(used.prompt_tokens + used.output_tokens, self._clock.now_s())
        self.usage.record(caller.tenant, caller.key_id, used)
        for kind in KINDS:
            self._telemetry.count("tandem_tenant_usage_total", getattr(used, kind), tenant=caller.tenant, kind=kind)

    def _on_change(self) -> None:
        self._telemetry.gauge("tandem_requests_live", len(self._live))
        if self._live:
            self._none_left.clear()
        else:
            self._none_left.set()
