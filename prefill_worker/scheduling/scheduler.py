"""The prefill worker's scheduler: commands in, step plans and events out. Pure: no clock, no model, no waiting.

A job waits without blocks in a bounded queue. It starts when all blocks of its prompt are available at once, in the
policy's order; no job overtakes one that waits for blocks. Cached blocks of its prefix are shared, the others are
reserved and computed in chunks. A running job keeps its blocks but may get no tokens of a step: if jobs that a
preemptive policy ranks before it use the budget, or, for the batch class, any other jobs do. This module owns the table
of jobs and their blocks (prompt_blocks.py).
"""

from cluster import holders
from cluster.errors import Cancelled, Draining, InvalidRequest, QueueFull, StepFailed, TandemError
from cluster.messages import PrefillJob, SampledToken
from cluster.observe.service_rate import ServiceRate
from cluster.protocol.hashing import NATIVE, NewChain
from engine.scheduling.commands import Inspect, Inspected, LeasePrefix, Quiet, Release
from engine.scheduling.policies import FirstCome, Policy
from engine.scheduling.schedule import ChunkBudget, banned_token_ids, blocks_for, finish_reason
from engine.scheduling.step import Chunk, DrawnToken, Sample, StepPlan, StepResult
from prefill_worker.scheduling.commands import (
    Accepted,
    AdmitPull,
    AwaitCacheEvents,
    Cancel,
    CancelCacheEvents,
    Command,
    DiscardPull,
    Event,
    Failed,
    FindPrefix,
    Finished,
    LeaseForCopy,
    Leave,
    PrefixFound,
    Refused,
    ReservePull,
    Submit,
)
from prefill_worker.scheduling.jobs import JobTable, Running, Waiting, in_order, note_turns
from prefill_worker.scheduling.limits import PrefillLimits
from prefill_worker.scheduling.prompt_blocks import PromptBlocks

_FIRST_COME = FirstCome()


class PrefillScheduler:
    """Implements `engine.scheduling.step.Scheduler` for prompts."""

    def __init__(self, limits: PrefillLimits, *, new_chain: NewChain, policy: Policy = _FIRST_COME) -> None:
        self._limits = limits
        self._new_chain = new_chain
        self._policy = policy
        self._blocks = PromptBlocks(limits.num_blocks, limits.block_size, limits.prefix_eviction)
        self._jobs = JobTable()
        self._is_leaving = False
        self._rate = ServiceRate()
        self._steps = 0
        self._tokens_computed = 0
        self._tokens_cached = 0
        self._prompts_done = 0
        self._prompts_failed = 0

    def apply(self, command: Command, now_s: float) -> tuple[Event, ...]:
        match command:
            case Submit(ticket_id, job):
                return (self._submit(ticket_id, job, now_s),)
            case Cancel(ticket_id):
                return self._abort(ticket_id, Cancelled("the prefill was cancelled"))
            case Leave():
                return self._leave()
            case Release(ticket_id):
                self._release(ticket_id)
            case FindPrefix(question_id, block_hashes):
                return (PrefixFound(question_id, len(self._blocks.pool.find(block_hashes))),)
            case LeasePrefix():
                return (self._blocks.lease_prefix(command),)
            case LeaseForCopy(ticket_id, block_hashes, first):
                return (self._blocks.lease_for_copy(ticket_id, block_hashes, first),)
            case ReservePull():
                # Leave the blocks that jobs in the queue need.
                num_to_leave = sum(self._limits.num_needed(waiting.job) for waiting in self._jobs.queue)
                return (self._blocks.reserve_pull(command, num_to_leave=num_to_leave),)
            case AdmitPull():
                self._blocks.pulled.admit(command)
            case DiscardPull(pull_id, quarantined):
                self._blocks.pulled.discard(pull_id, quarantined)
            case Quiet(block_ids):
                self._blocks.pool.end_quarantine(sorted(block_ids))
            case AwaitCacheEvents():
                self._blocks.subscribers.add(command)
            case CancelCacheEvents(subscriber_id):
                self._blocks.subscribers.cancel(subscriber_id)
            case Inspect(inspection_id):
                return (self._inspect(inspection_id),)
        return ()

    def reap(self, now_s: float) -> tuple[tuple[Event, ...], float | None]:
        events: list[Event] = list(self._blocks.subscribers.due())
        for ticket_id, error in self._jobs.expired(now_s):
            events += self._abort(ticket_id, error)
        return tuple(events), self._jobs.next_deadline_s

    def plan(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        budget = ChunkBudget(self._limits.max_prefill_tokens)
        chunks, events, may_start = list[Chunk](), list[Event](), True
        for job in in_order(self._policy, self._jobs.running, self._jobs.queue, now_s):
            if isinstance(job, Waiting):
                started = self._start(job, now_s) if may_start else None
                if started is None:
                    may_start = False  # no job overtakes it
                    continue
                events += self._blocks.seal(started)
                job = started
            chunks.append(self._chunk(job, budget.take(job.num_left)))
            if not budget.left or len(chunks) == self._limits.max_num_seqs:
                break
        note_turns(self._jobs.running, {chunk.sequence_id for chunk in chunks}, now_s)
        return tuple(events), StepPlan(tuple(chunks)) if chunks else None

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        self._steps += 1
        events: list[Event] = []
        for chunk, drawn in zip(plan.chunks, result.tokens, strict=True):
            running = self._jobs[chunk.sequence_id]
            running.num_computed += len(chunk.token_ids)
            self._tokens_computed += len(chunk.token_ids)
            events += self._blocks.seal(running)
            if running.num_left == 0:
                events.append(self._finish(running, drawn, now_s))
        return tuple(events)

    def fail(self, plan: StepPlan, error: Exception, now_s: float) -> tuple[Event, ...]:
        self._steps += 1
        reason = StepFailed(f"the prefill's step failed: {type(error).__name__}: {error}")
        events: list[Event] = []
        for chunk in plan.chunks:
            events += self._abort(self._jobs[chunk.sequence_id].ticket_id, reason)
        return tuple(events)

    def check(self) -> None:
        """Raise AssertionError if the pool and the jobs disagree."""
        self._blocks.check(self._jobs.running)

    def holders(self) -> frozenset[str]:
        """Return the names of everything that holds blocks or waits for them."""
        jobs: list[Waiting | Running] = [*self._jobs.queue, *self._jobs.running]
        return frozenset((*self._blocks.holders(), *(holders.ticket(job.ticket_id) for job in jobs)))

    def _submit(self, ticket_id: bytes, job: PrefillJob, now_s: float) -> Event:
        is_used = self._blocks.has_leased(ticket_id) or self._jobs.find_waiting(ticket_id) is not None
        assert not is_used, f"ticket {ticket_id.hex()} used twice"
        refusal = self._refusal(job)
        if refusal is not None:
            return Refused(ticket_id, refusal)
        self._jobs.add(ticket_id, job, self._new_chain(job.cache_salt, NATIVE), now_s)
        return Accepted(ticket_id)

    def _refusal(self, job: PrefillJob) -> TandemError | None:
        if not job.token_ids or not job.seeds:
            return InvalidRequest("a prefill needs at least one token and one choice")
        if self._is_leaving:
            return Draining("this prefill worker is draining; try another")
        refusal = self._limits.refusal(job)
        if refusal is None and len(self._jobs.queue) >= self._limits.max_queue:
            refusal = QueueFull(
                f"{len(self._jobs.queue)} prefills are waiting and --max-queue is {self._limits.max_queue}: try later",
                retry_after_s=self._rate.retry_after_s(),
            )
        return refusal

    def _start(self, waiting: Waiting, now_s: float) -> Running | None:
        """Start a waiting job. Returns None if the pool lacks blocks for it."""
        reserved = self._blocks.reserve(waiting.chain, waiting.job.token_ids)
        if reserved is None:
            return None
        block_ids, num_cached = reserved
        self._tokens_cached += num_cached
        return self._jobs.start(waiting, block_ids, num_cached, now_s)

    def _chunk(self, running: Running, num_tokens: int) -> Chunk:
        start, end = running.num_computed, running.num_computed + num_tokens
        job = running.job
        samples: tuple[Sample, ...] = ()
        if end == len(job.token_ids):
            banned = banned_token_ids(job.stops, job.num_committed)
            samples = tuple(Sample(seed, end, job.sampling, banned) for seed in job.seeds)
        return Chunk(
            sequence_id=running.number,
            token_ids=job.token_ids[start:end],
            start=start,
            block_ids=running.block_ids[: blocks_for(end, self._limits.block_size)],
            samples=samples,
        )

    def _finish(self, running: Running, drawn: tuple[DrawnToken, ...], now_s: float) -> Event:
        tail = self._blocks.lease_tail(running)
        self._end(running)
        self._rate.note_end(now_s)
        self._prompts_done += 1
        num_output = running.job.num_committed + 1
        tokens = tuple(
            SampledToken(token.token_id, token.logprobs, finish_reason(running.job.stops, token.token_id, num_output))
            for token in drawn
        )
        return Finished(
            running.ticket_id, tokens, tail, running.num_cached, running.queue_s, now_s - running.started_s, now_s
        )

    def _abort(self, ticket_id: bytes, error: TandemError) -> tuple[Event, ...]:
        """End a job that is not finished. Does nothing if it has ended."""
        job = self._jobs.find_running(ticket_id) or self._jobs.find_waiting(ticket_id)
        if job is None:
            return ()
        self._end(job)
        self._prompts_failed += 1
        return (Failed(ticket_id, error),)

    def _end(self, job: Waiting | Running) -> None:
        self._jobs.end(job)
        if isinstance(job, Running):
            self._blocks.end(job)

    def _leave(self) -> tuple[Event, ...]:
        self._is_leaving = True
        reason = Draining("this prefill worker is draining and had not started this job; try another")
        return tuple(event for waiting in tuple(self._jobs.queue) for event in self._abort(waiting.ticket_id, reason))

    def _release(self, ticket_id: bytes) -> None:
        """End the leases of a ticket. A job that still waits or runs continues without an importer."""
        self._blocks.release(ticket_id, self._jobs.find_running(ticket_id))
        waiting = self._jobs.find_waiting(ticket_id)
        if waiting is not None:
            waiting.has_importer = False

    def _inspect(self, inspection_id: int) -> Event:
        violation = ""
        try:
            self.check()
        except AssertionError as error:
            violation = str(error)
        figures = {
            "waiting": len(self._jobs.queue),
            "running": len(self._jobs.running),
            "leased_tickets": self._blocks.num_tickets,
            "pulls": len(self._blocks.pulled),
            "steps": self._steps,
            "tokens_computed": self._tokens_computed,
            "tokens_cached": self._tokens_cached,
            "blocks_evicted": self._blocks.pool.num_evicted,
            "prompts_done": self._prompts_done,
            "prompts_failed": self._prompts_failed,
        }
        return Inspected(
            inspection_id,
            self._blocks.pool.counts(),
            {name: float(n) for name, n in figures.items()},
            violation,
            self.holders(),
        )
