"""Links and workers that are much slower than the others, and full KV pools: what an overview says is wrong. Pure.

Workers of one leg are compared from two on, links of one transport from three on. A link with fewer others is compared
with itself at its fastest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import median_low
from typing import TypeAlias

from cluster.messages import LinkSpeed, MemberId, Role
from cluster.service_times import ServiceTimes, StepWork, TimedStep

SLOW_LINK, SLOW_WORKER = 3.0, 1.7  # times what is usual; deploy/observability/alerts.py has the same factors
_LEAST_LINKS, _LEAST_WORKERS = 3, 2
_MOST_OTHERS = 5  # of which two may be slow themselves
_FULL = 0.95  # of a KV pool's blocks
_PREEMPTIONS = 3  # a minute; deploy/observability/alerts.py has the same bound
_IDLE = ("blocks_free", "blocks_cached")
_READ_BYTES = 1 << 20
_MIN_S = 1e-9
_Measured: TypeAlias = tuple[ServiceTimes, TimedStep]


@dataclass(frozen=True, slots=True)
class LinkSlowdown:
    """How the link that hand-offs from one worker to another use compares with what is usual."""

    importer: MemberId
    speed: LinkSpeed
    times: float  # slower than usual; less than 1: faster
    usual: str  # with what it was compared

    @property
    def labels(self) -> tuple[str, str, str]:
        """Return the importer, the exporter and the transport, by which metrics and alerts name it."""
        return self.importer.id, self.speed.exporter.id, self.speed.transport

    @property
    def is_fault(self) -> bool:
        return self.times > SLOW_LINK

    def __str__(self) -> str:
        importer, exporter, transport = self.labels
        return f"{importer} reads KV from {exporter} by {transport} {self.times:.1f} times slower than {self.usual}"


def link_slowdowns(links: Mapping[MemberId, Sequence[LinkSpeed]]) -> list[LinkSlowdown]:
    """Compare the links that hand-offs use. `links`: by importer; of each exporter, the first one is used."""
    by_transport: dict[str, list[tuple[MemberId, LinkSpeed]]] = {}
    for importer, speeds in links.items():
        used = {speed.exporter: speed for speed in reversed(speeds)}
        for speed in used.values():
            by_transport.setdefault(speed.transport, []).append((importer, speed))
    found = []
    for same in by_transport.values():
        if len(same) < _LEAST_LINKS:
            found += [LinkSlowdown(importer, speed, speed.slowdown, "at its fastest") for importer, speed in same]
        else:
            usual_s = median_low(speed.transfer_s(_READ_BYTES) for _, speed in same)
            found += [
                LinkSlowdown(importer, speed, speed.transfer_s(_READ_BYTES) / usual_s, "usual")
                for importer, speed in same
            ]
    return found


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How a worker compares with the others that compute the same."""

    worker: MemberId
    leg: str  # "decode" or "prefill"
    times: float  # slower than the median of the others; less than 1: faster

    @property
    def is_fault(self) -> bool:
        return self.times > SLOW_WORKER

    def __str__(self) -> str:
        return f"{self.worker.id} {self.leg}s {self.times:.1f} times slower than the other workers"


def slowdowns(decodes: Mapping[MemberId, ServiceTimes], prefills: Mapping[MemberId, ServiceTimes]) -> list[Slowdown]:
    """Compare each worker with others of its leg: all, or a few spread over a large pool, because a comparison takes
    20 us. Workers that have not measured enough steps are not compared."""
    decode_steps = {member: (times, times.typical_decode) for member, times in decodes.items()}
    prefill_steps = {member: (times, times.typical_prefill) for member, times in prefills.items()}
    found = []
    for leg, steps in (("decode", decode_steps), ("prefill", prefill_steps)):
        measured = {member: (times, step) for member, (times, step) in steps.items() if step is not None}
        if len(measured) >= _LEAST_WORKERS:
            for member, own in measured.items():
                others = _spread([other for name, other in measured.items() if name != member])
                found.append(Slowdown(member, leg, median_low(_times_slower(*own, *other) for other in others)))
    return found


def _spread(others: Sequence[_Measured]) -> Sequence[_Measured]:
    return others[:: max(1, -(-len(others) // _MOST_OTHERS))]


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
