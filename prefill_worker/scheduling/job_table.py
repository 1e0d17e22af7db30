"""The jobs of a prefill worker, from Submit to their end: those that wait, those that run, and their deadlines. Pure.

Owned by the prefill scheduler, which decides who starts and who ends. Knows no block.
"""

from collections.abc import Collection, Iterator
from itertools import count

from cluster.errors import DeadlineExceeded
from cluster.messages import PrefillJob
from cluster.protocol.hashing import BlockChain
from engine.scheduling.deadlines import Deadlines
from prefill_worker.scheduling.jobs import Running, Waiting


class JobTable:
    def __init__(self) -> None:
        self._queue: dict[bytes, Waiting] = {}  # oldest first
        self._running: dict[int, Running] = {}  # by number
        self._deadlines: Deadlines[bytes] = Deadlines()
        self._numbers = count()

    @property
    def queue(self) -> Collection[Waiting]:
        return self._queue.values()

    @property
    def running(self) -> Collection[Running]:
        return self._running.values()

    @property
    def next_deadline_s(self) -> float | None:
        return self._deadlines.next_s()

    def __getitem__(self, number: int) -> Running:
        return self._running[number]

    def find_waiting(self, ticket_id: bytes) -> Waiting | None:
        return self._queue.get(ticket_id)

    def find_running(self, ticket_id: bytes) -> Running | None:
        return next((running for running in self._running.values() if running.ticket_id == ticket_id), None)

    def add(self, ticket_id: bytes, job: PrefillJob, chain: BlockChain, now_s: float) -> None:
        self._queue[ticket_id] = Waiting(
            number=next(self._numbers),
            ticket_id=ticket_id,
            job=job,
            submitted_s=now_s,
            has_importer=job.importer is not None,
            chain=chain,
        )
        self._deadlines.add(ticket_id, now_s + job.timeout_s)

    def start(self, waiting: Waiting, block_ids: tuple[int, ...], num_cached: int, now_s: float) -> Running:
        """It has its blocks, of which the first hold `num_cached` tokens."""
        del self._queue[waiting.ticket_id]
        queue_s = now_s - waiting.submitted_s
        running = self._running[waiting.number] = Running(
            number=waiting.number,
            ticket_id=waiting.ticket_id,
            job=waiting.job,
            has_importer=waiting.has_importer,
            block_ids=block_ids,
            chain=waiting.chain,
            num_cached=num_cached,
            num_computed=num_cached,
            queue_s=queue_s,
            started_s=now_s,
            waited_s=queue_s,
            num_before_wait=num_cached,
        )
        return running

    def end(self, job: Waiting | Running) -> None:
        if isinstance(job, Waiting):
            del self._queue[job.ticket_id]
        else:
            del self._running[job.number]
        self._deadlines.discard(job.ticket_id)

    def expired(self, now_s: float) -> Iterator[tuple[bytes, DeadlineExceeded]]:
        """Jobs whose time has passed, each told once, with what to say of it. Whoever asks ends them."""
        for ticket_id in self._deadlines.due(now_s):
            yield ticket_id, self._expiry(ticket_id)

    def _expiry(self, ticket_id: bytes) -> DeadlineExceeded:
        running = self.find_running(ticket_id)
        if running is None:
            return DeadlineExceeded(f"{self._queue[ticket_id].job.timeout_s:.3g} s passed in the prefill queue")
        job = running.job
        return DeadlineExceeded(
            f"{job.timeout_s:.3g} s passed in prefill, after {running.num_computed} of {len(job.token_ids)} tokens"
        )
