"""Which sequences of which router are on this decode worker, from the call that brings one to its last word.

Owns what an import told about them until their start is reported, and when none is left. On the event loop; the time is
an argument.
"""

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cluster.errors import QueueFull
from cluster.messages import MemberId
from decode_worker.waiting_jobs import WaitingJobs


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a sequence's KV came here; reported once, with its start."""

    first_token_id: int
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
        """Routers and handles."""
        return ((router, handle) for router, handles in self._live.items() for handle in handles)

    def of(self, router: MemberId) -> frozenset[int]:
        return frozenset(self._live.get(router, ()))

    def refusal(self) -> QueueFull | None:
        """Of one more job."""
        return self._waiting.refusal()

    def add_job(self, router: MemberId, handles: Collection[int]) -> None:
        """The sequences of one Start."""
        self._live.setdefault(router, set()).update(handles)
        self._waiting.add(router, handles)
        self._idle.clear()

    def add_thawed(self, router: MemberId, handle: int) -> None:
        """The new name of a sequence that is here."""
        self._live.setdefault(router, set()).add(handle)

    def arrive(self, router: MemberId, handle: int, arrival: Arrival) -> None:
        self._arrivals[router, handle] = arrival

    def begin(self, router: MemberId, handles: Collection[int], now_s: float) -> dict[int, Arrival | None]:
        """They were in a step for the first time. How each of those that are still here came; None when its prompt was
        prefilled here. Of one job either all came from another worker or none."""
        self._waiting.remove(router, handles, now_s)
        here = self.of(router)
        begun = {handle: self._arrivals.pop((router, handle), None) for handle in handles if handle in here}
        assert len({arrival is None for arrival in begun.values()}) <= 1, f"some of {begun} came from another worker"
        return begun

    def remove(self, router: MemberId, handles: frozenset[int], now_s: float) -> None:
        """They ended, or go on elsewhere. Nothing for those that are not here."""
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
