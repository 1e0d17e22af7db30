"""The workers as this router sees them now: which of them are registered and answer, and how much work each has.

Each worker has a supervisor, which connects to it, watches it, and fails every call in progress when it is lost. The
registry decides about new work only: a worker is lost when it fails a direct health check or when a newer incarnation
of it registers. While the registry is unreachable, the last known membership holds.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Protocol

import grpc

from cluster.clock import Clock
from cluster.errors import NoWorkers
from cluster.member import Capacity, Member, MemberState, fingerprint_difference
from cluster.messages import LinkSpeed, MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.registry.scale_target import ScaleTarget
from cluster.service_times import ServiceTimes, StepLimit
from cluster.settings.worker_settings import PRIORITY_POLICY
from router.fleet.membership import DeregisteredWorkers, advertised_routers
from router.fleet.peer import Peer
from router.fleet.supervision import Supervisors, WorkerTimeouts
from router.fleet.worker_health import LEFT
from router.fleet.worker_stream import RouterSide
from router.policies.candidates import WorkerLoad
from router.policies.prediction.speeds import Speeds
from router.policies.prediction.work_ahead import DEFAULT_MAX_CHUNK, WorkAhead
from router.running import ChangeSignal, running

_LOG = logging.getLogger("tandem.router.fleet")


class Membership(Protocol):
    """The part of the registry that the fleet needs."""

    def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield a snapshot at once, and another one whenever the membership has changed."""
        ...


class Fleet:
    def __init__(
        self,
        *,
        router: Member,
        membership: Membership,
        connect: Callable[[str], grpc.aio.Channel],
        timeouts: WorkerTimeouts,
        clock: Clock,
        telemetry: Telemetry,
        follow_cache_events: Callable[[Member, grpc.aio.Channel], Coroutine[None, None, None]],
    ) -> None:
        """`follow_cache_events` subscribes to the cache events of one worker, until it is cancelled."""
        self._follow_cache_events = follow_cache_events
        self._router = router
        self._membership = membership
        self._timeouts = timeouts
        self._telemetry = telemetry
        self._has_snapshot = False
        self._members: tuple[Member, ...] = ()
        self._registered: dict[MemberId, Member] = {}  # the workers among them
        self._refused: set[MemberId] = set()
        self._deregistered = DeregisteredWorkers(timeouts.absence_s)
        self._supervisors = Supervisors(connect=connect, is_wanted=self._registered_now)
        self._peers: dict[MemberId, Peer] = {}  # the connected workers
        self._speeds = Speeds()
        self._side = RouterSide(router.id, timeouts, itertools.count(1), self._notify, telemetry, clock)
        self.changes = ChangeSignal()  # set when a worker joins, leaves, becomes suspect or answers again
        self._has_read_long_enough = False  # for `absence_s`
        self._scale_target: ScaleTarget | None = None
        self.has_prefill_pool = False  # there was a prefill worker once: without one, prefill on decode is a fallback

    async def run(self) -> None:
        """Follow the membership until cancelled."""
        try:
            async for members in self._membership.watch():
                self._on_members(members)
        finally:
            await self._supervisors.close()

    @property
    def is_ready(self) -> bool:
        """Return whether a worker could serve a request that arrived now."""
        return any(peer.member.role.decodes and self._may_get_work(peer) for peer in self._peers.values())

    @property
    def ignores_priorities(self) -> bool:
        """Return whether every known worker schedules without priorities; False while none is known."""
        policies = [member.scheduling_policy for role in (Role.PREFILL, Role.DECODE) for member in self._workers(role)]
        return bool(policies) and all(policy not in ("", PRIORITY_POLICY) for policy in policies)

    @property
    def knows_absent_workers(self) -> bool:
        """Return whether `recent_capacities` includes every worker that may be absent for a moment: this router has
        read the registry for `absence_s`, or the scale target has been reached and that many workers are registered.
        """
        return self._has_read_long_enough or self._has_all_targeted_workers()

    def set_scale_target(self, target: ScaleTarget | None) -> None:
        """Record how many workers the process that runs them has started."""
        self._scale_target = target
        self._notify()

    @property
    def is_checking_prefill(self) -> bool:
        """Return whether a registered prefill worker is suspect and its health check has not ended, or its stream is
        connecting.
        """
        prefills = [peer for peer in self._peers.values() if peer.member.role.prefills]
        return any(peer.member.id in self._registered and not peer.is_reachable for peer in prefills)

    async def settle(self, timeout_s: float) -> None:
        """Wait until every worker that was registered at the start is connected, for `timeout_s` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_settled():
                    await self.changed()
        except TimeoutError:
            _LOG.warning("not every registered worker has answered yet")

    async def changed(self) -> None:
        """Wait until a worker joins, leaves, becomes suspect or answers again."""
        await self.changes.wait()

    def prefill_loads(self) -> list[WorkerLoad]:
        """Return the loads of the workers whose role computes prompts."""
        return self._loads(lambda role: role.prefills)

    def decode_loads(self) -> list[WorkerLoad]:
        """Return the loads of the workers whose role decodes."""
        return self._loads(lambda role: role.decodes)

    def available(self) -> list[Member]:
        """Return the workers that may get work now, of both roles."""
        return [peer.member for peer in self._peers.values() if self._may_get_work(peer)]

    def capacities(self, role: Role) -> list[Capacity]:
        """Return the capacities of the workers for a role that do not drain, whether they answer now or not: registered
        workers, and workers whose registration expired but that are still connected. Empty if the capacity of one of
        them is not known."""
        leaving = {peer.member.id for peer in self._peers.values() if peer.is_draining}
        return _known_capacities(
            member
            for member in self._workers(role)
            if member.id not in leaving and member.state is not MemberState.DRAINING
        )

    def recent_capacities(self, role: Role) -> list[Capacity]:
        """Return `capacities`, plus those of workers that drain or left recently: they may be restarting."""
        deregistered = self._deregistered.members(asyncio.get_running_loop().time())
        return _known_capacities([*self._workers(role), *(m for m in deregistered if m.role.does(role))])

    def connected_peer(self, member: MemberId) -> Peer:
        """Return a connected worker. Raises NoWorkers."""
        peer = self._peers.get(member)
        if peer is None:
            raise NoWorkers(f"worker {member} is not connected to this router")
        return peer

    def suspect(self, member: MemberId) -> None:
        """Check the health of this worker now, because another component could not reach it."""
        peer = self.peer(member)
        if peer is not None:
            peer.suspect()

    def mark_draining(self, member: MemberId, grace_s: float) -> None:
        """Record that the worker itself reported its drain. The registry may report it later."""
        peer = self.peer(member)
        if peer is not None:
            peer.mark_draining(grace_s)

    def draining(self) -> list[Peer]:
        """Return the workers that drain. They finish or hand over their sequences until `drain_deadline_s`."""
        return [peer for peer in self._peers.values() if peer.is_draining]

    def members(self) -> tuple[Member, ...]:
        """Return all registered members, routers included."""
        return self._members

    def advertised_routers(self, itself: Member) -> tuple[str, ...]:
        """Return the addresses of routers that a client may use, this router's first."""
        return advertised_routers(itself, self.members())

    def links(self, member: MemberId) -> tuple[LinkSpeed, ...]:
        """Return the measured speeds of a worker's links, from its last heartbeat."""
        peer = self._peers.get(member)
        return peer.stream.links if peer is not None else ()

    def connected(self) -> tuple[MemberId, ...]:
        return tuple(self._peers)

    def peer(self, member: MemberId) -> Peer | None:
        return self._peers.get(member)

    def peer_by_name(self, name: str) -> Peer | None:
        """Return the worker with this id or "id@incarnation"; None if it is not connected."""
        return next((peer for peer in self._peers.values() if name in (peer.member.id.id, str(peer.member.id))), None)

    def _registered_now(self, member: MemberId) -> bool:
        return member in self._registered

    def _may_get_work(self, peer: Peer) -> bool:
        registered = self._registered.get(peer.member.id)
        is_staying = registered is not None and registered.state is MemberState.READY and not peer.is_draining
        return is_staying and peer.is_reachable

    def _loads(self, does_work: Callable[[Role], bool]) -> list[WorkerLoad]:
        """Return the loads of the workers of certain roles that may get work now."""
        now_s, peers = asyncio.get_running_loop().time(), self._peers.values()
        reported = {peer.member.id: times for peer in peers if (times := peer.service_times) is not None}
        believed = self._speeds.believed(reported, now_s)
        return [
            _load(peer, believed.get(peer.member.id), now_s)
            for peer in peers
            if does_work(peer.member.role) and self._may_get_work(peer)
        ]

    def _others(self, member: MemberId) -> list[Peer]:
        """Return all connected workers but one, those first from which this router received messages last."""
        others = (peer for peer in self._peers.values() if peer.member.id != member)
        return sorted(others, key=lambda peer: peer.heard_s, reverse=True)

    def _workers(self, role: Role) -> list[Member]:
        """Return the workers for a role that are registered or connected, and were not refused."""
        members = {peer.member.id: peer.member for peer in self._peers.values()} | self._registered
        return [member for member in members.values() if member.role.does(role) and member.id not in self._refused]

    def _is_settled(self) -> bool:
        connected = [member.id for member in self.available()]
        return self._has_snapshot and all(member in connected for member in self._supervisors)

    def _on_members(self, members: tuple[Member, ...]) -> None:
        self._members = members
        if not self._has_snapshot:
            asyncio.get_running_loop().call_later(self._timeouts.absence_s, self._on_absences_over)
        self._has_snapshot = True
        workers = [member for member in members if member.role.is_worker]
        self._count_changes(workers)
        self._registered = {member.id: member for member in workers}
        self.has_prefill_pool |= any(member.role.prefills for member in workers)
        incarnations = {member.id.id: member.id for member in workers}
        for member_id in self._supervisors:
            if incarnations.get(member_id.id, member_id) != member_id:
                self._supervisors.cancel(member_id)
        for peer in self._peers.values():
            peer.set_registered(self._registered.get(peer.member.id))
        for member in workers:
            if member.id not in self._supervisors and member.state is MemberState.READY and self._accepts(member):
                self._supervise(member)
        self._refused &= set(self._registered)
        served = [member for member in workers if member.id not in self._refused]
        self._deregistered.note(served, asyncio.get_running_loop().time())
        self._count_members()
        self._notify()

    def _accepts(self, member: Member) -> bool:
        """Return whether the worker fits the cluster. A worker of another model, layout or fine-tune would break
        streams that move to it."""
        reason = self._objection(member)
        if reason and member.id not in self._refused:
            self._refused.add(member.id)
            _LOG.warning("the worker is refused", extra={"worker": str(member.id), "reason": reason})
        return not reason

    def _objection(self, member: Member) -> str:
        if member.model != self._router.model:
            return f"it serves {member.model}, this router {self._router.model}"
        if not member.speaks_with(self._router):
            return f"it supports protocol {member.protocol}, this router {self._router.protocol}"
        served = (other for other in self._registered.values() if other.id in self._supervisors)
        stranger = next((other for other in served if not member.speaks_with(other)), None)
        if stranger is not None:
            return f"it supports protocol {member.protocol}, {stranger.role} worker {stranger.id} {stranger.protocol}"
        if member.fingerprint is None:
            return "it has no fingerprint"
        fingerprints = (peer.member.fingerprint for peer in self._peers.values())
        ours = next((fingerprint for fingerprint in fingerprints if fingerprint is not None), None)
        return fingerprint_difference(ours, member.fingerprint) if ours is not None else ""

    def _supervise(self, member: Member) -> None:
        self._supervisors.supervise(member, self._serve)

    async def _serve(self, member: Member, channel: grpc.aio.Channel) -> None:
        """Serve a worker until it is lost, and log the reason."""
        detail = "a newer incarnation of it registered, or this router stops"
        member = self._registered.get(member.id, member)  # its role may have changed while it was being connected
        peer = Peer(member, channel, self._side, lambda: self._others(member.id))
        self._peers[member.id] = peer
        self._notify()
        try:
            async with running(self._follow_cache_events(member, channel)):
                detail = await peer.run()
        finally:
            del self._peers[member.id]
            peer.fail_calls(detail)
            self._notify()
        if peer.is_draining or detail == LEFT:
            _LOG.info("the worker has left", extra={"worker": str(member.id), "detail": detail})
        else:
            fields = {"worker": str(member.id), "detail": detail}
            _LOG.warning("the worker is lost; its requests continue at other workers", extra=fields)

    def _count_changes(self, workers: Sequence[Member]) -> None:
        before = {member.id.id: member for member in self._registered.values()}
        for member in workers:
            known = before.pop(member.id.id, None)
            if known is None or known.id != member.id:
                change = "joined" if known is None else "restarted"
                self._telemetry.count("tandem_member_changes_total", role=member.role, change=change)
        for member in before.values():
            self._telemetry.count("tandem_member_changes_total", role=member.role, change="left")

    def _count_members(self) -> None:
        numbers = Counter((member.role, member.state) for member in self._members)
        for role in Role:
            for state in MemberState:
                number = numbers[role, state]
                self._telemetry.gauge("tandem_members", number, role=role, state=state)

    def _has_all_targeted_workers(self) -> bool:
        target = self._scale_target
        if target is None or not target.follower or target.reached != target.version:
            return False
        # Operators change roles, so the workers of a pool may have any of them.
        return sum(m.state is MemberState.READY for m in self._registered.values()) >= target.num_workers

    def _on_absences_over(self) -> None:
        self._has_read_long_enough = True
        self._notify()

    def _notify(self) -> None:
        self.changes.set()


def _known_capacities(members: Iterable[Member]) -> list[Capacity]:
    """Return the capacities of these members; empty if one of them is not known."""
    capacities = [member.capacity for member in members]
    known = [capacity for capacity in capacities if capacity is not None]
    return known if len(known) == len(capacities) else []


def exporter_load(peer: Peer) -> WorkerLoad:
    """Return the load of a worker that has the request's KV already, for the choice of an importer."""
    engine = peer.member.grammar_engine
    return WorkerLoad(member=peer.member.id, kv_format=peer.kv_format, assigned=0, grammar_engine=engine)


def _load(peer: Peer, times: ServiceTimes | None, now_s: float) -> WorkerLoad:
    stream, capacity = peer.stream, peer.member.capacity
    return WorkerLoad(
        member=peer.member.id,
        kv_format=peer.kv_format,
        assigned=peer.assigned,
        others=peer.backlog.others.num_sequences,
        free_blocks=stream.free_blocks,
        links=stream.links,
        kv_bytes_per_token=capacity.block_bytes / capacity.block_size if capacity is not None else 0.0,
        capacity=capacity,
        full_for_s=peer.backlog.full_for_s(now_s),
        work=_work_ahead(peer, times, now_s) if times is not None else None,
        unmodelled=peer.unmodelled.at(now_s),
        grammar_engine=peer.member.grammar_engine,
        role=peer.member.role,
    )


def _work_ahead(peer: Peer, times: ServiceTimes, now_s: float) -> WorkAhead:
    """Return the facts about a worker for predictions."""
    capacity = peer.member.capacity
    max_chunk = capacity.max_prefill_tokens if capacity is not None else 0
    max_running = capacity.max_num_seqs if capacity is not None else 1 << 30
    return WorkAhead(
        times=times,
        prompts=peer.backlog.queue(now_s),
        batch=peer.stream.batch(peer.backlog.others.sequences, now_s),
        max_chunk=max_chunk or DEFAULT_MAX_CHUNK,
        max_running=max_running,
        step_limit=StepLimit(capacity.slo_tpot_us / 1e6 if capacity is not None else 0.0),
        recent=peer.backlog.recent(times, now_s),
    )
