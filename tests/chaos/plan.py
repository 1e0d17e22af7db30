"""The plan of faults: which fault happens in which round. Pure: the same seed makes the same plan.

Owns the list of faults, and which phases of a request a role can hold. Executes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random


class Phase(StrEnum):
    """A phase of a request, at any worker."""

    QUEUED = "queued"  # its prompt waits in its prefill worker
    PREFILLING = "prefilling"
    FIRST_TOKEN = "first_token"  # its client has it; the KV is on its way
    PULLING = "pulling"  # a read of its KV is going on
    SETTLING = "settling"  # everything is read; the prefill worker has not confirmed the lease yet
    DECODING = "decoding"


class Kind(StrEnum):
    NOTHING = "nothing"  # what the others are compared with
    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"  # and woken later
    SIGTERM = "sigterm"
    REDIS_KILLED = "redis_killed"  # another one without its keys takes its place
    REDIS_EMPTIED = "redis_emptied"
    REDIS_STOPPED = "redis_stopped"
    LINK_CUT = "link_cut"  # of one decode worker to everybody, and healed
    DISK_FULL = "disk_full"  # under the spill tiers of the prefill workers
    CLOCK_JUMP = "clock_jump"  # of one process's wall clock
    STEP_HUNG = "step_hung"  # one worker's next step does not begin for a while
    MEMORY_PRESSURE = "memory_pressure"  # one process gets no more address space for a while


GOALS_S = {Kind.SIGKILL: 0.7, Kind.SIGSTOP: 3.3}  # for detection and hand-over in 99 of 100 cases
ROLES = ("router", "prefill", "decode")
PHASES = {
    "router": tuple(Phase),
    "prefill": tuple(phase for phase in Phase if phase is not Phase.DECODING),  # it has settled by then
    "decode": tuple(Phase),
}
SIGNALS = (Kind.SIGKILL, Kind.SIGSTOP, Kind.SIGTERM)
_NUM_OF_EACH = 2
_JUMPS_S = (-86_400.0, -60.0, 5.0, 60.0, 3600.0, 31_536_000.0)
_DOWN_S = (0.5, 3.0, 7.0)  # of what takes no worker away
_HUNG_S = 7.0  # more than the members' --step-timeout-s
_STOPPED_S = 8.5  # more than the lease of a member and the grace of its streams
_FOR_S = {Kind.SIGSTOP: _STOPPED_S, Kind.STEP_HUNG: _HUNG_S}


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    role: str = ""
    phase: Phase | None = None

    @property
    def name(self) -> str:
        return ":".join(word for word in (self.kind, self.role, self.phase) if word)


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    seed: int  # of what the clients do
    fault: Fault
    victim: int  # which of its role
    for_s: float  # then it is woken, healed or started again
    jump_s: float

    @property
    def story(self) -> str:
        return f"round {self.number}: {self.fault.name}, number {self.victim}, for {self.for_s:g} s"


def all_faults() -> tuple[Fault, ...]:
    blows = [Fault(kind, role, phase) for kind in SIGNALS for role in ROLES for phase in PHASES[role]]
    redis = [Fault(kind) for kind in (Kind.REDIS_KILLED, Kind.REDIS_EMPTIED, Kind.REDIS_STOPPED)]
    around = [Fault(Kind.LINK_CUT), Fault(Kind.DISK_FULL)]
    inside = [Fault(kind, role) for kind in (Kind.CLOCK_JUMP, Kind.MEMORY_PRESSURE) for role in ROLES]
    hung = [Fault(Kind.STEP_HUNG, role) for role in ("prefill", "decode")]
    return (Fault(Kind.NOTHING), *blows, *redis, *around, *inside, *hung)


def make_plan(seed: int, num_rounds: int, wanted: Callable[[Fault], bool] = lambda fault: True) -> tuple[Round, ...]:
    """Return rounds in which every fault occurs once in random order, and then again, until there are enough. Raises
    ValueError if there is no fault."""
    dice, queue, plan = Random(seed), list[Fault](), list[Round]()
    faults = [fault for fault in all_faults() if wanted(fault)]
    if not faults:
        raise ValueError("no fault has that name")
    for number in range(num_rounds):
        if not queue:
            queue = dice.sample(faults, len(faults))
        plan.append(_round(number, queue.pop(), dice))
    return tuple(plan)


def _round(number: int, fault: Fault, dice: Random) -> Round:
    return Round(
        number=number,
        seed=dice.getrandbits(32),
        fault=fault,
        victim=dice.randrange(_NUM_OF_EACH),
        for_s=_FOR_S.get(fault.kind) or dice.choice(_DOWN_S),
        jump_s=dice.choice(_JUMPS_S),
    )
