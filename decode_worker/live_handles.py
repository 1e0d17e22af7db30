"""The live sequences of each router at a decode worker, from Start until their last token or error. Pure.

This module also stores the result of an import until the start of its sequences is reported. It counts the jobs that
wait for their KV or for a slot, from Start until their first step, and bounds their number; jobs that the step thread
has not received yet count too. The time is an argument.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from cluster.errors import QueueFull
from cluster.fair_queue import has_place
from cluster.messages import MemberId, TenantShare
from cluster.service_times import ServiceRate

Key = tuple[MemberId, int]  # a router and its handle


@dataclass(frozen=True, slots=True)
class Arrival:
    """The result of the import of a sequence, reported once with its start."""

    first_token_id: int
    queue_s: float  # until this worker had room for its blocks
    transfer_s: float
    kv_bytes: int
    transport: str


class LiveHandles:
    def __init__(self, *, max_waiting_jobs: int) -> None:
        self._live: dict[MemberId, set[int]] = {}
        self._arrivals: dict[Key, Arrival] = {}
        self._waiting = WaitingJobs(max_waiting_jobs)

    def limit_waiting_jobs(self, max_waiting_jobs: int) -> None:
        """Refuse further jobs while this many wait. Those that wait already stay."""
        self._waiting.max_jobs = max_waiting_jobs

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    @property
    def num_waiting_jobs(self) -> int:
        return len(self._waiting)

    def names(self) -> Iterator[Key]:
        """Return the router and the handle of every live sequence."""
        return ((router, handle) for router, handles in self._live.items() for handle in handles)

    def of(self, router: MemberId) -> frozenset[int]:
        return frozenset(self._live.get(router, ()))

    def refusal(self, tenant: TenantShare) -> QueueFull | None:
        """Return the error with which one more job of this tenant is refused, or None."""
        return self._waiting.refusal(tenant)

    def add_job(self, router: MemberId, handles: Collection[int], tenant: TenantShare, now_s: float) -> None:
        """Add the sequences of one Start call."""
        self._live.setdefault(router, set()).update(handles)
        self._waiting.add(router, handles, tenant, now_s)

    def add_thawed(self, router: MemberId, handle: int) -> None:
        """Add the new handle of a thawed sequence."""
        self._live.setdefault(router, set()).add(handle)

    def arrive(self, router: MemberId, handle: int, arrival: Arrival) -> None:
        self._arrivals[router, handle] = arrival

    def begin(self, router: MemberId, handles: Collection[int], now_s: float) -> dict[int, Arrival | None]:
        """Record that these sequences were in a step for the first time. Return the import of each that is still live;
        None if its prompt was prefilled here. Either all sequences of a job were imported or none."""
        self._waiting.remove(router, handles, now_s)
        here = self.of(router)
        begun = {handle: self._arrivals.pop((router, handle), None) for handle in handles if handle in here}
        assert len({arrival is None for arrival in begun.values()}) <= 1, f"some of {begun} came from another worker"
        return begun

    def remove(self, router: MemberId, handles: frozenset[int], now_s: float) -> None:
        """Remove sequences that ended or moved to another worker. Ignores handles that are not live."""
        self._waiting.remove(router, handles, now_s)
        live = self._live.get(router)
        if live is None:
            return
        live -= handles
        for handle in handles:
            self._arrivals.pop((router, handle), None)
        if not live:
            del self._live[router]


class WaitingJobs:
    """The jobs that the worker has accepted and not started."""

    def __init__(self, max_jobs: int) -> None:
        self.max_jobs = max_jobs
        self._jobs: dict[int, set[Key]] = {}
        self._added_s: dict[int, float] = {}  # by job
        self._tenants: dict[int, TenantShare] = {}  # by job
        self._job_of: dict[Key, int] = {}
        self._next_number = 0
        self._rate = ServiceRate()

    def __len__(self) -> int:
        return len(self._jobs)

    def refusal(self, tenant: TenantShare) -> QueueFull | None:
        """Return the error with which one more job of this tenant is refused, or None."""
        if has_place(tenant, [*self._tenants.values()], self.max_jobs):
            return None
        return QueueFull(
            f"{len(self._jobs)} jobs wait here for their KV or a place, the maximum for --max-queue and --max-num-seqs:"
            " try later",
            retry_after_s=self._rate.retry_after_s(),
        )

    def add(self, router: MemberId, handles: Iterable[int], tenant: TenantShare, now_s: float) -> None:
        """Add the sequences of one job."""
        keys = {(router, handle) for handle in handles}
        self._jobs[self._next_number], self._tenants[self._next_number] = keys, tenant
        self._added_s[self._next_number] = now_s
        self._job_of.update(dict.fromkeys(keys, self._next_number))
        self._next_number += 1

    def remove(self, router: MemberId, handles: Iterable[int], now_s: float) -> None:
        """Remove sequences that started or ended. Ignores sequences that were not waiting."""
        for handle in handles:
            number = self._job_of.pop((router, handle), None)
            if number is None:
                continue
            job = self._jobs[number]
            job.discard((router, handle))
            if not job:
                del self._jobs[number], self._tenants[number]
                self._rate.note_end(now_s, now_s - self._added_s.pop(number))
