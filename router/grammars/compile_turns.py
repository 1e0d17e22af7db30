"""Decides whose grammar is compiled next, and refuses sources whose grammars cost too much CPU time. Pure.

A source is a tenant, or the network address of a client without a key. Each has a budget of CPU time: it fills at
`_CPU_S_PER_S` up to `_MOST_CPU_S`, and what a compilation has used is subtracted at its end. One grammar of a source is
compiled at a time, and the source with the largest budget is next, so a source that floods the compile process delays
another one by no more than the end of the compilations that run.
"""

import ipaddress
import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster.accounts.keys import Caller
from cluster.errors import LimitReached, Overloaded

COMPILE_LIMIT = "grammar_compile_seconds"
_MOST_CPU_S = 4.0  # hundreds of ordinary schemas, which take 6 to 9 ms, or ten that reach the bound of one compilation
_CPU_S_PER_S = 0.2
_MAX_WAITING, _MAX_WAITING_OF_SOURCE = 512, 128
_MAX_SOURCES = 4096
_WAITING_RETRY_S = 1.0
_LEAST_RETRY_S = 0.1
_IPV6_NETWORK_BITS = 64  # one host can have every address of such a network
Job = TypeVar("Job")


def source_of(caller: Caller, address: str) -> str:
    """Return whose compile time a request costs: its tenant's, or without an API key its host's. `address`: the host's.

    Keys of one tenant share a budget, as they share limits. Tenants behind one proxy do not.
    """
    if caller.key_id:
        return f"tenant {caller.tenant}"
    try:
        host = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return f"address {address}"
    if isinstance(host, ipaddress.IPv6Address):
        host = host.ipv4_mapped or ipaddress.ip_network((int(host), _IPV6_NETWORK_BITS), strict=False).network_address
    return f"address {host}"


@dataclass(slots=True)
class _Source(Generic[Job]):
    budget_s: float  # of CPU time, at `as_of_s`
    as_of_s: float
    waiting: deque[tuple[int, Job]] = field(default_factory=deque)  # with numbers in the order of arrival
    is_compiling: bool = False

    def budget_at(self, now_s: float) -> float:
        return min(_MOST_CPU_S, self.budget_s + (now_s - self.as_of_s) * _CPU_S_PER_S)


class CompileTurns(Generic[Job]):
    """The jobs that wait for the compile process, and the sources that they belong to. `num_slots`: grammars that are
    compiled at the same time."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._numbers = itertools.count()
        self._num_waiting = 0
        self._sources: OrderedDict[str, _Source[Job]] = OrderedDict()  # the one that asked last is the last
        self._waiting: dict[str, _Source[Job]] = {}  # those with a job that waits

    def ask(self, source: str, job: Job, now_s: float) -> None:
        """Add a job, which waits for `start`. Raises LimitReached, Overloaded."""
        known = self._sources.get(source) or _Source(_MOST_CPU_S, now_s)
        if (budget_s := known.budget_at(now_s)) <= 0:
            raise _refusal(budget_s)
        if len(known.waiting) >= _MAX_WAITING_OF_SOURCE:
            raise LimitReached(
                COMPILE_LIMIT,
                f"{len(known.waiting)} grammars of this client wait to be compiled, the most",
                retry_after_s=_WAITING_RETRY_S,
            )
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded("too many grammars wait to be compiled; try again", retry_after_s=_WAITING_RETRY_S)
        known.waiting.append((next(self._numbers), job))
        self._num_waiting += 1
        self._sources[source] = self._waiting[source] = known
        self._sources.move_to_end(source)
        self._forget()

    def start(self, now_s: float) -> Job | None:
        """Return the next job, which has a slot until `end`; None: there is no job or no slot for it."""
        able = [name for name, each in self._waiting.items() if not each.is_compiling]
        if not able or not self._num_free:
            return None
        name = max(able, key=lambda each: self._rank(self._waiting[each], now_s))
        source = self._waiting[name]
        source.is_compiling = True
        self._num_free -= 1
        self._num_waiting -= 1
        _, job = source.waiting.popleft()
        if not source.waiting:
            del self._waiting[name]
        return job

    def end(self, source: str, cpu_s: float, now_s: float) -> list[Job]:
        """Free the slot of a source's job, which has used this CPU time. Return the source's jobs that are refused
        because its budget is used up; `refusal` is their error.
        """
        known = self._sources[source]
        known.budget_s, known.as_of_s = known.budget_at(now_s) - cpu_s, now_s
        known.is_compiling = False
        self._num_free += 1
        if known.budget_s > 0:
            return []
        refused = [job for _, job in known.waiting]
        self._num_waiting -= len(refused)
        known.waiting.clear()
        self._waiting.pop(source, None)
        return refused

    def refusal(self, source: str, now_s: float) -> LimitReached:
        """Return the error of a source whose budget is used up."""
        return _refusal(self._sources[source].budget_at(now_s))

    def check(self) -> None:
        """Raise AssertionError if anything is held although no job waits or runs."""
        assert not self._num_waiting and not self._waiting
        assert not any(each.waiting or each.is_compiling for each in self._sources.values())

    def _rank(self, source: _Source[Job], now_s: float) -> tuple[float, int]:
        number, _ = source.waiting[0]
        return source.budget_at(now_s), -number

    def _forget(self) -> None:
        """Keep the number of sources bounded: of those that neither wait nor compile, the one that asked first goes."""
        while len(self._sources) > _MAX_SOURCES:
            idle = next(name for name, each in self._sources.items() if not each.waiting and not each.is_compiling)
            del self._sources[idle]


def _refusal(budget_s: float) -> LimitReached:
    return LimitReached(
        COMPILE_LIMIT,
        f"this client's grammars have used the CPU time that they may, {_MOST_CPU_S:g} s and"
        f" {_CPU_S_PER_S:g} s in each further second; grammars that were compiled before cost none",
        retry_after_s=max(_LEAST_RETRY_S, -budget_s / _CPU_S_PER_S),
    )
