"""The prefill scheduler's jobs: their state, their order, and the table of those that wait or run. Pure. Owned by the
scheduler alone.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from cluster.errors import DeadlineExceeded
from cluster.messages import PrefillJob
from cluster.protocol.hashing import BlockChain
from engine.scheduling.policies import Policy, Work, full_rank
from engine.scheduling.schedule import Deadlines

_PREDICTED_TOKENS = 1  # all the output that a prefill makes comes with its last chunk


@dataclass(slots=True, eq=False)
class Waiting:
    number: int  # counts arrivals
    ticket_id: bytes
    job: PrefillJob
    submitted_s: float
    has_importer: bool  # turns False with Release: no importer will come
    chain: BlockChain

    def work(self, now_s: float) -> Work:
        return Work(
            arrival=self.number,
            arrived_s=self.submitted_s - self.job.age_s,
            deadline_s=self.submitted_s + self.job.timeout_s,
            num_prompt=len(self.job.token_ids),
            predicted_tokens=_PREDICTED_TOKENS,
            priority=self.job.priority,
            is_batch=self.job.is_batch,
            is_resumed=self.job.is_interrupted,
            waited_s=now_s - self.submitted_s,
        )


@dataclass(slots=True, eq=False)
class Running:
    """A job with its blocks. It is computed in every step unless jobs that rank before it use the whole budget."""

    number: int
    ticket_id: bytes
    job: PrefillJob
    has_importer: bool
    block_ids: tuple[int, ...]
    chain: BlockChain
    num_cached: int  # leading tokens that were in the cache
    queue_s: float
    started_s: float
    num_computed: int
    waited_s: float  # its last wait, before it was computed
    num_before_wait: int  # tokens that were computed before that wait's end
    num_leased: int = 0  # leading blocks that are sealed and leased
    num_kept: int = 0  # leading blocks that are sealed and in the prefix cache
    passed_over_s: float | None = None  # since when steps go on without it

    @property
    def num_left(self) -> int:
        return len(self.job.token_ids) - self.num_computed

    def take_turn(self, now_s: float) -> None:
        """Record that the step which is being planned computes tokens of this job."""
        if self.passed_over_s is not None:
            self.waited_s, self.num_before_wait = now_s - self.passed_over_s, self.num_computed
            self.passed_over_s = None

    def pass_turn(self, now_s: float) -> None:
        """Record that the step which is being planned computes no token of this job."""
        if self.passed_over_s is None:
            self.passed_over_s = now_s

    def work(self, now_s: float) -> Work:
        submitted_s = self.started_s - self.queue_s
        return Work(
            arrival=self.number,
            arrived_s=submitted_s - self.job.age_s,
            deadline_s=submitted_s + self.job.timeout_s,
            num_prompt=len(self.job.token_ids) - self.num_cached,
            num_done=self.num_computed - self.num_cached,
            predicted_tokens=_PREDICTED_TOKENS,
            priority=self.job.priority,
            is_batch=self.job.is_batch,
            is_resumed=self.job.is_interrupted,
            waited_s=now_s - self.passed_over_s if self.passed_over_s is not None else self.waited_s,
            num_since_wait=self.num_computed - self.num_before_wait if self.passed_over_s is None else 0,
        )


def in_order(
    policy: Policy, running: Collection[Running], queue: Collection[Waiting], now_s: float
) -> Iterator[Running | Waiting]:
    """Yield jobs in the order in which they get tokens: running jobs before waiting ones unless the policy is
    preemptive, and the batch class last. Jobs may start or end during the iteration."""
    for is_batch in (False, True):
        started = [job for job in running if job.job.is_batch == is_batch]
        waiting = [job for job in queue if job.job.is_batch == is_batch]
        groups: Sequence[Sequence[Running | Waiting]] = (started, waiting)
        if policy.is_preemptive:
            groups = ((*started, *waiting),)
        for jobs in groups:  # if running jobs use the whole budget, the queue is never sorted
            yield from sorted(jobs, key=lambda job: full_rank(policy, job.work(now_s), now_s))


def note_turns(running: Collection[Running], planned: Collection[int], now_s: float) -> None:
    """Record for each job whether the step contains it. `planned`: the numbers of the jobs in the step."""
    for job in running:
        if job.number in planned:
            job.take_turn(now_s)
        else:
            job.pass_turn(now_s)


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
        """Move a waiting job to the running ones. Its leading blocks hold `num_cached` tokens already."""
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
        """Jobs whose time has passed, each returned once, with its error. The caller ends them."""
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
