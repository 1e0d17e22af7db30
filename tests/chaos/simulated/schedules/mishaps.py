"""Faults, and operations of an operator: their kinds, when they happen, and how a seed draws them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random


class Phase(StrEnum):
    """A phase of a request's life, at which a fault may happen."""

    QUEUED = "queued"  # the prefill worker has been called
    PREFILLING = "prefilling"  # it has returned its ticket
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
    UNREADABLE = "cannot read the KV of others"
    MOVE = "is to hand its sequences on"
    JOIN = "is joined by another of its role"
    LEAVE = "leaves for good"
    TORN = "has a connection that breaks between two bytes"
    SILENT = "has a connection that falls silent"  # half open: nothing arrives any more, and no end is told
    DEAF = "does not read from a connection"


OPERATIONS = frozenset({Kind.MOVE, Kind.JOIN, Kind.LEAVE})  # an operator's, not faults
ROLES = ("router", "prefill", "decode")
OF_CONNECTIONS = (Kind.TORN, Kind.SILENT, Kind.DEAF)  # those that carry members' calls as frames


@dataclass(frozen=True, slots=True)
class Mishap:
    """A fault, or an operation of an operator."""

    kind: Kind
    role: str  # "redis" too
    number: int  # which member of the role, unless the phase decides
    at_s: float  # after the start, or after the phase
    for_s: float  # after this time the victim is woken, healed or restarted
    phase: Phase | None = None
    occurrence: int = 0  # of the phase
    jump_s: float = 0.0  # of its clock
    after_bytes: int = 0  # of a connection: so many more arrive


_DOWN_S = (0.2, 1.0, 2.5, 4.0, 8.0)
_SILENT_S = (0.05, 0.5, 1.5, 3.5, 7.0, 18.0)
_STOPPED_S = (*_SILENT_S, 30.0)  # after 30 s, responses and call deadlines are due at the same moment
_JUMPS_S = (-86_400.0, -60.0, 5.0, 60.0, 3600.0, 31_536_000.0)


def num_failures(mishap: Mishap) -> int:
    """Return the maximum number of attempts of one request that a fault may fail."""
    return _NUM_FAILURES.get(mishap.kind, int(mishap.kind not in OPERATIONS))


NUM_REFUSALS = 2  # refused large allocations of a worker without memory
_NUM_FAILURES = {Kind.MEMORY: NUM_REFUSALS, Kind.UNREADABLE: 2}  # then the decode worker prefills

_ALL = (Kind.KILL, Kind.KILL, Kind.STOP, Kind.DRAIN, Kind.CUT, Kind.RESET, Kind.PAIR, Kind.SUPERSEDED)
_OF_WORKERS = (*_ALL, Kind.RAISE, Kind.HANG, Kind.CLOCK, Kind.MEMORY)
FAULTS = {
    "router": (*_ALL, Kind.CLOCK),
    "prefill": (*_OF_WORKERS, Kind.FULL),
    "decode": (*_OF_WORKERS, Kind.RESET, Kind.UNREADABLE),
    "redis": (Kind.KILL, Kind.STOP, Kind.EMPTY, Kind.CUT),
}
_OF_OPERATORS = (
    *((Kind.MOVE, "decode"),) * 4,
    *((kind, role) for kind in (Kind.JOIN, Kind.LEAVE) for role in ROLES),
)
KINDS = {
    role: (
        *kinds,
        *(kind for kind, of in _OF_OPERATORS if of == role),
        *(OF_CONNECTIONS if role in ROLES else ()),
    )
    for role, kinds in FAULTS.items()
}


def draw_fault(dice: Random, counts: Sequence[int]) -> Mishap:
    role = dice.choice((*ROLES, *ROLES, "prefill", "decode", "decode", "redis"))
    return _mishap(dice, dice.choice(FAULTS[role]), role, counts)


def draw_connection_fault(dice: Random, counts: Sequence[int]) -> Mishap:
    mishap = _mishap(dice, dice.choice(OF_CONNECTIONS), dice.choice(ROLES), counts)
    return replace(mishap, after_bytes=dice.choice((0, dice.randint(0, 20), dice.randint(0, 400))))


def draw_stop_while_decoding(dice: Random, role: str, counts: Sequence[int]) -> Mishap:
    mishap = replace(_mishap(dice, Kind.STOP, role, counts), phase=Phase.DECODING)
    return replace(mishap, at_s=dice.random() * 0.005, for_s=dice.choice((1.0, 2.0, 4.0)))


def draw_operation(dice: Random, counts: Sequence[int]) -> tuple[Mishap, ...]:
    """Draw an operation. The target of a move may be unable to read; the sequence is then thawed."""
    operation = _mishap(dice, *dice.choice(_OF_OPERATORS), counts)
    if operation.kind is not Kind.MOVE or dice.random() < 0.5:
        return (operation,)
    target = (operation.number + 1) % counts[ROLES.index("decode")]
    trouble = dice.choice((Kind.UNREADABLE, Kind.UNREADABLE, Kind.KILL, Kind.STOP, Kind.CUT))
    return operation, replace(operation, kind=trouble, number=target, role="decode", for_s=dice.choice(_SILENT_S))


def _mishap(dice: Random, kind: Kind, role: str, counts: Sequence[int]) -> Mishap:
    down = kind in (Kind.KILL, Kind.DRAIN, Kind.LEAVE)
    phase = dice.choice(tuple(Phase)) if role != "redis" and dice.random() < 0.8 else None
    if kind is Kind.MOVE:
        phase = Phase.DECODING
    return Mishap(
        kind=kind,
        role=role,
        number=dice.randrange(counts[ROLES.index(role)] if role in ROLES else 1),
        at_s=dice.choice((0.0, dice.random() * 0.005)) if phase else dice.random(),
        for_s=dice.choice(_DOWN_S if down else _STOPPED_S if kind is Kind.STOP else _SILENT_S),
        phase=phase,
        occurrence=dice.choice((0, 0, 1, 3)),
        jump_s=dice.choice(_JUMPS_S) if kind is Kind.CLOCK else 0.0,
    )
