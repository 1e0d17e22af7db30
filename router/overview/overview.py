"""The overview for operators: `Overview` records the rates and events of this router, and collects the overviews of all
routers. It reads existing state only: counters, live and ended requests, the fleet. Routers ask each other only while a
caller asks one of them. Owns the history, the event log, and the channels to other routers. It also finds the links and
workers that are much slower than the others, which needs three links, or two workers of one leg, and full KV pools.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple, dataclass
from statistics import median_low
from typing import TypeAlias

import grpc

from cluster.clock import Clock
from cluster.errors import NotFound
from cluster.member import Member, MemberState
from cluster.messages import LinkSpeed, MemberId, Role
from cluster.observe.metrics import METRICS
from cluster.observe.telemetry import Telemetry
from cluster.service_times import ServiceTimes, StepWork, TimedStep
from cluster.serving.rpc_errors import error_from_rpc
from router.drain.operator_commands import ScaleTargetView, target_to_wire
from router.fleet.fleet import Fleet
from router.grpc_api.admin_wire import explanation_to_wire
from router.overview.history import SAMPLE_PERIOD_S, ClusterView, EventLog, History, SeenMember, Totals
from router.overview.overview_wire import (
    MemberStatuses,
    breakers_to_wire,
    event_to_wire,
    latencies_to_wire,
    sample_to_wire,
    timelines_to_wire,
)
from router.pipeline.worker_choice import PairHealth
from router.policies.effect import NO_EFFECT, Comparison
from router.request.explanations import MAX_EXPLAINED
from router.request.live_requests import LiveRequests
from tandem.enum_words import MEMBER_ROLES
from tandem.v1 import admin_pb2, admin_pb2_grpc

MAX_LIVE_SHOWN = 30
MAX_ENDED_SHOWN = 200  # to a caller that has seen none
_MAX_NEW_SHOWN = 30  # at each poll: each request shown costs the router 0.14 ms (benchmarks/results/observed.md)
_MAX_OTHERS = 16  # routers
_OTHER_S = 2.0  # for the answer of another router
_VIEW_PERIOD_S = 1.0
_LATENCY_METRICS = {"ttft": "tandem_ttft_seconds", "itl": "tandem_inter_token_seconds", "e2e": "tandem_request_seconds"}
_NO_FAILURE = ("ok", "cancelled")

Metadata: TypeAlias = Sequence[tuple[str, str]]


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
                left_s = SAMPLE_PERIOD_S - self._wall_clock() % SAMPLE_PERIOD_S
                await asyncio.wait((self._watched.fleet.next_change(),), timeout=min(_VIEW_PERIOD_S, left_s))

    async def of_cluster(self, request: admin_pb2.OverviewRequest, metadata: Metadata) -> admin_pb2.OverviewResponse:
        """Return the overview of all routers, this one's first. `metadata` has the caller's API key, for the others.
        A router that does not answer is listed with the reason."""
        if request.only_this_router:
            return admin_pb2.OverviewResponse(routers=[self._of_this_router(request.seen)])
        asked = admin_pb2.OverviewRequest(seen=request.seen, only_this_router=True)
        members, others = await asyncio.gather(
            self.members.recent(),
            asyncio.gather(*(self._of_router(other, asked, metadata) for other in self._others())),
        )
        own = self._of_this_router(request.seen)
        own.slow.extend(full_pools((each.member_id, _role(each), each.figures) for each in members if each.figures))
        target = target_to_wire(self._watched.scaling.target)
        return admin_pb2.OverviewResponse(members=members, target=target, routers=[own, *others])

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

    def _of_this_router(self, seen: Mapping[str, admin_pb2.OverviewPosition]) -> admin_pb2.RouterOverview:
        watched, router, now_s = self._watched, str(self._watched.router.id), self._wall_clock()
        has = seen[router] if router in seen else admin_pb2.OverviewPosition()
        ended, origin_s = watched.live_requests.explanations, now_s - self._clock.now_s()
        return admin_pb2.RouterOverview(
            router=router,
            time_s=now_s,
            position=admin_pb2.OverviewPosition(
                ended=ended.newest, events=self._events.newest, samples=self._history.newest
            ),
            num_live=len(watched.live_requests),
            live=timelines_to_wire(watched.live_requests.explain_oldest(MAX_LIVE_SHOWN), origin_s),
            ended=timelines_to_wire(ended.since(has.ended, _MAX_NEW_SHOWN if has.ended else MAX_ENDED_SHOWN), origin_s),
            events=[event_to_wire(event) for event in self._events.since(has.events)],
            samples=[sample_to_wire(sample) for sample in self._history.since(has.samples)],
            latencies=latencies_to_wire(self._history.bounds_s, self._history.latencies()),
            registry_age_s=watched.registry_age_s(),
            breakers=breakers_to_wire(watched.pairs.failing()),
            slow=self._slow(),
        )

    async def _of_router(
        self, other: Member, request: admin_pb2.OverviewRequest, metadata: Metadata
    ) -> admin_pb2.RouterOverview:
        try:
            answer: admin_pb2.OverviewResponse = await self._stub(other).Overview(
                request, timeout=_OTHER_S, metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            return admin_pb2.RouterOverview(router=str(other.id), problem=error_from_rpc(error).message)
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

    async def _close_channels(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

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

    def _slow(self) -> list[str]:
        """Describe the links and the workers that are much slower than the others."""
        fleet = self._watched.fleet
        workers = [member for member in fleet.members() if member.role.is_worker]
        peers = [(member, peer) for member in workers if (peer := fleet.peer(member.id)) is not None]
        timed = [(member, peer.service_times) for member, peer in peers if peer.service_times is not None]
        return [
            *slow_links({member.id: fleet.links(member.id) for member in workers}),
            *slow_workers(
                {member.id: times for member, times in timed if member.role.decodes},
                {member.id: times for member, times in timed if member.role is Role.PREFILL},
            ),
        ]

    def _seen(self, member: Member) -> SeenMember:
        peer = self._watched.fleet.peer(member.id)
        answers = not member.role.is_worker or (peer is not None and peer.is_reachable)
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


SLOW_LINK, SLOW_WORKER = 3.0, 1.7  # times the median
_LEAST_LINKS, _LEAST_WORKERS = 3, 2
_FULL = 0.95  # of a KV pool's blocks
_PREEMPTIONS = 3  # a minute; deploy/observability/alerts.py has the same bound
_IDLE = ("blocks_free", "blocks_cached")
_READ_BYTES = 1 << 20
_MIN_S = 1e-9


def slow_links(links: Mapping[MemberId, Iterable[LinkSpeed]]) -> Iterator[str]:
    """Describe each link on which a read takes much longer than on the others. `links`: by importer."""
    seconds = {
        (importer, speed.exporter, speed.transport): speed.transfer_s(_READ_BYTES)
        for importer, speeds in links.items()
        for speed in speeds
    }
    if len(seconds) < _LEAST_LINKS:
        return
    usual_s = median_low(seconds.values())
    for (importer, exporter, transport), taken_s in seconds.items():
        if taken_s > SLOW_LINK * usual_s:
            times = taken_s / usual_s
            yield f"{importer.id} reads KV from {exporter.id} by {transport} {times:.1f} times slower than usual"


def slow_workers(decodes: Mapping[MemberId, ServiceTimes], prefills: Mapping[MemberId, ServiceTimes]) -> Iterator[str]:
    """Describe each worker that computes much more slowly than the others of its leg. Workers that have not measured
    enough steps are not compared."""
    decode_steps = {member: (times, times.typical_decode) for member, times in decodes.items()}
    prefill_steps = {member: (times, times.typical_prefill) for member, times in prefills.items()}
    for what, steps in (("decodes", decode_steps), ("prefills", prefill_steps)):
        measured = {member: (times, step) for member, (times, step) in steps.items() if step is not None}
        if len(measured) < _LEAST_WORKERS:
            continue
        for member, own in measured.items():
            times = median_low(_times_slower(*own, *other) for name, other in measured.items() if name != member)
            if times > SLOW_WORKER:
                yield f"{member.id} {what} {times:.1f} times slower than the other workers"


def _times_slower(times: ServiceTimes, step: TimedStep, others: ServiceTimes, others_step: TimedStep) -> float:
    """Return how many times slower a worker is than another one.

    The measured steps give bounds, because more work takes at least as long, and at most in proportion. Between these,
    each measured step is compared with what the other worker predicts for the same work, and the smaller factor counts:
    a prediction may be far off where a worker has not measured such work."""
    measured = step.seconds / others_step.seconds
    least = measured / max(1.0, _times_more(step.work, others_step.work))
    most = measured * max(1.0, _times_more(others_step.work, step.work))
    own_step = step.seconds / max(others.seconds(step.work), _MIN_S)
    return min(max(least, min(own_step, times.seconds(others_step.work) / others_step.seconds)), most)


def _times_more(work: StepWork, others: StepWork) -> float:
    """Return how many times more work a step has than another one of the same kind."""
    pairs: Iterable[tuple[float, float]] = zip(astuple(work), astuple(others), strict=True)
    return max((own / other for own, other in pairs if other), default=1.0)


def full_pools(workers: Iterable[tuple[str, Role, Mapping[str, float]]]) -> Iterator[str]:
    """Describe each KV pool that is full, what it causes, and what to do. `workers`: id, role and figures of each.

    Preemption and the watermark of hand-offs keep blocks free, so a pool whose blocks do not suffice shows it by
    preemptions and waiting hand-offs, whatever part of it is in use."""
    for name, role, figures in workers:
        blocks = {state: number for state, number in figures.items() if state.startswith("blocks_")}
        num_used = sum(blocks.values()) - sum(blocks.get(state, 0.0) for state in _IDLE)
        counts = {
            "preemptions a minute": figures.get("preemptions_last_minute", 0.0),
            "hand-offs wait": figures.get("handoffs_waiting", 0.0),
        }
        preempted, waiting = counts.values()
        if preempted >= _PREEMPTIONS or waiting or num_used > _FULL * sum(blocks.values()):
            found = ", ".join(f"{number:.0f} {what}" for what, number in counts.items() if number)
            advice = _advice(role, is_leased=2 * blocks.get("blocks_leased", 0.0) > num_used)
            yield f"the KV pool of {name} is full ({found or f'{num_used:.0f} blocks in use'}): {advice}"


def _advice(role: Role, *, is_leased: bool) -> str:
    if is_leased:
        return "most of it is leased until decode workers have read it; look at them"
    return "add workers" if role is Role.BOTH else f"add {role} workers"
