"""The live sequences of each router, from Start until their last token or error.

This module also stores the result of an import until the start of its sequences is reported, and signals when no
sequence is left. It runs on the event loop; the time is an argument.
"""

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cluster.errors import QueueFull
from cluster.messages import MemberId
from decode_worker.waiting_jobs import WaitingJobs


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
        self._arrivals: dict[tuple[MemberId, int], Arrival] = {}
        self._waiting = WaitingJobs(max_waiting_jobs)
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    @property
    def num_waiting_jobs(self) -> int:
        return len(self._waiting)

    def names(self) -> Iterator[tuple[MemberId, int]]:
        """Return the router and the handle of every live sequence."""
        return ((router, handle) for router, handles in self._live.items() for handle in handles)

    def of(self, router: MemberId) -> frozenset[int]:
        return frozenset(self._live.get(router, ()))

    def refusal(self) -> QueueFull | None:
        """Return the error with which one more job is refused, or None."""
        return self._waiting.refusal()

    def add_job(self, router: MemberId, handles: Collection[int]) -> None:
        """Add the sequences of one Start call."""
        self._live.setdefault(router, set()).update(handles)
        self._waiting.add(router, handles)
        self._idle.clear()

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
        if not self._live:
            self._idle.set()

    async def until_none(self) -> None:
        await self._idle.wait()
