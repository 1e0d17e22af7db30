"""The order in which work gets a step's tokens, a slot or blocks. Pure: it keeps no state and has no clock.

A policy ranks a piece of work by its numbers. The work of the lowest rank is served first, and the work of the highest
rank is preempted where memory is short. Under every policy the batch class comes after everything else. The scheduler
applies the order.
"""

from dataclasses import dataclass
from math import log2
from typing import Protocol

from cluster.settings.worker_settings import SCHEDULING_POLICIES

Rank = tuple[float, ...]  # less goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A prompt or a sequence as a policy sees it, at one moment."""

    arrival: int  # counts arrivals here; no two are equal
    arrived_s: float  # at its router; a retry does not change it
    deadline_s: float
    num_prompt: int
    # Tokens computed, prompt and output. It never decreases: tokens lost to a preemption stay counted.
    num_done: int = 0
    predicted_tokens: int = 0  # predicted tokens of the whole output; 0 if unknown
    priority: int = 0  # less goes first
    is_batch: bool = False  # uses only capacity that no other work needs
    is_resumed: bool = False  # its client has tokens: it already ran, on a worker that failed or that it left
    waited_s: float = 0.0  # the present wait; while it runs, the wait before it ran
    num_since_wait: int = 0  # of num_done, those computed since that wait ended; 0 while it waits

    @property
    def num_output(self) -> int:
        return max(0, self.num_done - self.num_prompt)

    @property
    def num_prompt_left(self) -> int:
        return max(0, self.num_prompt - self.num_done)


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def is_preemptive(self) -> bool:
        """Return whether waiting work that ranks first replaces running work that ranks last."""
        ...

    def rank(self, work: Work, now_s: float) -> Rank:
        """Return the rank: the lowest is served first, equal ranks in order of arrival."""
        ...


def full_rank(policy: Policy, work: Work, now_s: float, virtual_start: float = 0.0) -> Rank:
    """The order that schedulers sort by, class, tenant, policy: no two pieces of work are equal in it.

    `virtual_start`: by the tenants' fair queue; the same for all where one tenant alone has work."""
    return (work.is_batch, virtual_start, *policy.rank(work, now_s), work.arrival)


def displaces(policy: Policy, waiting: Work, running: Work, now_s: float) -> bool:
    """Return whether `waiting` may replace `running`. Any other work may replace work of the batch class."""
    if waiting.is_batch != running.is_batch:
        return running.is_batch
    return policy.is_preemptive and policy.rank(waiting, now_s) < policy.rank(running, now_s)


def make_policy(name: str) -> Policy:
    """Return the policy of this name, one of `SCHEDULING_POLICIES`."""
    policies: tuple[Policy, ...] = (
        FirstCome(),
        ShortestFirst(),
        SkipJoinMlfq(),
        EarliestDeadline(),
        Priorities(),
    )
    by_name = {policy.name: policy for policy in policies}
    assert tuple(by_name) == SCHEDULING_POLICIES
    return by_name[name]


# A step spends about as much on one token of output as on this many of a prompt: a chunk's tokens share each
# read of the weights. Between 3 (16 sequences on one CPU core) and 20 (one sequence).
PROMPT_TOKENS_PER_OUTPUT = 8


@dataclass(frozen=True, slots=True)
class FirstCome:
    """Order of arrival at the cluster. A request that is retried keeps its place, and a request whose client already
    has tokens goes before those without."""

    name: str = "fcfs"
    is_preemptive: bool = False

    def rank(self, work: Work, now_s: float) -> Rank:
        return (not work.is_resumed, work.arrived_s)


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """Least predicted remaining work first, running or not. A second since arrival counts as `ageing` tokens less: only
    those that arrive within (its remaining work / ageing) seconds can overtake anything. Running work gains on waiting
    work with every token, so no two pieces of work preempt each other in turn."""

    ageing: float = 32.0  # tokens of output a second
    unknown_tokens: int = 256  # tokens assumed for an output without a prediction
    name: str = "shortest"
    is_preemptive: bool = True

    def rank(self, work: Work, now_s: float) -> Rank:
        # A sequence that exceeds its prediction has at least one more token.
        output_left = max(1, (work.predicted_tokens or self.unknown_tokens) - work.num_output)
        remaining = work.num_prompt_left / PROMPT_TOKENS_PER_OUTPUT + output_left
        return (remaining - self.ageing * (now_s - work.arrived_s),)


@dataclass(frozen=True, slots=True)
class SkipJoinMlfq:
    """Multi-level feedback with preemption (FastServe, Wu et al. 2023). Level i's quantum is `quantum` doubled i times.
    Work joins at the level whose quantum holds its prompt, since that much is computed before it can be looked at
    again, and goes down a level with each quantum used up. Waiting work goes up a level per `promote_after_s`, and
    keeps the levels gained for one quantum of the level that it reached."""

    quantum: float = 32.0  # tokens of output, or PROMPT_TOKENS_PER_OUTPUT times as many of a prompt
    num_levels: int = 8
    promote_after_s: float = 10.0
    name: str = "mlfq"
    is_preemptive: bool = True

    def rank(self, work: Work, now_s: float) -> Rank:
        return (self.level(work),)

    def level(self, work: Work) -> int:
        """Return the level of the work; level 0 is served first."""
        level = self._level_by_service(work)
        raised = max(0, level - int(work.waited_s / self.promote_after_s))
        used = _service(work, work.num_done) - _service(work, work.num_done - work.num_since_wait)
        return raised if used < self._quantum(raised) else level

    def _level_by_service(self, work: Work) -> int:
        # Quanta double, so levels are logarithms: the first whose quantum is more than the prompt's cost, and from
        # there down by the number of quanta that fit into its service, since q + 2q + ... + 2^(n-1) q = (2^n - 1) q.
        prompt_cost = _service(work, work.num_prompt)
        joined = int(log2(prompt_cost / self.quantum)) + 1 if prompt_cost >= self.quantum else 0
        used_up = int(log2(_service(work, work.num_done) / self._quantum(joined) + 1))
        return min(joined + used_up, self.num_levels - 1)

    def _quantum(self, level: int) -> float:
        return self.quantum * 2.0**level


@dataclass(frozen=True, slots=True)
class EarliestDeadline:
    """Earliest deadline first."""

    name: str = "deadline"
    is_preemptive: bool = True

    def rank(self, work: Work, now_s: float) -> Rank:
        return (work.deadline_s,)


@dataclass(frozen=True, slots=True)
class Priorities:
    """Lowest priority value first. `ageing_s` since arrival count as one priority less, so nothing is overtaken for
    ever."""

    ageing_s: float = 30.0
    name: str = "priority"
    is_preemptive: bool = True

    def rank(self, work: Work, now_s: float) -> Rank:
        return (work.priority - (now_s - work.arrived_s) / self.ageing_s,)


def _service(work: Work, num_done: int) -> float:
    """Return the cost of the first `num_done` tokens of a piece of work, in tokens of output."""
    num_prompt = min(num_done, work.num_prompt)
    return num_prompt / PROMPT_TOKENS_PER_OUTPUT + (num_done - num_prompt)
