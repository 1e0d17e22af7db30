"""The workers as this router sees them now: who is registered, who answers, and how much each has to do.

Each has a supervisor, which connects, watches, and when the worker is lost tells every call in progress. What the
registry says decides about new work only; a worker counts as lost when it fails a direct check or a newer incarnation
of it registers. While the registry is gone the last known membership holds.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Protocol, TypeVar

import grpc

from cluster.errors import NoWorkers, Overloaded
from cluster.member import Capacity, Member, MemberState, fingerprint_difference
from cluster.messages import MemberId, PairFigure, Role
from cluster.observe.telemetry import Telemetry
from cluster.request_size import RequestSize, decode_shortage, prefill_shortage
from router.fleet.decode_peer import DecodePeer
from router.fleet.decode_stream import DecodeStream
from router.fleet.departed_workers import DepartedWorkers
from router.fleet.patience import Patience
from router.fleet.peer import Peer
from router.fleet.prefill_peer import PrefillPeer
from router.fleet.supervision import Supervisors
from router.policies.admission import early_refusal
from router.policies.placement import WorkerLoad
from router.running import running
from tandem.v1 import worker_pb2_grpc

_LOG = logging.getLogger("tandem.router.fleet")

_AnyPeer = TypeVar("_AnyPeer", bound=Peer)


class Membership(Protocol):
    """The registry, as far as the fleet needs it."""

    def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """A snapshot at once, and another whenever one differs."""
        ...


class Fleet:
    def __init__(
        self,
        *,
        router: Member,
        membership: Membership,
        connect: Callable[[str], grpc.aio.Channel],
        patience: Patience,
        telemetry: Telemetry,
        follow_prefixes: Callable[[Member, grpc.aio.Channel], Coroutine[None, None, None]],
    ) -> None:
        """`follow_prefixes` learns what a prefill worker has cached, as long as it is served."""
        self._follow_prefixes = follow_prefixes
        self._router = router
        self._membership = membership
        self._patience = patience
        self._telemetry = telemetry
        self._has_snapshot = False
        self._members: tuple[Member, ...] = ()
        self._registered: dict[MemberId, Member] = {}  # the workers among them
        self._refused: set[MemberId] = set()
        self._departed = DepartedWorkers()
        self._supervisors = Supervisors(connect=connect, is_wanted=self._registered_now)
        self._prefills: dict[MemberId, PrefillPeer] = {}
        self._decodes: dict[MemberId, DecodePeer] = {}
        self._handles = itertools.count(1)
        self._changed = asyncio.Event()
        self.has_prefill_pool = False  # there was a prefill worker once: without one, prefill on decode is a fallback

    async def run(self) -> None:
        """Follows the membership until cancelled."""
        try:
            async for members in self._membership.watch():
                self._on_members(members)
        finally:
            await self._supervisors.close()

    @property
    def is_ready(self) -> bool:
        """A request that came now would find a worker."""
        return bool(self.decode_loads())

    @property
    def is_checking_prefill(self) -> bool:
        """A registered prefill worker failed, and whether it still answers is being found out."""
        return any(not peer.trusted and peer.member.id in self._registered for peer in self._prefills.values())

    async def settle(self, timeout_s: float) -> None:
        """Waits until every worker that was there at the start is connected; one that does not answer is not waited
        for longer than this."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_settled():
                    await self.changed()
        except TimeoutError:
            _LOG.warning("not every registered worker answers yet")

    async def changed(self) -> None:
        """Waits until somebody came, went, is suspect, or is trusted again."""
        await self._changed.wait()

    def prefill_loads(self) -> list[WorkerLoad]:
        return [
            WorkerLoad(
                member=peer.member.id,
                pairing=peer.pairing,
                assigned=peer.assigned,
                capacity=peer.member.capacity,
            )
            for peer in self._prefills.values()
            if self._may_get_work(peer)
        ]

    def decode_loads(self) -> list[WorkerLoad]:
        return [
            WorkerLoad(
                member=peer.member.id,
                pairing=peer.pairing,
                assigned=peer.stream.num_sequences,
                waiting=peer.stream.heartbeat.waiting,
                running=peer.stream.heartbeat.running,
                free_blocks=peer.stream.heartbeat.free_blocks,
                pairs=peer.stream.pairs,
                kv_bytes_per_token=_kv_bytes_per_token(peer.member),
                capacity=peer.member.capacity,
            )
            for peer in self._decodes.values()
            if self._may_get_work(peer) and peer.stream.connected.is_set()
        ]

    def capacities(self, role: Role) -> list[Capacity]:
        """Of the workers of a pool that are not leaving, whether they answer now or not: those that are registered, and
        those whose registration lapsed and that are connected still. Empty where one of them has not registered its
        capacity."""
        leaving = {peer.member.id for peer in self._peers() if peer.leaves_at_s is not None}
        return _known_capacities(
            member
            for member in self._workers(role)
            if member.id not in leaving and member.state is not MemberState.DRAINING
        )

    def recent_capacities(self, role: Role) -> list[Capacity]:
        """As `capacities`, with workers that are leaving, and those that left lately: they may be restarting."""
        departed = self._departed.members(asyncio.get_running_loop().time())
        return _known_capacities([*self._workers(role), *(m for m in departed if m.role is role)])

    def early_refusal(self, size: RequestSize, time_left_s: float) -> Overloaded | None:
        """Why a request that came now would be served too late, or not at all, by those that take work and can hold
        it."""
        now_s = asyncio.get_running_loop().time()
        prefills, decodes = (
            [
                peer.backlog.ahead(now_s)
                for peer in peers.values()
                if self._may_get_work(peer) and not (peer.member.capacity and shortage(peer.member.capacity, size))
            ]
            for peers, shortage in ((self._prefills, prefill_shortage), (self._decodes, decode_shortage))
        )
        return early_refusal(prefills, decodes, time_left_s)

    def prefill(self, member: MemberId) -> PrefillPeer:
        """Raises NoWorkers."""
        return _present(self._prefills, member)

    def decode(self, member: MemberId) -> DecodePeer:
        """Raises NoWorkers."""
        return _present(self._decodes, member)

    def doubt(self, member: MemberId) -> None:
        """Somebody else could not reach it."""
        peer = self.peer(member)
        if peer is not None:
            peer.doubt()

    def leave(self, member: MemberId, grace_s: float) -> None:
        """It said itself that it is leaving: the registry's word may come later."""
        peer = self.peer(member)
        if peer is not None:
            peer.leave(grace_s)

    def leaving(self) -> list[DecodePeer]:
        """Decode workers that end, or hand on, what they have: `leaves_at_s` says until when."""
        return [peer for peer in self._decodes.values() if peer.leaves_at_s is not None]

    def members(self) -> tuple[Member, ...]:
        """Routers too."""
        return self._members

    def pairs(self, member: MemberId) -> tuple[PairFigure, ...]:
        """How fast a decode worker's hand-offs are, as it said last."""
        peer = self._decodes.get(member)
        return peer.stream.pairs if peer is not None else ()

    def connected(self) -> tuple[MemberId, ...]:
        return (*self._prefills, *self._decodes)

    def peer(self, member: MemberId) -> Peer | None:
        return self._prefills.get(member) or self._decodes.get(member)

    def peer_by_name(self, name: str) -> Peer | None:
        """By id, or "id@incarnation"."""
        return next((peer for peer in self._peers() if name in (peer.member.id.id, str(peer.member.id))), None)

    def _registered_now(self, member: MemberId) -> bool:
        return member in self._registered

    def _may_get_work(self, peer: Peer) -> bool:
        registered = self._registered.get(peer.member.id)
        is_there = peer.trusted and peer.leaves_at_s is None
        return is_there and registered is not None and registered.state is MemberState.READY

    def _peers(self) -> list[Peer]:
        return [*self._prefills.values(), *self._decodes.values()]

    def _workers(self, role: Role) -> list[Member]:
        """Those of a pool that are registered or connected, and were not refused."""
        members = {peer.member.id: peer.member for peer in self._peers()} | self._registered
        return [member for member in members.values() if member.role is role and member.id not in self._refused]

    def _is_settled(self) -> bool:
        connected = [load.member for load in (*self.prefill_loads(), *self.decode_loads())]
        return self._has_snapshot and all(member in connected for member in self._supervisors)

    def _on_members(self, members: tuple[Member, ...]) -> None:
        self._members = members
        self._has_snapshot = True
        workers = [member for member in members if member.role is not Role.ROUTER]
        self._registered = {member.id: member for member in workers}
        incarnations = {member.id.id: member.id for member in workers}
        for member_id in self._supervisors:
            if incarnations.get(member_id.id, member_id) != member_id:
                self._supervisors.cancel(member_id)
        for peer in (*self._prefills.values(), *self._decodes.values()):
            peer.set_registered(peer.member.id in self._registered)
        for member in workers:
            if member.id not in self._supervisors and member.state is MemberState.READY and self._accepts(member):
                self._supervise(member)
        self._refused &= set(self._registered)
        served = [member for member in workers if member.id not in self._refused]
        self._departed.note(served, asyncio.get_running_loop().time())
        self._count_members()
        self._notify()

    def _accepts(self, member: Member) -> bool:
        """A worker of another model, layout or fine-tune would break streams that move to it."""
        reason = self._objection(member)
        if reason and member.id not in self._refused:
            self._refused.add(member.id)
            _LOG.warning("worker refused", extra={"worker": str(member.id), "reason": reason})
        return not reason

    def _objection(self, member: Member) -> str:
        if member.model != self._router.model:
            return f"it serves {member.model}, this router {self._router.model}"
        if not member.speaks_with(self._router):
            return f"it speaks protocol {member.protocol}, this router {self._router.protocol}"
        served = (other for other in self._registered.values() if other.id in self._supervisors)
        stranger = next((other for other in served if not member.speaks_with(other)), None)
        if stranger is not None:
            return f"it speaks protocol {member.protocol}, {stranger.role} worker {stranger.id} {stranger.protocol}"
        if member.fingerprint is None:
            return "it has no fingerprint"
        ours = next((peer.member.fingerprint for peer in self._peers() if peer.member.fingerprint is not None), None)
        return fingerprint_difference(ours, member.fingerprint) if ours is not None else ""

    def _supervise(self, member: Member) -> None:
        self.has_prefill_pool |= member.role is Role.PREFILL
        serve = self._serve_prefill if member.role is Role.PREFILL else self._serve_decode
        self._supervisors.supervise(member, serve)

    async def _serve_prefill(self, member: Member, channel: grpc.aio.Channel) -> str:
        peer = PrefillPeer(
            member,
            channel,
            patience=self._patience,
            on_change=self._notify,
            telemetry=self._telemetry,
        )
        async with running(self._follow_prefixes(member, channel)):
            return await self._serve(peer, self._prefills)

    async def _serve_decode(self, member: Member, channel: grpc.aio.Channel) -> str:
        stream = DecodeStream(
            router=self._router.id,
            member=member,
            stub=worker_pb2_grpc.DecodeWorkerStub(channel),
            patience=self._patience,
            handles=self._handles,
            on_change=self._notify,
            on_leaving=lambda grace_s: self.leave(member.id, grace_s),
            telemetry=self._telemetry,
        )
        peer = DecodePeer(
            member, channel, stream, patience=self._patience, on_change=self._notify, telemetry=self._telemetry
        )
        return await self._serve(peer, self._decodes)

    async def _serve(self, peer: _AnyPeer, peers: dict[MemberId, _AnyPeer]) -> str:
        """Until it is lost; why."""
        detail = "a newer incarnation of it registered, or this router stops"
        peers[peer.member.id] = peer
        self._notify()
        try:
            detail = await peer.run()
        finally:
            del peers[peer.member.id]
            peer.lose(detail)
            self._notify()
        return detail

    def _count_members(self) -> None:
        for role in (Role.PREFILL, Role.DECODE):
            for state in MemberState:
                number = sum(m.role is role and m.state is state for m in self._registered.values())
                self._telemetry.gauge("tandem_members", number, role=role, state=state)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _known_capacities(members: Iterable[Member]) -> list[Capacity]:
    """Empty where one is not known."""
    capacities = [member.capacity for member in members]
    known = [capacity for capacity in capacities if capacity is not None]
    return known if len(known) == len(capacities) else []


def _kv_bytes_per_token(member: Member) -> float:
    return member.capacity.block_bytes / member.capacity.block_size if member.capacity is not None else 0.0


def _present(peers: Mapping[MemberId, _AnyPeer], member: MemberId) -> _AnyPeer:
    peer = peers.get(member)
    if peer is None:
        raise NoWorkers(f"worker {member} is not connected to this router")
    return peer
