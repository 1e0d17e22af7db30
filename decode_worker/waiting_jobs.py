"""The jobs that a decode worker has accepted but not started: they wait for their KV or for a slot. Pure.

This module counts them, from Start until their first step, and bounds their number. Jobs that the step thread has not
received yet count too. The time is an argument.
"""

from collections.abc import Iterable

from cluster.errors import QueueFull
from cluster.messages import MemberId
from cluster.observe.service_rate import ServiceRate

Key = tuple[MemberId, int]  # a router and its handle


class WaitingJobs:
    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: dict[int, set[Key]] = {}
        self._job_of: dict[Key, int] = {}
        self._next_number = 0
        self._rate = ServiceRate()

    def __len__(self) -> int:
        return len(self._jobs)

    def refusal(self) -> QueueFull | None:
        """Return the error with which one more job is refused, or None."""
        if len(self._jobs) < self._max_jobs:
            return None
        return QueueFull(
            f"{len(self._jobs)} jobs wait here for their KV or a place, the maximum for --max-queue and --max-num-seqs:"
            " try later",
            retry_after_s=self._rate.retry_after_s(),
        )

    def add(self, router: MemberId, handles: Iterable[int]) -> None:
        """Add the sequences of one job."""
        keys = {(router, handle) for handle in handles}
        self._jobs[self._next_number] = keys
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
                del self._jobs[number]
                self._rate.note_end(now_s)
