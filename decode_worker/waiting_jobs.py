"""Jobs that a decode worker has taken and not begun: their KV is on its way, or they wait for a place. Pure.

Owns their number and its bound, from the call that brings one to its first step: what the step thread has not looked at
yet counts too. The time is an argument.
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
        """Of one more."""
        if len(self._jobs) < self._max_jobs:
            return None
        return QueueFull(
            f"{len(self._jobs)} jobs wait here for their KV or a place, all that --max-queue and --max-num-seqs allow:"
            " try later",
            retry_after_s=self._rate.retry_after_s(),
        )

    def add(self, router: MemberId, handles: Iterable[int]) -> None:
        """The sequences of one job."""
        keys = {(router, handle) for handle in handles}
        self._jobs[self._next_number] = keys
        self._job_of.update(dict.fromkeys(keys, self._next_number))
        self._next_number += 1

    def remove(self, router: MemberId, handles: Iterable[int], now_s: float) -> None:
        """These have begun, or ended without; nothing for those that were not waiting."""
        for handle in handles:
            number = self._job_of.pop((router, handle), None)
            if number is None:
                continue
            job = self._jobs[number]
            job.discard((router, handle))
            if not job:
                del self._jobs[number]
                self._rate.note_end(now_s)
