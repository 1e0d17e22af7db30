"""The rates, latencies and events that a router has seen in the last minutes. Pure; the time is an argument.

A sample is the difference between two readings of the router's counters, and an event is a difference between two views
of the cluster: members, scale targets, faults. So the code that serves requests reports nothing here. A fault that goes
on is one event every `REPEAT_S`, with the number of its occurrences.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.registry.scale_target import ScaleTarget, sizes_text

SAMPLE_PERIOD_S = 2.0
MAX_SAMPLES = 150  # of five minutes
LATENCIES = ("ttft", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Totals:
    """A reading of a router's counters, which count since its start."""

    at_s: float  # Unix time
    num_ended: int
    num_failed: int
    num_prompt_tokens: int
    num_tokens: int
    num_live: int  # now
    latencies: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by name in LATENCIES: observations per range


@dataclass(frozen=True, slots=True)
class Sample:
    """The changes between two readings. The latencies are (median, 99th percentile) in seconds; None: no value."""

    number: int  # from 1 on
    at_s: float
    period_s: float
    num_ended: int
    num_failed: int
    num_prompt_tokens: int
    num_tokens: int
    num_live: int
    ttft_s: tuple[float, float] | None
    itl_s: tuple[float, float] | None


def quantile_s(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return a quantile of a histogram, interpolated within its range as Prometheus does; None without observations.

    `counts` has one number more than `bounds_s`: a value above the last bound counts as that bound."""
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            if index == len(bounds_s):
                return bounds_s[-1]
            lower = bounds_s[index - 1] if index else 0.0
            return lower + (bounds_s[index] - lower) * (rank - below) / count
        below += count
    return bounds_s[-1]


class History:
    """The last readings, and the samples between them."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        """`bounds_s`: the upper bounds of the ranges of all latencies."""
        self.bounds_s = tuple(bounds_s)
        self._totals: deque[Totals] = deque(maxlen=MAX_SAMPLES + 1)
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    @property
    def newest(self) -> int:
        """The number of the newest sample; 0: there is none."""
        return self._samples[-1].number if self._samples else 0

    def add(self, now: Totals) -> None:
        """Add a reading. The first one starts the history."""
        if self._totals:
            self._samples.append(self._between(self._totals[-1], now))
        self._totals.append(now)

    def since(self, number: int) -> Iterator[Sample]:
        """Return the samples after the one with this number, the oldest first."""
        return (sample for sample in self._samples if sample.number > number)

    def latencies(self) -> dict[str, tuple[int, ...]]:
        """Return the number of observations per range in the whole time that is kept, by name."""
        if not self._totals:
            return {name: (0,) * (len(self.bounds_s) + 1) for name in LATENCIES}
        return {name: _difference(self._totals[0], self._totals[-1], name) for name in LATENCIES}

    def _between(self, before: Totals, now: Totals) -> Sample:
        return Sample(
            number=self.newest + 1,
            at_s=now.at_s,
            period_s=now.at_s - before.at_s,
            num_ended=now.num_ended - before.num_ended,
            num_failed=now.num_failed - before.num_failed,
            num_prompt_tokens=now.num_prompt_tokens - before.num_prompt_tokens,
            num_tokens=now.num_tokens - before.num_tokens,
            num_live=now.num_live,
            ttft_s=self._median_and_99(_difference(before, now, "ttft")),
            itl_s=self._median_and_99(_difference(before, now, "itl")),
        )

    def _median_and_99(self, counts: Sequence[int]) -> tuple[float, float] | None:
        median = quantile_s(self.bounds_s, counts, 0.5)
        return None if median is None else (median, quantile_s(self.bounds_s, counts, 0.99) or median)


def _difference(before: Totals, now: Totals, name: str) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(before.latencies[name], now.latencies[name], strict=True))


MAX_EVENTS = 200
REPEAT_S = 5.0
REGISTRY_SILENT_S = 5.0  # a registry that was not read for this long is a fault


class EventKind(StrEnum):
    MEMBER = "member"
    SCALE = "scale"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Event:
    number: int  # from 1 on
    at_s: float  # Unix time
    kind: EventKind
    member: str  # "id@incarnation"; empty: none
    text: str


@dataclass(frozen=True, slots=True)
class SeenMember:
    role: str
    state: str
    answers: bool  # a worker's stream to this router works; True for routers


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster at one moment."""

    members: Mapping[str, SeenMember] = field(default_factory=dict)  # by "id@incarnation"
    target: ScaleTarget | None = None
    breakers: Mapping[tuple[str, str], str] = field(default_factory=dict)  # state by exporter and importer
    registry_age_s: float = 0.0
    faults: Mapping[str, int] = field(default_factory=dict)  # how often each fault has happened, by its description


class EventLog:
    """The last events, and the view that the next one is compared with."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._number = 0
        self._view: ClusterView | None = None
        self._silent: set[str] = set()  # members of which an event says that they do not answer
        self._reported: dict[str, tuple[int, float]] = {}  # by fault: its count when it was last an event, and the time

    @property
    def newest(self) -> int:
        """The number of the newest event; 0: there is none."""
        return self._number

    def since(self, number: int) -> Iterator[Event]:
        """Return the events after the one with this number, the oldest first."""
        return (event for event in self._events if event.number > number)

    def observe(self, view: ClusterView, at_s: float) -> None:
        """Compare the cluster with the last view. The members of the first view are no events."""
        before, self._view = self._view, view
        if before is None:
            self._reported = {fault: (count, at_s - REPEAT_S) for fault, count in view.faults.items()}
            return
        for kind, member, text in (
            *_member_changes(before.members, view.members),
            *self._answer_changes(before.members, view.members),
            *_scale_changes(before.target, view.target),
            *_breaker_changes(before.breakers, view.breakers),
            *_registry_changes(before.registry_age_s, view.registry_age_s),
        ):
            self._add(at_s, kind, member, text)
        self._report_faults(view.faults, at_s)

    def _answer_changes(self, before: Mapping[str, SeenMember], now: Mapping[str, SeenMember]) -> "Iterator[_Change]":
        """Yield the events of workers that stopped answering or answer again. The first answer of a new worker is no
        event.
        """
        self._silent &= set(now)
        for name, member in now.items():
            short = name.partition("@")[0]
            if not member.answers and name in before and before[name].answers:
                self._silent.add(name)
                yield EventKind.FAULT, name, f"{short} does not answer"
            elif member.answers and name in self._silent:
                self._silent.discard(name)
                yield EventKind.MEMBER, name, f"{short} answers again"

    def _report_faults(self, faults: Mapping[str, int], at_s: float) -> None:
        for fault, count in faults.items():
            reported, reported_s = self._reported.get(fault, (0, at_s - REPEAT_S))
            if count > reported and at_s - reported_s >= REPEAT_S:
                times = f" ({count - reported} times)" if count - reported > 1 else ""
                self._add(at_s, EventKind.FAULT, "", fault + times)
                self._reported[fault] = (count, at_s)

    def _add(self, at_s: float, kind: EventKind, member: str, text: str) -> None:
        self._number += 1
        self._events.append(Event(self._number, at_s, kind, member, text))


_Change = tuple[EventKind, str, str]


def _member_changes(before: Mapping[str, SeenMember], now: Mapping[str, SeenMember]) -> Iterator[_Change]:
    for name, member in before.items():
        if name not in now:
            kind = EventKind.MEMBER if member.state == "draining" else EventKind.FAULT
            how = "left" if member.state == "draining" else "was lost: its registration ended without a drain"
            yield kind, name, f"{name.partition('@')[0]} {how}"
    for name, member in now.items():
        former, short = before.get(name), name.partition("@")[0]
        if former is None:
            yield EventKind.MEMBER, name, f"{short} joined as {member.role}, {member.state}"
            continue
        if member.state != former.state:
            kind = EventKind.FAULT if member.state == "unhealthy" else EventKind.MEMBER
            yield kind, name, f"{short} is {member.state}"
        if member.role != former.role:
            yield EventKind.MEMBER, name, f"{short} has the role {member.role} instead of {former.role}"


def _scale_changes(before: ScaleTarget | None, now: ScaleTarget | None) -> Iterator[_Change]:
    if now is None or now == before:
        return
    if before is None or now.version != before.version:
        yield EventKind.SCALE, "", f"target: {sizes_text(now.prefill, now.decode, now.colocated)}"
    elif now.reached == now.version and before.reached != before.version:
        yield EventKind.SCALE, "", f"target reached: {sizes_text(now.prefill, now.decode, now.colocated)}"
    if now.problem and (before is None or now.problem != before.problem):
        yield EventKind.FAULT, "", f"target not reached: {now.problem}"


def _breaker_changes(before: Mapping[tuple[str, str], str], now: Mapping[tuple[str, str], str]) -> Iterator[_Change]:
    for pair, state in now.items():
        if state == "open" and before.get(pair) != "open":
            yield EventKind.FAULT, pair[1], f"{_names(pair)}: hand-offs fail; the pair is not used for a while"
    for pair in before:
        if pair not in now:
            yield EventKind.MEMBER, pair[1], f"{_names(pair)}: hand-offs work again, or a worker left"


def _registry_changes(before_s: float, now_s: float) -> Sequence[_Change]:
    if before_s < REGISTRY_SILENT_S <= now_s:
        return [(EventKind.FAULT, "", "the registry does not answer; the last known membership holds")]
    if now_s < REGISTRY_SILENT_S <= before_s:
        return [(EventKind.MEMBER, "", "the registry answers again")]
    return []


def _names(pair: tuple[str, str]) -> str:
    return " to ".join(name.partition("@")[0] for name in pair)
