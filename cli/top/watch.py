"""The data that `tandem top` shows: the overviews of all routers, merged. Pure; it is updated with each answer."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.v1 import admin_pb2

_MAX_ENDED = 200
_MAX_SAMPLES = 150
_KV_USED = ("held", "leased", "quarantined", "evicted")  # cached blocks are free for others
_SAMPLE_PERIOD_S = 2.0  # of every router, which all begin at the same times
_RECENT_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class WatchedRequest:
    router: str  # "id@incarnation"
    timeline: admin_pb2.RequestTimeline

    @property
    def key(self) -> tuple[str, str]:
        return (self.router, self.timeline.request_id)

    @property
    def age_s(self) -> float:
        return self.timeline.ledger.wall_s


@dataclass(frozen=True, slots=True)
class KvUse:
    num_used: int
    num_cached: int
    num_blocks: int

    @property
    def share(self) -> float:
        return self.num_used / self.num_blocks if self.num_blocks else 0.0


class Watch:
    def __init__(self) -> None:
        self.members: list[admin_pb2.MemberStatus] = []
        self.routers: list[admin_pb2.RouterOverview] = []
        self.ended: deque[WatchedRequest] = deque(maxlen=_MAX_ENDED)  # the oldest first
        self.positions: dict[str, admin_pb2.OverviewPosition] = {}
        self._samples: dict[str, deque[admin_pb2.RateSample]] = {}
        self._tokens: dict[str, tuple[float, float]] = {}  # by member: when they were read, and how many
        self.tokens_per_s: dict[str, float] = {}  # by "id@incarnation"

    def update(self, answer: admin_pb2.OverviewResponse) -> None:
        self.members = sorted(answer.members, key=lambda member: (member.role, member.member_id))
        self.routers = list(answer.routers)
        for router in answer.routers:
            if router.problem:
                continue
            self.positions[router.router] = router.position
            self.ended.extend(WatchedRequest(router.router, ended) for ended in router.ended)
            kept = self._samples.setdefault(router.router, deque(maxlen=_MAX_SAMPLES))
            kept.extend(router.samples)
        present = {router.router for router in answer.routers}
        for gone in set(self._samples) - present:
            del self._samples[gone]
        self.positions = {name: position for name, position in self.positions.items() if name in present}
        self._measure(answer.routers[0].time_s)

    @property
    def num_live(self) -> int:
        return sum(router.num_live for router in self.routers)

    def live(self) -> list[WatchedRequest]:
        return [WatchedRequest(router.router, live) for router in self.routers for live in router.live]

    def series(self, field: str) -> list[float]:
        """Return a rate (num_...) or latency (..._s) of all routers together per sample, the oldest first."""
        slots: dict[int, float] = {}
        for sample in (sample for kept in self._samples.values() for sample in kept):
            slot = int(sample.at_s // _SAMPLE_PERIOD_S)
            value = float(getattr(sample, field))
            if field.startswith("num_"):
                slots[slot] = slots.get(slot, 0.0) + value / max(sample.period_s, 0.1)
            else:
                slots[slot] = max(slots.get(slot, 0.0), value)
        return [slots[slot] for slot in sorted(slots)]

    def recent(self, field: str) -> float:
        """Return a rate of the last ten seconds."""
        last = self.series(field)[-_RECENT_SAMPLES:]
        return sum(last) / len(last) if last else 0.0

    def latency(self, name: str) -> tuple[float, float] | None:
        """Return median and 99th percentile of the last five minutes in seconds; of several routers, the worse ones."""
        found = [each for router in self.routers for each in router.latencies if each.name == name]
        found = [each for each in found if each.HasField("p50_s")]
        return (max(each.p50_s for each in found), max(each.p99_s for each in found)) if found else None

    def faults(self) -> Iterator[str]:
        """Return the present faults, one sentence each."""
        for member in self.members:
            if member.state == admin_pb2.MEMBER_STATE_UNHEALTHY:
                yield f"{member.member_id} is unhealthy"
            elif member.last_seen_s:
                yield f"{member.member_id} has been silent for {member.last_seen_s:.1f} s"
        for router in self.routers:
            name = short(router.router)
            if router.problem:
                yield f"{name} does not answer"
            elif router.registry_age_s > 5:
                yield f"{name} has not read the registry for {router.registry_age_s:.0f} s"
            for pair in router.breakers:
                yield f"hand-offs from {short(pair.exporter)} to {short(pair.importer)} fail"
            yield from router.slow

    def events(self) -> Sequence[admin_pb2.ClusterEvent]:
        """Return the new events of the router that was asked."""
        return self.routers[0].events if self.routers else ()

    def _measure(self, at_s: float) -> None:
        for member in self.members:
            name, figures = full_name(member), member.figures
            if "tokens_computed" not in figures:
                continue
            drawn_only = member.role == admin_pb2.MEMBER_ROLE_DECODE
            tokens = figures["tokens_drawn"] if drawn_only else figures["tokens_computed"]
            before_s, before = self._tokens.get(name, (at_s, tokens))
            if at_s - before_s >= 1.5:
                self.tokens_per_s[name] = max(0.0, tokens - before) / (at_s - before_s)
            if at_s - before_s >= 1.5 or name not in self._tokens:
                self._tokens[name] = (at_s, tokens)


def kv_use(member: admin_pb2.MemberStatus) -> KvUse:
    blocks = {name[7:]: int(value) for name, value in member.figures.items() if name.startswith("blocks_")}
    used = sum(blocks.get(state, 0) for state in _KV_USED)
    return KvUse(used, blocks.get("cached", 0), sum(blocks.values()))


def num_live(member: admin_pb2.MemberStatus) -> int:
    """Return how many sequences of a worker run or are frozen for a move."""
    return int(member.figures.get("running", 0) + member.figures.get("frozen", 0))


def num_waiting(member: admin_pb2.MemberStatus) -> int:
    """Return how many prompts, sequences and hand-offs wait at a worker."""
    return sum(int(member.figures.get(name, 0)) for name in ("waiting", "waiting_jobs", "handoffs_waiting"))


def full_name(member: admin_pb2.MemberStatus) -> str:
    return f"{member.member_id}@{member.incarnation}"


def short(member: str) -> str:
    """Return a member's id without its incarnation."""
    return member.partition("@")[0]
