"""Which workers serve a request. Pure: loads in, a pair out.

A policy sees pairs that can work together and nothing else; the cost model will be one more of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.messages import MemberId


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker that may be chosen, as the router knows it now."""

    member: MemberId
    pairing: str  # workers with equal values can exchange KV
    assigned: int  # sequences that this router has there, queued or running
    waiting: int = 0  # the worker's own figures, from its last heartbeat, over all routers
    running: int = 0
    free_blocks: int = 0

    @property
    def depth(self) -> int:
        """What is ahead of a newcomer. Heartbeats lag, this router's own count does not: the larger one counts."""
        return max(self.assigned, self.waiting + self.running)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    num_prompt_tokens: int
    max_tokens: int
    num_choices: int
    avoid: frozenset[MemberId] = frozenset()  # failed this request before: last choice


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: the prompt is prefilled on the decode worker."""

    prefill: MemberId | None
    decode: MemberId


class Policy(Protocol):
    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        """None: no decode worker. Without a prefill worker that pairs, the decode worker does both."""
        ...


class LeastLoaded:
    """The pair whose workers have the least ahead; equals take turns."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        pairs = _pairs(prefills, decodes, request.avoid)
        return self._turns.take(pairs, lambda load: load.depth)


class RoundRobin:
    """Every worker in its turn, whatever it has to do."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        pairs = _pairs(prefills, decodes, request.avoid)
        return self._turns.take(pairs, lambda _: 0)


def policy(name: str) -> Policy:
    """The policy that `--placement` names."""
    policies: dict[str, type[LeastLoaded] | type[RoundRobin]] = {"least-loaded": LeastLoaded, "round-robin": RoundRobin}
    return policies[name]()


class _Cost(Protocol):
    def __call__(self, load: WorkerLoad, /) -> int: ...


_Pair = tuple[WorkerLoad | None, WorkerLoad]


class _Turns:
    """Remembers when each worker was last chosen, so that equals take turns."""

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[MemberId, int] = {}

    def take(self, pairs: Sequence[_Pair], cost: _Cost) -> Placement | None:
        if not pairs:
            return None
        prefill, decode = min(pairs, key=lambda pair: self._rank(pair, cost))
        self._turn += 1
        present = {load.member for pair in pairs for load in pair if load is not None}
        self._last_turn = {member: turn for member, turn in self._last_turn.items() if member in present}
        for load in (prefill, decode):
            if load is not None:
                self._last_turn[load.member] = self._turn
        return Placement(prefill.member if prefill is not None else None, decode.member)

    def _rank(self, pair: _Pair, cost: _Cost) -> tuple[int, int, str]:
        loads = [load for load in pair if load is not None]
        turns = sum(self._last_turn.get(load.member, 0) for load in loads)
        return sum(map(cost, loads)), turns, " ".join(str(load.member) for load in loads)


def _pairs(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], avoid: frozenset[MemberId]) -> list[_Pair]:
    """All that can work together; those to avoid only where there is no other. A decode worker without any prefill
    worker of its kind pairs with None, and only if no decode worker has one."""
    prefills, decodes = _rather(prefills, avoid), _rather(decodes, avoid)
    disaggregated: list[_Pair] = [(p, d) for d in decodes for p in prefills if p.pairing == d.pairing]
    return disaggregated or [(None, d) for d in decodes]


def _rather(loads: Sequence[WorkerLoad], avoid: Iterable[MemberId]) -> Sequence[WorkerLoad]:
    return [load for load in loads if load.member not in avoid] or loads
