"""Runs a schedule: members that are started, disturbed and restarted, and clients that send requests and count
tokens.
"""

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass
from random import Random
from typing import Any

from cluster.auth.keys import ClusterKeys
from cluster.auth.member_channel import MemberChannel
from cluster.errors import DrainIncomplete, Unhealthy
from router.request.live_requests import LiveRequests
from tests.chaos.simulated.machine.calls import member_channel
from tests.chaos.simulated.machine.connections import Connections
from tests.chaos.simulated.machine.disk import Disk
from tests.chaos.simulated.machine.loop import Process, SimulatedLoop, Stuck
from tests.chaos.simulated.machine.machine import inside
from tests.chaos.simulated.machine.network import Network
from tests.chaos.simulated.machine.redis import PLACE, RedisServer
from tests.chaos.simulated.members.clients import Client
from tests.chaos.simulated.members.direct_client import DirectClient
from tests.chaos.simulated.members.key_files import KeyFiles
from tests.chaos.simulated.members.member import STREAM_GRACE_S, Member
from tests.chaos.simulated.members.proofs import Proofs
from tests.chaos.simulated.results.phases import BEGINS, ENDS_WITH, kind_of
from tests.chaos.simulated.schedules.harm import LEAVE_S, Harm
from tests.chaos.simulated.schedules.mishaps import Kind, Mishap, Phase
from tests.chaos.simulated.schedules.mix import Wires
from tests.chaos.simulated.schedules.mutations import Mutations
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, holds
from tests.loopback import Fault, LoopbackNetwork

_CLIENTS_S = 150.0
_IDLE_S = 60.0  # for all workers to become idle after every fault has been undone
_SUPERVISOR_S = 1.0
_HARMLESS = {Fault.DROP: 0.004, Fault.DELAY: 0.01, Fault.DUPLICATE: 0.02, Fault.REORDER: 0.02, Fault.CORRUPT: 0.02}

Happened = tuple[float, str, str]  # time, member, event
Hit = tuple[str, str, str]  # role, kind, phase; no phase: the fault had a time only
Said = tuple[float, str, str, str, Any]  # time, method, sender, receiver, kind


@dataclass(frozen=True, slots=True)
class Result:
    violations: tuple[str, ...]
    happened: tuple[Happened, ...]
    trace: tuple[Said, ...]  # every message of every call
    outcomes: "Counter[str]"
    reached: "Counter[str]"  # see coverage.py
    hit: tuple[Hit, ...]  # mishaps that came while their victim held a request in the named phase
    simulated_s: float
    num_events: int


class World:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.dice, self.ids = Random(f"{schedule.seed} run"), Random(f"{schedule.seed} ids")
        self.loop = SimulatedLoop(self.dice)
        self.network = Network(self.loop, self.dice, latency_s=schedule.latency_s)
        self.connections = Connections(self.network, self.dice, schedule.mix.wires or Wires())
        self.redis = RedisServer(self.network)
        self.key_files = KeyFiles(schedule.mix.rotation, schedule.seed, lambda: self.loop.now_s)
        self.proofs = Proofs(self)
        self.pools, self.owners = LoopbackNetwork(), dict[bytes, Process]()
        self.odds = _HARMLESS if schedule.read_faults else {}
        self.launches = schedule.launches
        self.members: dict[str, Member] = {}  # by place
        self.happened: list[Happened] = []
        self.trace: list[Said] = []
        self.violations: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()  # coverage, by name
        self.hit: list[Hit] = []
        self.live_requests: dict[Process, LiveRequests] = {}  # of each router
        self.disks: dict[str, Disk] = defaultdict(Disk)  # by place
        self._asking: list[asyncio.Task[str]] = []
        self._phases: Counter[Phase] = Counter()
        self._come_to: dict[str, Counter[Phase | None]] = defaultdict(
            Counter
        )  # by place: how often requests reached each phase
        self._partners: dict[str, dict[str, str]] = {}  # by place: its last partner of each role
        self._waiting = [mishap for mishap in schedule.mishaps if mishap.phase is not None]
        self._recovering: list[asyncio.Task[None]] = []
        self._harms = Harm(self)
        self._mutations = Mutations(schedule.mutations)
        self._is_over = False  # no more faults

    def say(self, who: object, what: str) -> None:
        self.happened.append((self.loop.now_s, str(who), what))

    def wrong(self, what: str) -> None:
        self.violations.append(what)
        self.say("harness", f"WRONG: {what}")

    async def run(self) -> None:
        await self._start_all()
        await asyncio.sleep(self.schedule.mix.warm_up_s)
        clients = [Client(self, number, ask) for number, ask in enumerate(self.schedule.asks)]
        tasks = [self.loop.spawn(client.process, client.run(), f"client {client.number}") for client in clients]
        self._asking = tasks
        self.key_files.begin()
        spying = [self.loop.spawn(spy, self.proofs.eavesdrop(), str(spy)) for spy in self.proofs.eavesdroppers]
        direct_clients = [DirectClient(self, number, ask) for number, ask in enumerate(self.schedule.mix.direct_asks)]
        direct = [self.loop.spawn(client.process, client.run(), str(client.process)) for client in direct_clients]
        for mishap in self.schedule.mishaps:
            if mishap.phase is None:
                self.loop.call_later(mishap.at_s, self._strike, mishap, self._place(mishap, {}), 0)
        for flip in self.schedule.mix.flips:
            self._recovering.append(self.loop.create_task(self._harms.flip(flip), name=f"{flip.place} flips"))
        _, late = await asyncio.wait(tasks, timeout=_CLIENTS_S)
        for client, task in zip(clients, tasks, strict=True):
            if task in late:
                self.wrong(f"request {client.number} has no end after {_CLIENTS_S:g} s")
            else:
                self.outcomes[task.result()] += 1
        for task in direct:
            self.reached[f"direct request: {await task}"] += 1
        await asyncio.gather(*spying)
        await self._recover()
        await self._become_idle()
        await self._leave_all()

    def result(self) -> Result:
        for context in self.loop.errors:
            self.violations.append(f"not handled: {context.get('message')} {context.get('exception')!r}")
        return Result(
            violations=tuple(self.violations),
            happened=tuple(self.happened),
            trace=tuple(self.trace),
            outcomes=self.outcomes,
            reached=self.reached,
            hit=tuple(self.hit),
            simulated_s=self.loop.now_s,
            num_events=self.loop.num_run,
        )

    def channel_to(self, member: Member) -> MemberChannel:
        """Return a channel to a member for a client outside of the cluster that has its secret."""
        keys = ClusterKeys(self.key_files.at(member.place))
        return member_channel(self.network, member.address, self.watch, keys)

    def router_addresses(self) -> list[str]:
        return [member.address for member in self.members.values() if member.role == "router"]

    def has_large_decode_worker(self, ask: Ask) -> bool:
        """Return whether a decode worker that can hold the request is present or comes back."""
        return any(
            holds(self.schedule.num_blocks(member.role, member.index), self.schedule.block_size, ask)
            for member in self.members.values()
            if member.role == "decode" and not member.has_left
        )

    def watch(self, method: str, sender: Process, receiver: Process, message: Any) -> Any:
        """Record every message when it is sent, and return the message to send instead."""
        self._note_phase(method, sender, receiver, message)
        if self._is_over or not {sender.place, receiver.place} <= self.members.keys():
            return message
        mutation = self._mutations.of(message)
        if mutation is None:
            return message
        name, what, mutated = mutation
        self.reached[f"malformed: {name}"] += 1
        self.say(sender, f"sends {receiver} a malformed {name}: {what}")
        return mutated

    def _note_phase(self, method: str, sender: Process, receiver: Process, message: Any) -> None:
        kind = kind_of(message)
        self.trace.append((self.loop.now_s, method, sender.place, receiver.place, kind))
        phase = BEGINS.get((method, kind))
        if phase is not None and sender.place != "world":
            if phase is Phase.QUEUED:
                if sender.place not in self.members or not sender.place.startswith("router"):
                    return
                importer = message.importer.partition("@")[0]
                self._partners[receiver.place] = {"router": sender.place, "decode": importer}
                self._partners[importer] = {"router": sender.place, "prefill": receiver.place}
            self._came_to(phase, sender, receiver)

    def _came_to(self, phase: Phase, *processes: Process) -> None:
        number = self._phases[phase]
        self._phases[phase] += 1
        involved = {process.place[:-1]: process.place for process in processes}
        for process in processes:
            involved = self._partners.get(process.place, {}) | involved
        for place in involved.values():
            self._come_to[place][phase] += 1
        for mishap in tuple(self._waiting):
            if mishap.phase is phase and mishap.occurrence == number:
                self._waiting.remove(mishap)
                place, context = self._place(mishap, involved), self.loop.world.context.copy()
                num_past = self._num_past(phase, place) if place in involved.values() else -1
                self.loop.call_later(mishap.at_s, self._strike, mishap, place, num_past, context=context)

    def _num_past(self, phase: Phase, place: str) -> int:
        """Return how often a request at this place has passed the phase."""
        return self._come_to[place][ENDS_WITH[phase]]

    def _place(self, mishap: Mishap, involved: dict[str, str]) -> str:
        if mishap.role == "redis":
            return PLACE
        return involved.get(mishap.role) or f"{mishap.role}{mishap.number}"

    # Faults

    def _strike(self, mishap: Mishap, place: str, num_past: int) -> None:
        """Perform a fault. `num_past`: how often requests at that place had passed the phase when one reached it."""
        if not self._is_over:
            harm = self._harm(mishap, place, num_past)
            self._recovering.append(self.loop.create_task(harm, name=f"{place} {mishap.kind}"))

    def _note_hit(self, mishap: Mishap, place: str, num_past: int) -> None:
        """Record the hit only if no request has passed the phase in the meantime: the victim then still holds the
        intended one."""
        is_met = mishap.phase is None or num_past == self._num_past(mishap.phase, place)
        if is_met and not all(task.done() for task in self._asking):
            self.hit.append((mishap.role, mishap.kind, mishap.phase or ""))

    async def _harm(self, mishap: Mishap, place: str, num_past: int) -> None:
        phase = f" ({mishap.phase})" if mishap.phase is not None else ""
        self.say(place, f"{mishap.kind}{phase}, for {mishap.for_s:g} s")
        if place != PLACE:
            member = self.members[place]
            if not member.process.runs or member.main.done() or member.has_left:
                return  # another fault has ended it
            if mishap.kind is Kind.SUPERSEDED and not member.is_ready:
                return  # two processes start under one name; the one that registers last continues
        self._note_hit(mishap, place, num_past)
        await self._harms.perform(mishap, place)

    # The cluster's life

    def add(self, role: str) -> Member:
        """Start one more member of a role at a new place."""
        index = sum(member.role == role for member in self.members.values())
        member = self.members[f"{role}{index}"] = Member(self, role, index)
        member.start()
        return member

    def kill(self, member: Member) -> None:
        self.loop.kill(member.process)
        self.network.on_dead(member.process)

    async def start_again(self, member: Member) -> None:
        if not member.main.done() and member.process.is_alive:
            return
        if member.process.is_alive:
            self.on_exit(member, may_leave_work=True)
        if not member.has_left:
            member.start()
            await self.until_started(member)

    async def until_started(self, member: Member) -> None:
        """Wait until the member is ready. Without Redis it does not start, and its supervisor tries again, unless
        another fault has started it meanwhile: one name has one supervisor."""
        process = member.process
        while not await member.until_ready() and member.process is process:
            self.kill(member)
            await asyncio.sleep(_SUPERVISOR_S)
            if member.process is not process:
                return
            member.start()
            process = member.process

    async def _start_all(self) -> None:
        shape = self.schedule
        roles = {"prefill": shape.num_prefills, "decode": shape.num_decodes, "router": shape.num_routers}
        for role, number in roles.items():
            for _ in range(number):
                self.add(role)
            for member in self.members.values():
                await member.until_ready()

    async def _recover(self) -> None:
        """Undo every fault."""
        self._waiting.clear()
        self._is_over = True
        while self._recovering:
            await asyncio.wait(self._recovering)
            self._recovering = [task for task in self._recovering if not task.done() or task.result()]
        for member in self.members.values():
            if member.main.done() and member.process.is_alive and not member.has_left:
                self.on_exit(member, is_expected=False)
                member.start()
                await member.until_ready()

    async def _become_idle(self) -> None:
        """Wait until no worker has leased, held, quarantined or running work, and check every account. Pings close a
        connection that fell silent, and only then do calls end that wait to send on it."""
        deadline_s = self.loop.now_s + _IDLE_S
        busy: list[str] = []
        while self.loop.now_s < deadline_s:
            await asyncio.sleep(1.0)
            busy = [text for member in self.members.values() for text in await member.left_over()]
            busy += [f"{end.process} has a silent connection" for end in self.connections.ends if end.is_silent]
            if not busy:
                return
        for text in busy:
            self.wrong(f"left over after {_IDLE_S:g} s: {text}")

    async def _leave_all(self) -> None:
        members = [member for member in self.members.values() if member.process.is_alive]
        for member in members:
            member.stop.set()
        _, late = await asyncio.wait([member.main for member in members], timeout=LEAVE_S)
        for member in members:
            if member.main in late:
                self.wrong(f"{member.process} has not left {LEAVE_S:g} s after it was asked to")
            else:
                self.on_exit(member, may_leave_work=self._may_not_send_all(member))

    def _may_not_send_all(self, member: Member) -> bool:
        """Return whether the drain ended before the worker dropped the stream of a router that had left before."""
        is_short = self.schedule.drain_grace_s < STREAM_GRACE_S
        return is_short and isinstance(member.main.exception(), DrainIncomplete)

    def on_exit(self, member: Member, *, is_expected: bool = True, may_leave_work: bool = False) -> None:
        error = member.main.exception()
        if may_leave_work and isinstance(error, Unhealthy):
            self.say(member.process, f"ends because it is stuck: {error}")
            return
        if may_leave_work and isinstance(error, DrainIncomplete):
            self.say(member.process, f"leaves work behind: {error}")
            error = None
        if error is not None or not is_expected:
            self.wrong(f"{member.process} ended by itself: {error!r}")
        left = [task.get_name() for task in member.process.unfinished]
        if left and error is None:
            self.wrong(f"{member.process} has left tasks behind: {', '.join(left)}")
        self.kill(member)


def run_schedule(schedule: Schedule) -> Result:
    """Run one schedule. Call it inside `simulated_machine`."""
    world = World(schedule)
    loop = world.loop
    with inside(world):
        asyncio.set_event_loop(loop)
        try:
            world.loop.world.context.copy().run(loop.run_until_complete, world.run())
        except Stuck as error:
            world.wrong(str(error))
        except Exception as error:  # noqa: BLE001 -- any exception is a finding
            world.wrong(f"the harness itself: {error!r}")
        finally:
            asyncio.set_event_loop(None)
            result = world.result()
            loop.close()
            asyncio.tasks._all_tasks.clear()  # type: ignore[attr-defined]  # hashes restart with every world
    return result
