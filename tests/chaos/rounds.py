"""Runs one round: load, a victim in the right phase, the fault, recovery, and the check for leaks."""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tests.chaos.accounts import Account, ProcessBook, workers_account
from tests.chaos.asking import Asked, Outcome, Way
from tests.chaos.blows import strike
from tests.chaos.load import Load
from tests.chaos.meeting import Meeting, Met, Victim
from tests.chaos.members import FAR_MEMBER, ChaosCluster
from tests.chaos.plan import GOALS_S, Kind, Round
from tests.chaos.views import Views

_BEFORE_S = 0.3  # the load runs for this time before a victim is searched
_LOG_LINES = 12
# A client that knows one router only may lose its stream with that router, and by nothing else.
_REFUSED = "this router is draining"  # before it began; who asks by a load balancer is sent elsewhere by readiness
_ENDS_STREAMS = (Kind.SIGKILL, Kind.SIGSTOP, Kind.MEMORY_PRESSURE)


@dataclass(frozen=True, slots=True)
class RoundResult:
    number: int
    fault: str
    victim: str
    is_covered: bool  # the victim held a request in that phase
    note: str
    num_tries: int
    seconds: float
    requests: int
    affected: int
    lost: int
    repeated: int
    missing: int
    mismatches: int
    own_streams: tuple[str, ...]  # that ended with the router that they alone knew, and how
    leaked_blocks: int
    recovery_s: tuple[float, ...]  # of each affected one that can go on: the longest wait for a token from the fault on
    handover_s: tuple[float, ...]  # of those whose ledger is known: without the queues and computing of workers
    slow: tuple[str, ...]  # those of them beyond the goal, and where their time went
    wrong: tuple[str, ...]
    account: Account
    logs: dict[str, list[str]] = field(default_factory=dict)  # of a round that went wrong

    @property
    def is_right(self) -> bool:
        return not self.wrong


@dataclass
class Course:
    """The course of a round. Times are the loop's."""

    round: Round
    victim: Victim
    met: Met | None = None
    num_tries: int = 0
    note: str = ""
    seconds: float = 0.0
    ended: list[Asked] = field(default_factory=list)
    hit: list[Asked] = field(default_factory=list)


class Rounds:
    def __init__(self, chaos: ChaosCluster, load: Load, tell: Callable[[str], None]) -> None:
        self._chaos, self._load, self._tell = chaos, load, tell
        self.book = ProcessBook()

    async def run(self, one: Round) -> RoundResult:
        """Run one round. Raises TimeoutError or RuntimeError if the cluster does not recover."""
        began_s = asyncio.get_running_loop().time()
        marks = {name: (member.incarnation, len(member.output)) for name, member in self._chaos.members.items()}
        course = Course(one, _victim(one))
        await self._load.open(self._chaos.router_addresses())
        views = self._views()
        meeting = Meeting(self._chaos, self._load, views, course.victim)
        try:
            await self._harm(course, meeting)
            course.ended = await self._load.rest()
            await self._chaos.until_whole()
        finally:
            meeting.let_go()
            await views.close()
        account = await self._account()
        course.seconds = asyncio.get_running_loop().time() - began_s
        result = judged(course, account)
        if not result.is_right:
            self._tell_logs(result, marks)
        return result

    async def _harm(self, course: Course, meeting: Meeting) -> None:
        """Perform the fault. Returns when it is over and the ended processes are gone."""
        one, load = course.round, self._load
        load.go_on(one.seed)
        await asyncio.sleep(_BEFORE_S)
        met = course.met = await self._met(one, meeting)
        course.num_tries = meeting.num_tries
        if met is None:
            return
        if course.victim.role == "router":
            load.open_routers = tuple(name for name in load.open_routers if name != course.victim.name)

        def struck() -> None:
            course.hit = load.hit(met.held, asyncio.get_running_loop().time())
            meeting.let_helpers_go()

        course.note = await strike(self._chaos, one, course.victim.name, struck)
        await load.until_ended(course.hit)

    async def _met(self, one: Round, meeting: Meeting) -> Met | None:
        if one.fault.phase is not None:
            return await meeting.meet(one.fault.phase)
        try:
            return await meeting.any_work()
        except TimeoutError:
            return None

    async def _account(self) -> Account:
        views = self._views()
        workers = self._chaos.living("prefill") + self._chaos.living("decode")
        try:
            leaked, violations, free_after_s = await workers_account(views, workers)
        finally:
            await views.close()
        uses, remains = self.book.look({name: self._chaos.pid(name) for name in self._chaos.living()})
        return Account(leaked, violations, remains, round(free_after_s, 2), uses)

    def _views(self) -> Views:
        return Views({name: self._chaos.cluster.channel(name) for name in self._chaos.members})

    def _tell_logs(self, result: RoundResult, marks: dict[str, tuple[str, int]]) -> None:
        """Print the members' output since the round began."""
        for name, member in self._chaos.members.items():
            incarnation, length = marks.get(name, ("", 0))
            begin = length if incarnation == member.incarnation else 0
            said = [line.rstrip() for line in member.output[begin:] if " INFO " not in line][-_LOG_LINES:]
            if said:
                result.logs[name] = said
                self._tell(f"  {name} said:\n" + "\n".join(f"    {line[:400]}" for line in said))


def _victim(one: Round) -> Victim:
    match one.fault.kind:
        case Kind.LINK_CUT:
            return Victim("decode", FAR_MEMBER)
        case Kind.DISK_FULL:
            return Victim("prefill", f"prefill{one.victim}")
    return Victim(one.fault.role, f"{one.fault.role}{one.victim}" if one.fault.role else "redis")


def judged(course: Course, account: Account) -> RoundResult:
    """Return the findings of the round."""
    own = [asked for asked in course.ended if course.met is not None and _went_with_its_router(asked, course)]
    others = [asked for asked in course.ended if asked not in own]
    hit = [asked for asked in course.hit if asked not in own]
    able = [asked for asked in hit if not _stays_with_its_router(asked, course)]
    counts = {outcome: sum(asked.outcome is outcome for asked in others) for outcome in Outcome}
    return RoundResult(
        number=course.round.number,
        fault=course.round.fault.name,
        victim=course.victim.name,
        is_covered=course.met is not None,
        note=course.note,
        num_tries=course.num_tries,
        seconds=round(course.seconds, 2),
        requests=len(others),
        affected=len(hit),
        lost=counts[Outcome.LOST],
        repeated=counts[Outcome.REPEATED],
        missing=counts[Outcome.MISSING],
        mismatches=counts[Outcome.MISMATCH],
        own_streams=tuple(f"{asked.way}: {asked.told}" for asked in own),
        leaked_blocks=sum(sum(left.values()) for left in account.leaked.values()),
        recovery_s=tuple(round(asked.wait_s, 3) for asked in able),
        handover_s=tuple(round(asked.handover_s, 3) for asked in able if asked.handover_s is not None),
        slow=tuple(asked.course() for asked in able if (asked.handover_s or 0.0) > _goal_s(course)),
        wrong=tuple(_wrong(course, others, account)),
        account=account,
    )


def _goal_s(course: Course) -> float:
    return GOALS_S.get(course.round.fault.kind, math.inf)


def _wrong(course: Course, judged: Iterable[Asked], account: Account) -> Iterator[str]:
    for asked in judged:
        if asked.outcome is not Outcome.OK:
            yield f"{asked.way} to {asked.router}, question {asked.question.number}: {asked.outcome}: {asked.told}"
    for name, left in account.leaked.items():
        yield f"{name} still has {left}"
    for name, violation in account.violations.items():
        yield f"{name}: {violation}"
    yield from account.remains
    if course.round.fault.kind is Kind.SIGTERM and course.met is not None and course.note != "exit status 0":
        yield f"{course.victim.name} was asked to leave: {course.note}"


def _stays_with_its_router(asked: Asked, course: Course) -> bool:
    """Return whether the client knows no other router and waits until this one is woken."""
    is_its_own = course.victim.role == "router" and asked.router == course.victim.name
    return is_its_own and course.round.fault.kind is Kind.SIGSTOP and asked.way is not Way.LIBRARY


def _went_with_its_router(asked: Asked, course: Course) -> bool:
    victim = course.victim
    is_its_own = victim.role == "router" and asked.router == victim.name and asked.way is not Way.LIBRARY
    if course.round.fault.kind is Kind.SIGTERM:  # on its way to the stopped router when that was asked to leave
        return is_its_own and asked.outcome is Outcome.LOST and not asked.tokens and _REFUSED in asked.told
    return is_its_own and course.round.fault.kind in _ENDS_STREAMS and asked.outcome in (Outcome.LOST, Outcome.MISSING)
