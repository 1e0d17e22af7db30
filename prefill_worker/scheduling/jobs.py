"""What the prefill scheduler knows about its jobs. Pure. Owned by the scheduler alone."""

from dataclasses import dataclass

from cluster.messages import PrefillJob
from cluster.protocol.hashing import BlockChain
from engine.scheduling.policies import Work

_PREDICTED_TOKENS = 1  # all the output that a prefill makes comes with its last chunk


@dataclass(slots=True, eq=False)
class Waiting:
    number: int  # counts arrivals
    ticket_id: bytes
    job: PrefillJob
    submitted_s: float
    has_importer: bool  # turns False when Release says that nobody will come
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
    """Has its blocks. It is computed in every step, unless others that go before it leave nothing of the budget."""

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
        """It is in the step that is planned now."""
        if self.passed_over_s is not None:
            self.waited_s, self.num_before_wait = now_s - self.passed_over_s, self.num_computed
            self.passed_over_s = None

    def pass_turn(self, now_s: float) -> None:
        """The step that is planned now has nothing of it."""
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
