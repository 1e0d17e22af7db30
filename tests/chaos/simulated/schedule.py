"""A schedule: the cluster's shape, what clients ask and when, and what goes wrong. A value, made from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random


class Phase(StrEnum):
    """Of whichever request comes to it."""

    QUEUED = "queued"  # the prefill worker is asked
    PREFILLING = "prefilling"  # it has given its ticket
    FIRST_TOKEN = "first token out"
    PULLING = "pulling"  # the decode worker has attached
    SETTLING = "settling"
    DECODING = "decoding"


class Kind(StrEnum):
    KILL = "is killed"
    STOP = "is stopped"
    DRAIN = "is asked to leave"
    CUT = "is cut off"
    RESET = "loses its connections"
    EMPTY = "loses what it kept"
    CLOCK = "has its clock set wrong"
    MEMORY = "gets no more memory"
    FULL = "has a full disk"
    PAIR = "does not reach another"
    SUPERSEDED = "is stopped, and another takes its name"
    RAISE = "fails in a step"
    HANG = "hangs in a step"
    MOVE = "is to hand its sequences on"


ROLES = ("router", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    at_s: float
    router: int
    family: int  # prompts of one family begin alike
    num_shared: int
    num_tokens: int  # of the prompt
    max_tokens: int
    n: int = 1
    cancel_after: int | None = None  # tokens that the client has by then


@dataclass(frozen=True, slots=True)
class Mishap:
    kind: Kind
    role: str  # "redis" too
    number: int  # which of them, where the phase does not say
    at_s: float  # after the start, or after the phase
    for_s: float  # then it is woken, healed, or started again
    phase: Phase | None = None
    occurrence: int = 0  # of the phase
    jump_s: float = 0.0  # of its clock


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int  # of everything that is not said here: latencies, order, contents
    num_routers: int
    num_prefills: int
    num_decodes: int
    num_blocks: int  # of each pool
    latency_s: float  # the longest of a message
    step_s: float  # the longest that a step takes, beside its tokens
    launches: bool  # the device computes on its own
    speculates: bool
    read_faults: bool
    spills: bool  # prefixes have tiers under the pool of their prefill worker
    asks: tuple[Ask, ...]
    mishaps: tuple[Mishap, ...]
    drain_grace_s: float


_DOWN_S = (0.2, 1.0, 2.5, 4.0, 8.0)
_SILENT_S = (0.05, 0.5, 1.5, 3.5, 7.0, 18.0)
_JUMPS_S = (-86_400.0, -60.0, 5.0, 60.0, 3600.0, 31_536_000.0)


def make_schedule(seed: int) -> Schedule:
    dice = Random(seed)
    counts = num_routers, num_prefills, num_decodes = [dice.choice((1, 2)) for _ in range(3)]
    asks = tuple(_ask(dice, num_routers) for _ in range(dice.choice((1, 2, 3, 4, 5, 8))))
    mishaps = tuple(_mishap(dice, counts) for _ in range(dice.choice((1, 1, 1, 2))))
    return Schedule(
        seed=seed,
        num_routers=num_routers,
        num_prefills=num_prefills,
        num_decodes=num_decodes,
        num_blocks=dice.choice((32, 48, 96)),
        latency_s=dice.choice((0.003, 0.003, 0.05)),
        step_s=dice.choice((0.004, 0.004, 0.1)),
        launches=dice.random() < 0.3,
        speculates=dice.random() < 0.2,
        read_faults=dice.random() < 0.25,
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
        spills=dice.random() < 0.25 or any(mishap.kind is Kind.FULL for mishap in mishaps),
        mishaps=mishaps,
        drain_grace_s=dice.choice((0.02, 0.2, 0.2, 30.0)),
    )


_ALL = (Kind.KILL, Kind.KILL, Kind.STOP, Kind.DRAIN, Kind.CUT, Kind.RESET, Kind.PAIR, Kind.SUPERSEDED)
_OF_WORKERS = (*_ALL, Kind.RAISE, Kind.HANG, Kind.CLOCK, Kind.MEMORY)
KINDS = {
    "router": (*_ALL, Kind.CLOCK),
    "prefill": (*_OF_WORKERS, Kind.FULL),
    "decode": (*_OF_WORKERS, Kind.MOVE, Kind.RESET),
    "redis": (Kind.KILL, Kind.STOP, Kind.EMPTY, Kind.CUT),
}


def _ask(dice: Random, num_routers: int) -> Ask:
    num_tokens, n = dice.randint(1, 40), dice.choice((1, 1, 1, 2))
    return Ask(
        at_s=dice.choice((0.0, 0.0, dice.random())),
        router=dice.randrange(num_routers),
        family=dice.randrange(2),
        num_shared=dice.choice((0, 8, 17)),
        num_tokens=num_tokens,
        max_tokens=dice.choice((1, 2, dice.randint(3, 30))),
        n=n,
        cancel_after=dice.choice((None, None, None, None, dice.randint(0, 6))),
    )


def _mishap(dice: Random, counts: Sequence[int]) -> Mishap:
    role = dice.choice((*ROLES, *ROLES, "prefill", "decode", "decode", "redis"))
    kind = dice.choice(KINDS[role])
    down = kind in (Kind.KILL, Kind.DRAIN)
    phase = dice.choice(tuple(Phase)) if role != "redis" and dice.random() < 0.8 else None
    return Mishap(
        kind=kind,
        role=role,
        number=dice.randrange(counts[ROLES.index(role)] if role in ROLES else 1),
        at_s=dice.choice((0.0, dice.random() * 0.005)) if phase else dice.random(),
        for_s=dice.choice(_DOWN_S if down else _SILENT_S),
        phase=phase,
        occurrence=dice.choice((0, 0, 1, 3)),
        jump_s=dice.choice(_JUMPS_S) if kind is Kind.CLOCK else 0.0,
    )
