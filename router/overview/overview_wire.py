"""Converts the parts of an overview, members included, into messages of tandem.v1.

`MemberStatuses` asks each worker for the figures that it reports.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from cluster.errors import TandemError
from cluster.member import Member
from cluster.protocol.report_wire import link_speeds_to_wire
from router.fleet.fleet import Fleet
from router.grpc_api.inference_wire import ledger_to_wire
from router.overview.history import Event, Sample, quantile_s
from router.policies.breakers import BreakerState, Pair
from router.request.explanations import Explanation
from tandem.enum_words import EVENT_KINDS, MEMBER_ROLES, MEMBER_STATES, REQUEST_PHASES
from tandem.v1 import admin_pb2

_MAX_BREAKERS = 100


def timelines_to_wire(requests: Iterable[Explanation], origin_s: float) -> list[admin_pb2.RequestTimeline]:
    """`origin_s`: the Unix time at which the router's monotonic clock was 0."""
    return [_timeline_to_wire(request, origin_s) for request in requests]


def _timeline_to_wire(request: Explanation, origin_s: float) -> admin_pb2.RequestTimeline:
    first_s = request.first_token_s
    last = request.attempts[-1].placement if request.attempts else None
    return admin_pb2.RequestTimeline(
        request_id=request.request_id,
        label=request.label,
        outcome=request.outcome,
        arrived_s=origin_s + request.began_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=request.num_tokens,
        ttft_s=None if first_s is None else first_s - request.began_s,
        itl_s=request.itl_s,
        spans=[
            admin_pb2.PhaseSpan(
                phase=REQUEST_PHASES.number(span.phase), start_s=span.start_s, duration_s=span.duration_s
            )
            for span in request.spans
        ],
        ledger=ledger_to_wire(request.ledger) if request.ledger is not None else None,
        num_placements=len(request.attempts),
        placement_reason=last.reason if last is not None else "",
        prefill_member=str(last.prefill or "") if last is not None else "",
        decode_member=str(last.decode) if last is not None else "",
    )


def event_to_wire(event: Event) -> admin_pb2.ClusterEvent:
    return admin_pb2.ClusterEvent(
        at_s=event.at_s, kind=EVENT_KINDS.number(event.kind), member=event.member, text=event.text
    )


def sample_to_wire(sample: Sample) -> admin_pb2.RateSample:
    return admin_pb2.RateSample(
        at_s=sample.at_s,
        period_s=sample.period_s,
        num_ended=sample.num_ended,
        num_failed=sample.num_failed,
        num_prompt_tokens=sample.num_prompt_tokens,
        num_tokens=sample.num_tokens,
        num_live=sample.num_live,
        ttft_p50_s=sample.ttft_s[0] if sample.ttft_s else None,
        ttft_p99_s=sample.ttft_s[1] if sample.ttft_s else None,
        itl_p50_s=sample.itl_s[0] if sample.itl_s else None,
        itl_p99_s=sample.itl_s[1] if sample.itl_s else None,
    )


def latencies_to_wire(
    bounds_s: Sequence[float], latencies: Mapping[str, Sequence[int]]
) -> list[admin_pb2.LatencyHistogram]:
    return [
        admin_pb2.LatencyHistogram(
            name=name,
            bounds_s=bounds_s,
            counts=counts,
            p50_s=quantile_s(bounds_s, counts, 0.5),
            p90_s=quantile_s(bounds_s, counts, 0.9),
            p99_s=quantile_s(bounds_s, counts, 0.99),
        )
        for name, counts in latencies.items()
    ]


def breakers_to_wire(failing: Mapping[Pair, BreakerState]) -> list[admin_pb2.PairBreaker]:
    pairs = sorted(failing.items())[:_MAX_BREAKERS]
    return [
        admin_pb2.PairBreaker(exporter=str(exporter), importer=str(importer), state=state)
        for (exporter, importer), state in pairs
    ]


RECENT_S = 0.9  # callers share what is not older
_PATIENCE_S = 1.0  # an overview does not wait longer for a worker that does not answer


def member_to_wire(member: Member) -> admin_pb2.MemberStatus:
    """Describe a member as the registry has it."""
    return admin_pb2.MemberStatus(
        member_id=member.id.id,
        incarnation=member.id.incarnation,
        role=MEMBER_ROLES.number(member.role),
        state=MEMBER_STATES.number(member.state),
        address=member.address,
        model=member.model,
        kv_transports=member.transports,
        metrics_address=member.metrics_address,
        http_address=member.http_address,
    )


class MemberStatuses:
    """The statuses of all members."""

    def __init__(self, fleet: Fleet, now_s: Callable[[], float]) -> None:
        """`now_s`: a monotonic clock."""
        self._fleet, self._now_s = fleet, now_s
        self._asked: asyncio.Task[list[admin_pb2.MemberStatus]] | None = None
        self._asked_s = 0.0

    async def fresh(self, patience_s: float | None = None) -> list[admin_pb2.MemberStatus]:
        """Ask every worker now, for `patience_s` at most. One that does not answer is listed without figures, with the
        time since it last answered."""
        return await asyncio.gather(*(self._status(member, patience_s) for member in self._fleet.members()))

    async def recent(self) -> list[admin_pb2.MemberStatus]:
        """Return statuses that are at most a second old. All callers of that time share one question to each worker."""
        now_s = self._now_s()
        if self._asked is None or (self._asked.done() and now_s - self._asked_s >= RECENT_S):
            self._asked, self._asked_s = asyncio.create_task(self.fresh(_PATIENCE_S)), now_s
        return await asyncio.shield(self._asked)

    async def _status(self, member: Member, patience_s: float | None) -> admin_pb2.MemberStatus:
        figures: dict[str, float] = {}
        last_seen_s = 0.0
        peer = self._fleet.peer(member.id)
        if peer is not None:
            try:
                async with asyncio.timeout(patience_s):
                    inspected = await peer.inspect()
                figures = dict(inspected.figures) | {f"blocks_{k}": float(v) for k, v in inspected.blocks.items()}
            except (TandemError, TimeoutError):
                last_seen_s = peer.silent_s
                figures = {"step_s": peer.stream.heartbeat.step_s}
        status = member_to_wire(member)
        status.last_seen_s = last_seen_s
        status.figures.update(figures)
        status.links.extend(link_speeds_to_wire(self._fleet.links(member.id)))
        return status
