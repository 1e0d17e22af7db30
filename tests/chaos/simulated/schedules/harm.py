"""Faults and operations in a simulated cluster: each is performed, lasts its time, and is undone.

Owns nothing; members, network and Redis belong to the world. `perform` returns when the fault is over and the ended
process has been restarted.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import grpc

from cluster.errors import Fenced, RegistryUnavailable
from tandem.enum_words import MEMBER_ROLES
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tandem.v1 import admin_pb2, admin_pb2_grpc
from tests.chaos.simulated.machine.calls import Channel
from tests.chaos.simulated.machine.connections import End
from tests.chaos.simulated.machine.redis import PLACE
from tests.chaos.simulated.members.member import Member
from tests.chaos.simulated.members.tenants import AS_OPERATOR
from tests.chaos.simulated.schedules.mishaps import NUM_REFUSALS, Kind, Mishap
from tests.chaos.simulated.schedules.mix import Flip

if TYPE_CHECKING:
    from tests.chaos.simulated.world import World

LEAVE_S = 40.0
_STUCK_S = 30.0  # for a worker whose step hangs to go on, or to end because of it


class Harm:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._network = world.network
        self._by_kind: dict[Kind, Callable[[Member, Mishap], Awaitable[None]]] = {
            Kind.KILL: self._kill,
            Kind.STOP: self._stop,
            Kind.DRAIN: self._drain,
            Kind.CUT: lambda member, mishap: self._cut(frozenset({member.place}), mishap.for_s),
            Kind.RESET: self._reset,
            Kind.CLOCK: self._set_clock,
            Kind.MEMORY: self._refuse_memory,
            Kind.FULL: self._fill_disk,
            Kind.PAIR: self._cut_pair,
            Kind.SUPERSEDED: self._supersede,
            Kind.RAISE: self._fail_step,
            Kind.HANG: self._hang_step,
            Kind.UNREADABLE: self._fail_reads,
            Kind.MOVE: self._move,
            Kind.JOIN: self._join,
            Kind.LEAVE: self._leave,
            Kind.TORN: self._tear,
            Kind.SILENT: self._silence,
            Kind.DEAF: self._deafen,
        }

    async def perform(self, mishap: Mishap, place: str) -> None:
        if place == PLACE:
            await self._harm_redis(mishap)
        else:
            await self._by_kind[mishap.kind](self._world.members[place], mishap)

    async def _kill(self, member: Member, mishap: Mishap) -> None:
        self._world.kill(member)
        await asyncio.sleep(mishap.for_s)
        await self._world.start_again(member)

    async def _stop(self, member: Member, mishap: Mishap) -> None:
        process = member.process
        self._world.loop.stop_process(process)
        self._network.on_stopped(process)
        await asyncio.sleep(mishap.for_s)
        if process.is_alive:
            self._world.say(member.place, "is woken")
            self._world.loop.wake(process)
            self._network.on_change()

    async def _drain(self, member: Member, mishap: Mishap) -> None:
        member.stop.set()
        await asyncio.wait([member.main], timeout=LEAVE_S)
        await asyncio.sleep(mishap.for_s)
        await self._world.start_again(member)

    async def _leave(self, member: Member, mishap: Mishap) -> None:
        """Remove a member permanently, unless it is the last one of its role."""
        stay = [other for other in self._world.members.values() if other.role == member.role and not other.has_left]
        if len(stay) == 1:
            await self._drain(member, mishap)
            return
        member.has_left = True
        member.stop.set()
        await asyncio.wait([member.main], timeout=LEAVE_S)
        if member.process.is_alive:
            self._world.on_exit(member, may_leave_work=True)

    async def _join(self, member: Member, mishap: Mishap) -> None:
        """Add a member. The named member stays as it is."""
        await self._world.until_started(self._world.add(member.role))

    async def flip(self, flip: Flip) -> None:
        """Give a worker another role through a router, as an operator does, and later its first role again. A process
        that was restarted meanwhile has its first role already."""
        await asyncio.sleep(flip.at_s)
        member = self._world.members[flip.place]
        process, request = member.process, admin_pb2.SetRoleRequest(member_id=flip.place)
        request.role = MEMBER_ROLES.number(flip.role)
        for asked in [other for other in self._world.members.values() if other.role == "router"]:
            channel = Channel(self._world.network, asked.address, self._world.watch)
            try:
                await admin_pb2_grpc.AdminStub(channel).SetRole(request, timeout=5.0, metadata=AS_OPERATOR)
            except grpc.aio.AioRpcError as error:
                self._world.reached[f"flip: {error.code().name.lower()}"] += 1
            else:
                self._world.reached["flip: ok"] += 1
                break
        await asyncio.sleep(flip.for_s)
        first = worker_pb2.SetRoleRequest(role=MEMBER_ROLES.number(self._first_role(member)))
        while member.process is process and process.is_alive and not member.main.done() and not member.stop.is_set():
            trusted = self._world.channel_to(member)
            try:
                await worker_pb2_grpc.WorkerStub(trusted).SetRole(first, timeout=5.0)
                return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.2)

    def _first_role(self, member: Member) -> str:
        return self._world.schedule.mix.first_role(member.place, member.role)

    async def _reset(self, member: Member, mishap: Mishap) -> None:
        for other in self._world.members:
            self._network.reset(frozenset({member.place, other}))

    async def _set_clock(self, member: Member, mishap: Mishap) -> None:
        process = member.process
        process.clock_ahead_s = mishap.jump_s
        await asyncio.sleep(mishap.for_s)
        process.clock_ahead_s = 0.0

    async def _refuse_memory(self, member: Member, mishap: Mishap) -> None:
        """Let large allocations of a process fail once it is ready: a process that starts without memory would end and
        be started again.
        """
        process = member.process
        if not await member.until_ready():
            return
        process.num_refusals = NUM_REFUSALS
        await asyncio.sleep(mishap.for_s)
        process.num_refusals = 0
        await self._world.start_again(member)

    async def _fill_disk(self, member: Member, mishap: Mishap) -> None:
        disk = self._world.disks[member.place]
        disk.is_full = True
        await asyncio.sleep(mishap.for_s)
        disk.is_full = False

    async def _cut_pair(self, member: Member, mishap: Mishap) -> None:
        others = [other for other in self._world.members.values() if other.place != member.place]
        importers = [other for other in others if {member.role, other.role} == {"prefill", "decode"}]
        other = self._world.dice.choice([*others, *importers, *importers])
        await self._cut(frozenset({member.place, other.place}), mishap.for_s)

    async def _fail_step(self, member: Member, mishap: Mishap) -> None:
        member.process.fails_in_step = True

    async def _hang_step(self, member: Member, mishap: Mishap) -> None:
        """Make the step hang when it begins, which may be much later. A worker that computes nothing does not hang."""
        process = member.process
        process.hangs_in_step_s, process.hangs = mishap.for_s, asyncio.Event()
        begins = asyncio.create_task(process.hangs.wait())
        await asyncio.wait([member.main, begins], timeout=_STUCK_S, return_when=asyncio.FIRST_COMPLETED)
        begins.cancel()
        process.hangs_in_step_s = 0.0
        if process.hangs.is_set():
            await asyncio.wait([member.main], timeout=_STUCK_S)
        await self._world.start_again(member)

    async def _fail_reads(self, member: Member, mishap: Mishap) -> None:
        process = member.process
        process.fails_reads = True
        await asyncio.sleep(mishap.for_s)
        process.fails_reads = False

    async def _supersede(self, member: Member, mishap: Mishap) -> None:
        """Start a process under the name of another one, which must end by itself when it is woken."""
        world, former, main, leaves = self._world, member.process, member.main, member.stop
        world.loop.stop_process(former)
        self._network.on_stopped(former)
        member.start(elsewhere=True)
        await world.until_started(member)
        await asyncio.sleep(mishap.for_s)
        if main.done() or not former.is_alive:
            return
        world.say(former, "is woken")
        world.loop.wake(former)
        self._network.on_change()
        await asyncio.wait([main], timeout=LEAVE_S)
        may_go_on = member.stop.is_set()  # its successor left in the meantime, and the name is free again
        if main.done():
            is_right = leaves.is_set() or isinstance(main.exception(), Fenced | RegistryUnavailable)
        else:
            is_right = may_go_on
        if not is_right:
            world.wrong(f"{former} goes on though another has its name: {main!r}")
        world.say(former, "ends")
        world.loop.kill(former)
        self._network.on_dead(former)

    async def _move(self, member: Member, mishap: Mishap) -> None:
        world = self._world
        for asked in [other for other in world.members.values() if other.role == "router"]:
            channel = Channel(self._network, asked.address, world.watch)
            request = admin_pb2.MigrateRequest(source=member.place, max_sequences=8)
            try:
                answer = await admin_pb2_grpc.AdminStub(channel).Migrate(request, timeout=20.0, metadata=AS_OPERATOR)
                world.say(member.place, f"has handed {answer.num_moved} of {asked.place} on, kept {answer.num_kept}")
            except grpc.aio.AioRpcError as error:
                world.say(member.place, f"hands nothing on: {error.details()}")

    async def _tear(self, member: Member, mishap: Mishap) -> None:
        for end in self._ends(member, mishap):
            self._world.dice.choice((end, end.peer)).incoming.die_after(mishap.after_bytes)

    async def _silence(self, member: Member, mishap: Mishap) -> None:
        for end in self._ends(member, mishap):
            end.connection.is_silent = True

    async def _deafen(self, member: Member, mishap: Mishap) -> None:
        ends = self._ends(member, mishap)
        for end in ends:
            end.is_deaf = True
        await asyncio.sleep(mishap.for_s)
        for end in ends:
            self._world.loop.call_soon(end.listen_again, context=end.process.context)

    def _ends(self, member: Member, mishap: Mishap) -> list[End]:
        """Return the member's ends of all of its connections, or of one."""
        every = self._world.connections.ends
        ends = [end for end in every if end.process is member.process and not end.is_over]
        if ends and self._world.dice.random() < 0.5:
            ends = [self._world.dice.choice(ends)]
        self._world.reached[f"connections: {mishap.kind.name.lower()}"] += len(ends)
        return ends

    async def _harm_redis(self, mishap: Mishap) -> None:
        redis = self._world.redis
        match mishap.kind:
            case Kind.KILL:
                redis.kill()
                await asyncio.sleep(mishap.for_s)
                redis.start()
                self._world.say(PLACE, "is back, empty")
            case Kind.EMPTY:
                redis.empty()
            case Kind.CUT | Kind.STOP:  # either way it is silent, its keys lapse, and what was asked is answered late
                await self._cut(frozenset({PLACE}), mishap.for_s)

    async def _cut(self, ends: frozenset[str], for_s: float) -> None:
        self._network.cut(ends)
        await asyncio.sleep(for_s)
        self._network.heal(ends)
        self._world.say(" and ".join(sorted(ends)), "is reached again")
