"""Which prompts the prefill worker computes next, and whose blocks are whose. Pure: no clock, no model, no waiting.

Owns the block pool and the queue. A prompt waits in the bounded queue holding nothing; it starts when its whole
prompt's blocks can be had at once, in the policy's order, nobody overtaking: those that hold its beginning already are
shared, the rest is reserved and computed by chunks. One that runs may be passed over, and keeps its blocks: by those
that a preemptive policy puts first, and by everybody when it is of the batch class. Blocks are leased as they are
sealed when an importer will come for them, and stay leased, whatever becomes of the job, until Release; they are kept
for prompts that begin alike.
"""

from collections import Counter
from itertools import count

from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    TandemError,
)
from cluster.hashing import NATIVE, NewChain
from cluster.lengths import NO_LIMITS, LengthLimits
from cluster.messages import Inspect, Inspected, PrefillJob, SampledToken
from cluster.service_rate import ServiceRate
from engine.block_pool import BlockPool
from engine.deadlines import Deadlines
from engine.policies import FirstCome, Policy
from engine.schedule import ChunkBudget, blocks_for, sealed_blocks, tail_length
from engine.step import Chunk, DrawnToken, Sample, StepPlan, StepResult
from engine.stops import banned_token_ids, finish_reason
from prefill_worker.commands import (
    Accepted,
    AdmitPull,
    Cancel,
    Command,
    DiscardPull,
    Event,
    Failed,
    FindPrefix,
    Finished,
    FollowPrefixes,
    Leave,
    LendPrefix,
    OfferPrefix,
    PrefixFound,
    PrefixLent,
    PrefixOffered,
    PullReserved,
    Quiet,
    Refused,
    Release,
    ReservePull,
    Sealed,
    Submit,
    Tail,
    UnfollowPrefixes,
)
from prefill_worker.jobs import Running, Waiting
from prefill_worker.prefix_followers import PrefixFollowers
from prefill_worker.pulled_blocks import PulledBlocks
from prefill_worker.turns import in_order, note_turns

_FIRST_COME = FirstCome()


class PrefillScheduler:
    """Implements `engine.step.Scheduler` for prompts."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_prefill_tokens: int,
        max_num_seqs: int,
        max_queue: int,
        new_chain: NewChain,
        policy: Policy = _FIRST_COME,
        lengths: LengthLimits = NO_LIMITS,
        prefix_eviction: str = "value",
    ) -> None:
        self._pool = BlockPool(num_blocks, prefix_eviction)
        self._pulled = PulledBlocks(self._pool)
        self._followers = PrefixFollowers(self._pool)
        self._block_size = block_size
        self._max_prefill_tokens = max_prefill_tokens
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._new_chain = new_chain
        self._policy = policy
        self._lengths = lengths
        self._queue: dict[bytes, Waiting] = {}  # oldest first
        self._running: dict[int, Running] = {}  # by number
        self._leased: dict[bytes, tuple[int, ...]] = {}  # what ended tickets still have pinned
        self._deadlines: Deadlines[bytes] = Deadlines()
        self._is_leaving = False
        self._numbers = count()
        self._steps = 0
        self._tokens_computed = 0
        self._tokens_cached = 0
        self._rate = ServiceRate()
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
                return ()
            case FindPrefix(question_id, block_hashes):
                return (PrefixFound(question_id, len(self._pool.find(block_hashes))),)
            case OfferPrefix():
                return (self._offer_prefix(command),)
            case LendPrefix(ticket_id, block_hashes, first):
                block_ids = self._leased[ticket_id] = self._pool.find(block_hashes)[first:]
                self._pool.lease_copied(block_ids)
                return (PrefixLent(ticket_id, block_ids),)
            case ReservePull():
                return (self._reserve_pull(command),)
            case AdmitPull(pull_id, root, block_hashes):
                self._pulled.admit(pull_id, block_hashes, root)
                return ()
            case DiscardPull(pull_id, quarantined):
                self._pulled.discard(pull_id, quarantined)
                return ()
            case Quiet(block_ids):
                self._pool.end_quarantine(sorted(block_ids))
                return ()
            case FollowPrefixes():
                self._followers.follow(command)
                return ()
            case UnfollowPrefixes(follower_id):
                self._followers.unfollow(follower_id)
                return ()
            case Inspect(inspection_id):
                return (self._inspect(inspection_id),)

    def reap(self, now_s: float) -> tuple[tuple[Event, ...], float | None]:
        events: list[Event] = list(self._followers.due())
        for ticket_id in self._deadlines.due(now_s):
            events += self._abort(ticket_id, self._expiry(ticket_id))
        return tuple(events), self._deadlines.next_s()

    def plan(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        budget = ChunkBudget(self._max_prefill_tokens)
        chunks, events, may_start = list[Chunk](), list[Event](), True
        for job in in_order(self._policy, self._running.values(), self._queue.values(), now_s):
            if isinstance(job, Waiting):
                started = self._start(job, now_s) if may_start else None
                if started is None:
                    may_start = False  # nobody overtakes it
                    continue
                events += self._seal(started)
                job = started
            chunks.append(self._chunk(job, budget.take(job.num_left)))
            if not budget.left or len(chunks) == self._max_num_seqs:
                break
        note_turns(self._running.values(), {chunk.sequence_id for chunk in chunks}, now_s)
        return tuple(events), StepPlan(tuple(chunks)) if chunks else None

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        self._steps += 1
        events: list[Event] = []
        for chunk, drawn in zip(plan.chunks, result.tokens, strict=True):
            running = self._running[chunk.sequence_id]
            running.num_computed += len(chunk.token_ids)
            self._tokens_computed += len(chunk.token_ids)
            events += self._seal(running)
            if running.num_left == 0:
                events.append(self._finish(running, drawn, now_s))
        return tuple(events)

    def fail(self, plan: StepPlan, error: Exception, now_s: float) -> tuple[Event, ...]:
        self._steps += 1
        reason = InternalError(f"the prefill's step failed: {type(error).__name__}: {error}")
        events: list[Event] = []
        for chunk in plan.chunks:
            events += self._abort(self._running[chunk.sequence_id].ticket_id, reason)
        return tuple(events)

    def check(self) -> None:
        """Raises AssertionError when the pool and the jobs disagree."""
        self._pool.check()
        references = [0] * self._pool.num_blocks
        for running in self._running.values():
            for block_id in running.block_ids:
                references[block_id] += 1
        for block_id in self._pulled.block_ids:
            references[block_id] += 1
        self._pool.check_references(references)
        leases = Counter(block_id for block_ids in self._leased.values() for block_id in block_ids)
        for running in self._running.values():
            leases.update(running.block_ids[: running.num_leased])
        self._pool.check_leases(leases)

    def _submit(self, ticket_id: bytes, job: PrefillJob, now_s: float) -> Event:
        assert ticket_id not in self._queue and ticket_id not in self._leased, f"ticket {ticket_id.hex()} used twice"
        refusal = self._refusal(job)
        if refusal is not None:
            return Refused(ticket_id, refusal)
        self._queue[ticket_id] = Waiting(
            number=next(self._numbers),
            ticket_id=ticket_id,
            job=job,
            submitted_s=now_s,
            has_importer=job.importer is not None,
            chain=self._new_chain(job.cache_salt, NATIVE),
        )
        self._deadlines.add(ticket_id, now_s + job.timeout_s)
        return Accepted(ticket_id)

    def _refusal(self, job: PrefillJob) -> TandemError | None:
        if not job.token_ids or not job.seeds:
            return InvalidRequest("a prefill needs at least one token and one choice")
        if self._is_leaving:
            return Draining("this prefill worker is leaving; try another")
        refusal = self._lengths.refusal(len(job.token_ids) - job.num_committed, job.stops.max_tokens)
        if refusal is not None:
            return refusal
        num_needed = blocks_for(len(job.token_ids), self._block_size)
        if num_needed > self._pool.num_blocks:
            return PromptTooLong(
                f"the prompt has {len(job.token_ids)} tokens; this worker's KV pool holds"
                f" {self._pool.num_blocks * self._block_size}: shorten it, or give the worker more --kv-cache-memory"
            )
        if len(self._queue) >= self._max_queue:
            return QueueFull(
                f"{len(self._queue)} prefills are waiting and --max-queue is {self._max_queue}: try later",
                retry_after_s=self._rate.retry_after_s(),
            )
        return None

    def _start(self, waiting: Waiting, now_s: float) -> Running | None:
        """None: its blocks cannot be had now."""
        token_ids = waiting.job.token_ids
        waiting.chain.extend(token_ids)
        # At least the last token is computed: its logits are the answer. The block it is in stays this job's own.
        cached = self._pool.find(waiting.chain.hashes[: sealed_blocks(len(token_ids) - 1, self._block_size)])
        num_missing = blocks_for(len(token_ids), self._block_size) - len(cached)
        block_ids = self._pool.reserve_beside(cached, num_missing)
        if block_ids is None:
            return None
        num_cached = len(cached) * self._block_size
        self._tokens_cached += num_cached
        del self._queue[waiting.ticket_id]
        running = Running(
            number=waiting.number,
            ticket_id=waiting.ticket_id,
            job=waiting.job,
            has_importer=waiting.has_importer,
            block_ids=block_ids,
            chain=waiting.chain,
            num_cached=num_cached,
            num_computed=num_cached,
            queue_s=now_s - waiting.submitted_s,
            started_s=now_s,
            waited_s=now_s - waiting.submitted_s,
            num_before_wait=num_cached,
        )
        self._running[running.number] = running
        return running

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
            block_ids=running.block_ids[: blocks_for(end, self._block_size)],
            samples=samples,
        )

    def _seal(self, running: Running) -> tuple[Event, ...]:
        """Blocks that are written for ever: kept for others with the same beginning, and offered to the importer."""
        num_sealed = sealed_blocks(running.num_computed, self._block_size)
        self._keep(running, num_sealed)
        newly_sealed = running.block_ids[running.num_leased : num_sealed]
        if not running.has_importer or not newly_sealed:
            return ()
        self._pool.lease(newly_sealed)
        first_index, running.num_leased = running.num_leased, num_sealed
        return (Sealed(running.ticket_id, first_index, newly_sealed),)

    def _keep(self, running: Running, num_sealed: int) -> None:
        chain, first, running.num_kept = running.chain, running.num_kept, num_sealed
        self._pool.keep(running.block_ids[first:num_sealed], chain.hashes[first:num_sealed], chain.parent_of(first))

    def _finish(self, running: Running, drawn: tuple[DrawnToken, ...], now_s: float) -> Event:
        num_valid = tail_length(len(running.job.token_ids), self._block_size)
        tail = None
        if running.has_importer and num_valid:
            tail = Tail(running.block_ids[-1], num_valid)
            self._pool.lease((tail.block_id,))
            running.num_leased += 1
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

    def _end(self, running: Running) -> None:
        """The computation is over: drops its references. What is leased stays so until Release."""
        del self._running[running.number]
        self._deadlines.discard(running.ticket_id)
        self._pool.release(running.block_ids)
        if running.num_leased:
            self._leased[running.ticket_id] = running.block_ids[: running.num_leased]

    def _abort(self, ticket_id: bytes, error: TandemError) -> tuple[Event, ...]:
        """Ends it before its time; nothing when it had ended."""
        running = self._find_running(ticket_id)
        if running is not None:
            self._end(running)
        elif self._queue.pop(ticket_id, None) is not None:
            self._deadlines.discard(ticket_id)
        else:
            return ()
        self._prompts_failed += 1
        return (Failed(ticket_id, error),)

    def _leave(self) -> tuple[Event, ...]:
        self._is_leaving = True
        reason = Draining("this prefill worker is leaving, and had not begun with it; try another")
        return tuple(event for ticket_id in tuple(self._queue) for event in self._abort(ticket_id, reason))

    def _release(self, ticket_id: bytes) -> None:
        """Ends the leases of a ticket. One that still waits or runs goes on without an importer."""
        self._pool.end_lease(self._leased.pop(ticket_id, ()))
        running = self._find_running(ticket_id)
        if running is not None:
            self._pool.end_lease(running.block_ids[: running.num_leased])
            running.num_leased = 0
            running.has_importer = False
        elif ticket_id in self._queue:
            self._queue[ticket_id].has_importer = False

    def _offer_prefix(self, command: OfferPrefix) -> Event:
        assert command.ticket_id not in self._leased, f"ticket {command.ticket_id.hex()} used twice"
        block_ids = self._pool.find(command.block_hashes)
        if len(block_ids) < command.min_blocks:
            return PrefixOffered(command.ticket_id, ())
        self._leased[command.ticket_id] = block_ids
        self._pool.lease_found(block_ids)
        return PrefixOffered(command.ticket_id, block_ids)

    def _reserve_pull(self, command: ReservePull) -> Event:
        """What waits in the queue may need comes first."""
        waiting = (blocks_for(len(waiting.job.token_ids), self._block_size) for waiting in self._queue.values())
        granted = self._pulled.reserve(command.pull_id, command.block_hashes, num_to_leave=sum(waiting))
        if granted is None:
            return PullReserved(command.pull_id, None, 0)
        block_ids, num_cached = granted
        return PullReserved(command.pull_id, block_ids, num_cached)

    def _find_running(self, ticket_id: bytes) -> Running | None:
        return next((running for running in self._running.values() if running.ticket_id == ticket_id), None)

    def _expiry(self, ticket_id: bytes) -> DeadlineExceeded:
        running = self._find_running(ticket_id)
        if running is None:
            return DeadlineExceeded(f"{self._queue[ticket_id].job.timeout_s:.3g} s passed in the prefill queue")
        job = running.job
        return DeadlineExceeded(
            f"{job.timeout_s:.3g} s passed in prefill, after {running.num_computed} of {len(job.token_ids)} tokens"
        )

    def _inspect(self, inspection_id: int) -> Event:
        violation = ""
        try:
            self.check()
        except AssertionError as error:
            violation = str(error)
        figures = {
            "waiting": len(self._queue),
            "running": len(self._running),
            "leased_tickets": len(self._leased),
            "pulls": len(self._pulled),
            "steps": self._steps,
            "tokens_computed": self._tokens_computed,
            "tokens_cached": self._tokens_cached,
            "blocks_evicted": self._pool.num_evicted,
            "prompts_done": self._prompts_done,
            "prompts_failed": self._prompts_failed,
        }
        return Inspected(inspection_id, self._pool.counts(), {name: float(n) for name, n in figures.items()}, violation)
