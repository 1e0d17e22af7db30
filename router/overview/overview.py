"""The overview for operators: `Overview` records the rates and events of this router, and collects the overviews of all
routers. It reads existing state only: counters, live and ended requests, the fleet. Routers ask each other only while a
caller asks one of them, and callers that poll in the same second share the answers. Owns the history, the event log,
and the channels to other routers.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TypeAlias

import grpc

from cluster.clock import Clock
from cluster.errors import NotFound, TandemError
from cluster.member import Member, MemberState
from cluster.messages import Role
from cluster.observe.metrics import METRICS
from cluster.observe.telemetry import Telemetry
from cluster.protocol.report_wire import link_speeds_to_wire
from cluster.serving.rpc_errors import error_from_rpc
from router.fleet.fleet import Fleet
from router.grpc_api.admin_wire import (
    breakers_to_wire,
    event_to_wire,
    explanation_to_wire,
    latencies_to_wire,
    member_to_wire,
    sample_to_wire,
    timelines_to_wire,
)
from router.operator_commands import ScaleTargetView, target_to_wire
from router.overview.history import SAMPLE_PERIOD_S, ClusterView, EventLog, History, SeenMember, Totals
from router.overview.slowness import LinkSlowdown, Slowdown, full_pools, link_slowdowns, slowdowns
from router.pipeline.worker_choice import PairHealth
from router.policies.effect import NO_EFFECT, Comparison
from router.request.explanations import MAX_EXPLAINED
from router.request.live_requests import LiveRequests
from tandem.enum_words import MEMBER_ROLES
from tandem.v1 import admin_pb2, admin_pb2_grpc

_RECENT_S = 0.9  # callers share what is not older
MAX_LIVE_SHOWN = 30
MAX_ENDED_SHOWN = 200  # to a caller that has seen none
_MAX_NEW_SHOWN = 30  # at each poll: each request shown costs the router 0.14 ms (benchmarks/results/observed.md)
_MAX_OTHERS = 16  # routers
_MAX_LINKS = 64  # whose slowdown is a metric: the slowest ones
_OTHER_S = 2.0  # for the answer of another router
_WORKER_TIMEOUT_S = 1.0  # an overview does not wait longer for a worker that does not answer
_VIEW_PERIOD_S = 1.0
_LATENCY_METRICS = {"ttft": "tandem_ttft_seconds", "itl": "tandem_inter_token_seconds", "e2e": "tandem_request_seconds"}
_NO_FAILURE = ("ok", "cancelled")

_MAX_SHARED = 64  # answers of one snapshot; further ones are not kept

Metadata: TypeAlias = Sequence[tuple[str, str]]
_Answer: TypeAlias = "asyncio.Task[admin_pb2.OverviewResponse]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The parts of the router from which an overview is made."""

    router: Member
    fleet: Fleet
    live_requests: LiveRequests
    pairs: PairHealth
    scaling: ScaleTargetView
    telemetry: Telemetry
    registry_age_s: Callable[[], float]
    placement: str  # the router's --placement


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The router as callers that poll see it for `_RECENT_S`, and the answers that were made from it. They get the same
    positions from it, so that they soon ask the same and share an answer."""

    at_s: float  # by the clock of the live requests
    common: admin_pb2.RouterOverview  # the part that does not depend on what the caller has seen
    answers: dict[tuple[bytes, Metadata], _Answer] = field(default_factory=dict)  # by request and key


class Overview:
    def __init__(
        self,
        watched: Watched,
        *,
        connect: Callable[[str], grpc.aio.Channel],
        clock: Clock,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`connect` opens a channel to another router. `clock`: the one of the live requests."""
        self._watched, self._connect = watched, connect
        self._clock, self._wall_clock = clock, wall_clock
        self._history = History(METRICS[_LATENCY_METRICS["ttft"]].buckets)
        self._events = EventLog()
        self._channels: dict[str, grpc.aio.Channel] = {}  # to other routers, by address
        self._closing: set[asyncio.Task[None]] = set()  # channels to routers that left
        self._slowdowns: list[Slowdown] = []  # of the last comparison
        self._snapshot: _Snapshot | None = None
        self.members = MemberStatuses(watched.fleet, clock.now_s)

    async def run(self) -> None:
        """Record rates and events until cancelled."""
        sampled = 0  # the number of its period: the samples of all routers have the same ones
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._close_channels)
            while True:
                if self._watched.fleet.members():  # the registry was read: what is there before is no event
                    self._events.observe(self._view(), self._wall_clock())
                if (period := int(self._wall_clock() // SAMPLE_PERIOD_S)) != sampled:
                    sampled = period
                    self._history.add(self._totals())
                    self._compare()
                self._close_departed()
                left_s = SAMPLE_PERIOD_S - self._wall_clock() % SAMPLE_PERIOD_S
                await asyncio.wait((self._watched.fleet.changes.next(),), timeout=min(_VIEW_PERIOD_S, left_s))

    async def of_cluster(self, request: admin_pb2.OverviewRequest, metadata: Metadata) -> admin_pb2.OverviewResponse:
        """Return the overview of all routers, this one's first. `metadata` has the caller's API key, for the others.
        A router that does not answer is listed with the reason. A first look shows the routers as they are now, so that
        a request that has just ended is in it. What a caller that polls gets is at most `_RECENT_S` old, and shared by
        callers with the same request and key: it must not be changed."""
        snapshot = self._recent() if request.seen else self._now()
        question = request.SerializeToString(deterministic=True), tuple(metadata)
        answer = snapshot.answers.get(question)
        if answer is None:
            answer = asyncio.create_task(self._answer(snapshot, request, metadata))
            if len(snapshot.answers) < _MAX_SHARED:
                snapshot.answers[question] = answer
        return await asyncio.shield(answer)

    def explain(self, name: str) -> admin_pb2.ExplainResponse:
        """Explain requests of this router. Raises NotFound."""
        found = self._watched.live_requests.explain(name)
        if not found:
            raise NotFound(f"no request {name!r} is live or among the last {MAX_EXPLAINED} of this router")
        now_s, placement = self._clock.now_s(), self._watched.placement
        return admin_pb2.ExplainResponse(requests=[explanation_to_wire(each, now_s, placement) for each in found])

    async def explain_anywhere(self, name: str, metadata: Metadata) -> admin_pb2.ExplainResponse:
        """Explain requests of whichever router has them. Raises NotFound."""
        try:
            return self.explain(name)
        except NotFound as error:
            asked = admin_pb2.ExplainRequest(request=name)
            for other in self._others():
                try:
                    found: admin_pb2.ExplainResponse = await self._stub(other).Explain(
                        asked, timeout=_OTHER_S, metadata=metadata
                    )
                    return found
                except grpc.aio.AioRpcError:
                    continue  # it has no such request, or does not answer
            raise error

    def _recent(self) -> _Snapshot:
        """Return a snapshot that is at most `_RECENT_S` old."""
        if self._snapshot is not None and self._clock.now_s() - self._snapshot.at_s < _RECENT_S:
            return self._snapshot
        return self._now()

    def _now(self) -> _Snapshot:
        now_s, watched = self._clock.now_s(), self._watched
        origin_s = self._wall_clock() - now_s
        common = admin_pb2.RouterOverview(
            router=str(watched.router.id),
            time_s=origin_s + now_s,
            position=admin_pb2.OverviewPosition(
                ended=watched.live_requests.explanations.newest,
                events=self._events.newest,
                samples=self._history.newest,
            ),
            num_live=len(watched.live_requests),
            live=timelines_to_wire(watched.live_requests.explain_oldest(MAX_LIVE_SHOWN), origin_s),
            latencies=latencies_to_wire(self._history.bounds_s, self._history.latencies()),
            registry_age_s=watched.registry_age_s(),
            breakers=breakers_to_wire(watched.pairs.failing()),
            slow=self._slow(),
        )
        self._snapshot = _Snapshot(now_s, common)
        return self._snapshot

    async def _answer(
        self, snapshot: _Snapshot, request: admin_pb2.OverviewRequest, metadata: Metadata
    ) -> admin_pb2.OverviewResponse:
        own = self._of_this_router(snapshot, request.seen)
        if request.only_this_router:
            return admin_pb2.OverviewResponse(routers=[own])
        asked = admin_pb2.OverviewRequest(seen=request.seen, only_this_router=True)
        members, others = await asyncio.gather(
            self.members.recent(),
            asyncio.gather(*(self._of_router(other, asked, metadata) for other in self._others())),
        )
        own.slow.extend(full_pools((each.member_id, _role(each), each.figures) for each in members if each.figures))
        target = target_to_wire(self._watched.scaling.target)
        return admin_pb2.OverviewResponse(members=members, target=target, routers=[own, *others])

    def _of_this_router(
        self, snapshot: _Snapshot, seen: Mapping[str, admin_pb2.OverviewPosition]
    ) -> admin_pb2.RouterOverview:
        """Return the snapshot with what is new in it to the caller."""
        until, origin_s = snapshot.common.position, snapshot.common.time_s - snapshot.at_s
        router = snapshot.common.router
        has = seen[router] if router in seen else admin_pb2.OverviewPosition()
        ended = self._watched.live_requests.explanations.since(
            has.ended, _MAX_NEW_SHOWN if has.ended else MAX_ENDED_SHOWN, until=until.ended
        )
        found = admin_pb2.RouterOverview(
            ended=timelines_to_wire(ended, origin_s),
            events=[event_to_wire(each) for each in self._events.since(has.events) if each.number <= until.events],
            samples=[sample_to_wire(each) for each in self._history.since(has.samples) if each.number <= until.samples],
        )
        found.MergeFrom(snapshot.common)
        return found

    async def _of_router(
        self, other: Member, request: admin_pb2.OverviewRequest, metadata: Metadata
    ) -> admin_pb2.RouterOverview:
        try:
            answer: admin_pb2.OverviewResponse = await self._stub(other).Overview(
                request, timeout=_OTHER_S, metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            return admin_pb2.RouterOverview(router=str(other.id), problem=error_from_rpc(error).message)
        if len(answer.routers) != 1:
            problem = f"it answered with the overviews of {len(answer.routers)} routers"
            return admin_pb2.RouterOverview(router=str(other.id), problem=problem)
        return answer.routers[0]

    def _others(self) -> list[Member]:
        itself = self._watched.router.id
        routers = [member for member in self._watched.fleet.members() if member.role is Role.ROUTER]
        return [
            member
            for member in routers
            if member.id != itself and member.state in (MemberState.READY, MemberState.DRAINING)
        ][:_MAX_OTHERS]

    def _stub(self, other: Member) -> admin_pb2_grpc.AdminStub:
        channel = self._channels.get(other.address)
        if channel is None:
            channel = self._channels[other.address] = self._connect(other.address)
        return admin_pb2_grpc.AdminStub(channel)

    def _close_departed(self) -> None:
        """Close the channels to routers that are not registered any more, once the calls in flight have ended."""
        registered = {member.address for member in self._watched.fleet.members()}
        for address in self._channels.keys() - registered:
            closing = asyncio.create_task(self._channels.pop(address).close(_OTHER_S), name=f"close {address}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close_channels(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()), *self._closing)

    def _totals(self) -> Totals:
        telemetry = self._watched.telemetry
        outcomes = telemetry.by_labels("tandem_requests_total")
        return Totals(
            at_s=self._wall_clock(),
            num_ended=int(sum(outcomes.values())),
            num_failed=int(sum(count for (outcome,), count in outcomes.items() if outcome not in _NO_FAILURE)),
            num_prompt_tokens=int(telemetry.value("tandem_prompt_tokens_total")),
            num_tokens=int(telemetry.value("tandem_generated_tokens_total")),
            num_live=len(self._watched.live_requests),
            latencies={name: telemetry.observations(metric) for name, metric in _LATENCY_METRICS.items()},
        )

    def _view(self) -> ClusterView:
        watched = self._watched
        return ClusterView(
            members={str(member.id): self._seen(member) for member in watched.fleet.members()},
            target=watched.scaling.target,
            breakers={(str(a), str(b)): str(state) for (a, b), state in watched.pairs.failing().items()},
            registry_age_s=watched.registry_age_s(),
            faults=_faults(watched.telemetry),
        )

    def _compare(self) -> None:
        """Compare the speed of the workers and of the links between them, and publish it."""
        fleet, telemetry = self._watched.fleet, self._watched.telemetry
        peers = [peer for member in fleet.members() if (peer := fleet.peer(member.id)) is not None]
        timed = [(peer.member, peer.service_times) for peer in peers if peer.service_times is not None]
        self._slowdowns = slowdowns(
            {member.id: times for member, times in timed if member.role.decodes},
            {member.id: times for member, times in timed if member.role is Role.PREFILL},
        )
        ratios: dict[tuple[str, ...], float] = {(each.worker.id, each.leg): each.times for each in self._slowdowns}
        telemetry.gauge_all("tandem_worker_slowdown_ratio", ratios)
        slowest = nlargest(_MAX_LINKS, self._links(), key=lambda link: link.times)
        telemetry.gauge_all("tandem_link_slowdown_ratio", {link.labels: link.times for link in slowest})

    def _links(self) -> list[LinkSlowdown]:
        fleet = self._watched.fleet
        links = {member.id: fleet.links(member.id) for member in fleet.members() if member.role.is_worker}
        return link_slowdowns(
            {importer: [speed for speed in speeds if speed.exporter in links] for importer, speeds in links.items()}
        )

    def _slow(self) -> list[str]:
        """Describe the links and the workers that are much slower than usual."""
        compared: list[LinkSlowdown | Slowdown] = [*self._links(), *self._slowdowns]
        return [str(each) for each in compared if each.is_fault]

    def _seen(self, member: Member) -> SeenMember:
        """A failed call alone is no event: the worker answers until it misses the health check that follows."""
        peer = self._watched.fleet.peer(member.id)
        is_answering = peer is not None and peer.stream.connected.is_set() and not peer.num_missed
        answers = is_answering or not member.role.is_worker
        return SeenMember(str(member.role), str(member.state), answers)


def _role(member: admin_pb2.MemberStatus) -> Role:
    return Role(MEMBER_ROLES.label(member.role))


def _faults(telemetry: Telemetry) -> dict[str, int]:
    """Return the faults that counters show."""
    faults: dict[str, int] = {}
    for (outcome,), count in telemetry.by_labels("tandem_requests_total").items():
        if outcome not in _NO_FAILURE:
            faults[f"a request failed: {outcome}"] = int(count)
    for (leg, reason), count in telemetry.by_labels("tandem_retries_total").items():
        faults[f"{leg} was retried: {reason}"] = int(count)
    for (surface,), count in telemetry.by_labels("tandem_stalled_clients_total").items():
        faults[f"a client stopped reading ({surface})"] = int(count)
    for (message,), count in telemetry.by_labels("tandem_malformed_messages_total").items():
        faults[f"a worker sent a malformed message: {message}"] = int(count)
    return faults


def publish_effect(comparison: Comparison, telemetry: Telemetry) -> None:
    """Publish the effect of disaggregation on the time to first token, if it is known."""
    for effect in {comparison.ttft, comparison.predicted_ttft} - {NO_EFFECT}:
        for bound, value in (("mean", effect.mean_s), ("low", effect.low_s), ("high", effect.high_s)):
            telemetry.gauge("tandem_disaggregation_ttft_effect_seconds", value, basis=effect.basis, bound=bound)
        telemetry.gauge("tandem_disaggregation_trials", effect.num_requests, basis=effect.basis)


class MemberStatuses:
    """The statuses of all members."""

    def __init__(self, fleet: Fleet, now_s: Callable[[], float]) -> None:
        """`now_s`: a monotonic clock."""
        self._fleet, self._now_s = fleet, now_s
        self._asked: asyncio.Task[list[admin_pb2.MemberStatus]] | None = None
        self._asked_s = 0.0

    async def fresh(self, timeout_s: float | None = None) -> list[admin_pb2.MemberStatus]:
        """Ask every worker now, for `timeout_s` at most. One that does not answer is listed without figures, with the
        time since it last answered."""
        return await asyncio.gather(*(self._status(member, timeout_s) for member in self._fleet.members()))

    async def recent(self) -> list[admin_pb2.MemberStatus]:
        """Return statuses that are at most a second old. All callers of that time share one question to each worker."""
        now_s = self._now_s()
        if self._asked is None or (self._asked.done() and now_s - self._asked_s >= _RECENT_S):
            self._asked, self._asked_s = asyncio.create_task(self.fresh(_WORKER_TIMEOUT_S)), now_s
        return await asyncio.shield(self._asked)

    async def _status(self, member: Member, timeout_s: float | None) -> admin_pb2.MemberStatus:
        figures: dict[str, float] = {}
        last_seen_s = 0.0
        peer = self._fleet.peer(member.id)
        if peer is not None:
            try:
                async with asyncio.timeout(timeout_s):
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
