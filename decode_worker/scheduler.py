"""Which sequences the decode worker computes next, and whose blocks are whose. Pure: no clock, no model, no waiting.

Owns the block pool, the sequences and the reservations of hand-offs. One rule settles every contest for slots and
blocks: the older arrival goes first, and what a running sequence needs comes before anything that is not running.

* A hand-off reserves all its blocks at once, above a watermark of free blocks for running and preempted sequences.
* A local prefill reserves its known tokens' blocks at once. Its choices share them, and part at the prompt's end.
* A decoding sequence grows by one block when it crosses a boundary. When none is free the youngest sequence that holds
  blocks is preempted: its blocks are freed, and it waits, at its age, to be computed again from its known tokens. If
  the youngest is the one that wants to grow, it skips steps, keeping what it has, until an older one ends or takes it.

Nothing waits in a circle: the oldest sequence gets every block except those of hand-offs under way and of quarantine,
which end by themselves and wait for nothing here; what cannot fit into the whole pool is refused at admission.
"""

from cluster.errors import DeadlineExceeded, DuplicateRequest, InternalError, QueueFull, TandemError
from cluster.messages import DecodeJob, Inspect, Inspected, MemberId, SampledToken, SequenceStart
from decode_worker.commands import (
    AdmitImported,
    AdmitLocal,
    CancelSequences,
    Command,
    Discard,
    Event,
    Failed,
    Quiet,
    Reserve,
    Reserved,
    SequenceToken,
    Started,
    StepTokens,
    Unreservable,
)
from decode_worker.limits import DecodeLimits
from decode_worker.reservations import Claim, Reservations
from decode_worker.sequences import ByAge, Group, Sequence
from engine.block_pool import BlockPool
from engine.deadlines import Deadlines
from engine.schedule import ChunkBudget, blocks_for
from engine.step import BlockCopy, Chunk, DrawnToken, Sample, StepPlan, StepResult
from engine.stops import banned_token_ids, finish_reason


class DecodeScheduler:
    """Implements `engine.step.Scheduler`."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._pool = BlockPool(limits.num_blocks)
        self._reservations = Reservations(self._pool)
        self._running = ByAge()  # have blocks and a slot
        self._imported = ByAge()  # have blocks, wait for a slot
        self._waiting = ByAge()  # have nothing
        self._sequences: dict[tuple[MemberId, int], Sequence] = {}  # of every live (router, handle)
        self._groups: dict[int, Group] = {}
        self._deadlines: Deadlines[int] = Deadlines()  # by group number
        self._in_step: list[Sequence] = []  # of the plan that is being computed, in its order
        self._started: list[Event] = []  # told with the outcome of their first step
        self._next_arrival = 0
        self._next_number = 0
        self._steps = 0
        self._preemptions = 0
        self._tokens_drawn = 0
        self._tokens_computed = 0
        self._sequences_done = 0

    def apply(self, command: Command, now_s: float) -> tuple[Event, ...]:
        events: tuple[Event, ...] = ()
        match command:
            case Reserve():
                events = self._reserve(command)
            case Discard(handoff_id, quarantined):
                self._reservations.discard(handoff_id, quarantined)
            case Quiet(block_ids):
                self._pool.end_quarantine(sorted(block_ids))
            case AdmitImported():
                events = self._admit_imported(command, now_s)
            case AdmitLocal(job):
                events = self._admit_local(job, now_s)
            case CancelSequences(router, handles):
                for handle in sorted(handles):
                    self._end_choice(router, handle)
            case Inspect(inspection_id):
                events = (self._inspect(inspection_id),)
        return events + self._grant_reservations()

    def reap(self, now_s: float) -> tuple[tuple[Event, ...], float | None]:
        events: list[Event] = []
        for number in self._deadlines.due(now_s):
            events.append(self._expire(self._groups[number]))
        return tuple(events) + (self._grant_reservations() if events else ()), self._deadlines.next_s()

    def plan(self, now_s: float) -> StepPlan | None:
        self._join_imported(now_s)
        decoding = self._growing()
        budget = ChunkBudget(self._limits.max_prefill_tokens, len(decoding))
        chunks = [(sequence, 1) for sequence in decoding]
        for sequence in self._running:
            if sequence.num_left > 1 and budget.left:
                chunks.append((sequence, budget.take(sequence.num_left)))
        while budget.left and (started := self._start_waiting(now_s)) is not None:
            chunks.append((started, budget.take(started.num_left)))
        copies = [copy for sequence in decoding for copy in self._private_tail(sequence)]
        self._in_step = [sequence for sequence, _ in chunks]
        planned = tuple(self._chunk(sequence, num_tokens) for sequence, num_tokens in chunks)
        return StepPlan(planned, tuple(copies)) if planned else None

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        self._steps += 1
        tokens: list[SequenceToken] = []
        for sequence, chunk, drawn in zip(self._in_step, plan.chunks, result.tokens, strict=True):
            sequence.num_computed += len(chunk.token_ids)
            self._tokens_computed += len(chunk.token_ids)
            if drawn:
                tokens += self._append(sequence, drawn)
        self._tokens_drawn += len(tokens)
        events = self._take_started()
        if tokens:
            events += (StepTokens(self._steps, tuple(tokens)),)
        return events + self._grant_reservations()

    def fail(self, plan: StepPlan, error: Exception, now_s: float) -> tuple[Event, ...]:
        self._steps += 1
        reason = InternalError(f"the step of these sequences failed: {type(error).__name__}: {error}")
        failed: dict[int, list[int]] = {}
        for sequence in self._in_step:
            failed.setdefault(sequence.group.number, []).extend(start.handle for _, start in sequence.choices)
        events = self._take_started()
        for number, handles in failed.items():
            router = self._groups[number].job.router
            for handle in handles:
                self._end_choice(router, handle)
            events += (Failed(router, tuple(handles), reason),)
        return events + self._grant_reservations()

    def check(self) -> None:
        """Raises AssertionError when the pool and its users disagree."""
        self._pool.check()
        references = [0] * self._pool.num_blocks
        for sequence in (*self._running, *self._imported):
            for block_id in sequence.block_ids + sequence.spare_ids:
                references[block_id] += 1
        for block_id in self._reservations.granted_block_ids:
            references[block_id] += 1
        for block_id, expected in enumerate(references):
            found = self._pool.references(block_id)
            assert found == expected, f"block {block_id} has {found} references, its users account for {expected}"
        assert not any(sequence.block_ids or sequence.spare_ids for sequence in self._waiting), "one waits with blocks"
        live = {id(sequence) for sequence in (*self._running, *self._imported, *self._waiting)}
        assert {id(sequence) for sequence in self._sequences.values()} == live, "a sequence is lost"
        assert sum(group.num_live for group in self._groups.values()) == len(self._sequences), "a choice is lost"
        assert self._running.num_choices <= self._limits.max_num_seqs, f"{self._running.num_choices} running"

    # Admission

    def _reserve(self, command: Reserve) -> tuple[Event, ...]:
        refusal = self._limits.reservation_refusal(command.num_blocks)
        if refusal is None and self._reservations.num_waiting >= self._limits.max_queue:
            refusal = QueueFull(f"{self._limits.max_queue} hand-offs wait for blocks, which is --max-queue: try later")
        if refusal is not None:
            return (Unreservable(command.handoff_id, refusal),)
        self._reservations.claim(Claim(self._arrival(), command.handoff_id, command.num_blocks))
        return ()

    def _grant_reservations(self) -> tuple[Event, ...]:
        if not self._reservations.num_waiting:
            return ()
        granted = self._reservations.grant(self._blocks_to_leave)
        return tuple(Reserved(handoff_id, block_ids) for handoff_id, block_ids in granted)

    def _blocks_to_leave(self, claim: Claim) -> int:
        older = (sequence for sequence in self._waiting if sequence.group.number < claim.number)
        return self._limits.num_watermark_blocks + sum(map(self._num_needed, older))

    def _admit_imported(self, command: AdmitImported, now_s: float) -> tuple[Event, ...]:
        job, grant = command.job, self._reservations.take(command.handoff_id)
        if grant is None:
            return (_failed(job, InternalError(f"hand-off {command.handoff_id} has no blocks here")),)
        refusal = self._refusal(job) or self._limits.import_refusal(command, grant.block_ids)
        if refusal is None and any(token_id is not None for token_id in command.first_tokens):
            self._admit_choices(command, grant.number, now_s)
        self._pool.release(grant.block_ids)  # what no sequence shares is free now
        return (_failed(job, refusal),) if refusal is not None else ()

    def _admit_choices(self, command: AdmitImported, number: int, now_s: float) -> None:
        group = self._new_group(number, command.job, now_s)
        for index, (start, first_token_id) in enumerate(zip(command.job.sequences, command.first_tokens, strict=True)):
            if first_token_id is None:
                continue
            sequence = self._new_sequence(group, ((index, start),))
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(first_token_id)
            sequence.block_ids = command.sealed_block_ids + command.tail_block_ids[index : index + 1]
            self._pool.share(sequence.block_ids)
            self._imported.add(sequence)

    def _admit_local(self, job: DecodeJob, now_s: float) -> tuple[Event, ...]:
        refusal = self._refusal(job)
        if refusal is None and len(self._waiting) >= self._limits.max_queue:
            refusal = QueueFull(
                f"{len(self._waiting)} wait here and --max-queue is {self._limits.max_queue}: try later"
            )
        if refusal is not None:
            return (_failed(job, refusal),)
        group = self._new_group(self._arrival(), job, now_s)
        fresh = tuple((i, start) for i, start in enumerate(job.sequences) if not start.committed_token_ids)
        resumed = [(i, start) for i, start in enumerate(job.sequences) if start.committed_token_ids]
        if fresh and self._limits.fit_together(len(job.prompt_token_ids), len(fresh)):
            self._waiting.add(self._new_sequence(group, fresh))
        else:
            resumed += fresh
        for choice in resumed:
            self._waiting.add(self._new_sequence(group, (choice,)))
        return ()

    def _refusal(self, job: DecodeJob) -> TandemError | None:
        refusal = self._limits.job_refusal(job)
        if refusal is None and any((job.router, start.handle) in self._sequences for start in job.sequences):
            refusal = DuplicateRequest("a handle of this job is in use")
        return refusal

    def _arrival(self) -> int:
        self._next_arrival += 1
        return self._next_arrival

    def _new_group(self, number: int, job: DecodeJob, now_s: float) -> Group:
        group = Group(number, job, now_s, num_live=0)
        self._groups[number] = group
        self._deadlines.add(number, now_s + job.timeout_s)
        return group

    def _new_sequence(self, group: Group, choices: tuple[tuple[int, SequenceStart], ...]) -> Sequence:
        """Of choices that go on from the same tokens. They are live from here on."""
        token_ids = list(group.job.prompt_token_ids + choices[0][1].committed_token_ids)
        sequence = Sequence(self._next_number, group, choices, token_ids)
        self._next_number += 1
        group.num_live += len(choices)
        for _, start in choices:
            self._sequences[group.job.router, start.handle] = sequence
        return sequence

    # Planning

    def _join_imported(self, now_s: float) -> None:
        """What holds blocks takes the free slots, except those that an older waiting sequence can use now."""
        head = self._waiting.oldest
        for sequence in tuple(self._imported):
            num_slots = self._num_free_slots
            if head is not None and head.rank < sequence.rank and self._may_take_blocks(head):
                num_slots -= len(head.choices)
            if num_slots < 1:
                break
            self._imported.remove(sequence)
            self._join(sequence, now_s)

    def _growing(self) -> list[Sequence]:
        """The sequences that decode in this step, each with the block that its token's KV goes to."""
        # Oldest first: a preempted one is always younger than all that were looked at before.
        return [s for s in tuple(self._running) if s.num_left == 1 and s.block_ids and self._grow(s)]

    def _grow(self, sequence: Sequence) -> bool:
        """Makes room for its known tokens. False: there is none, and nobody younger to take it from."""
        num_missing = blocks_for(len(sequence.token_ids), self._limits.block_size) - len(sequence.block_ids)
        if num_missing <= 0:
            return True
        while (block_ids := self._pool.reserve(num_missing)) is None:
            victim = max((s for s in (self._running.youngest, self._imported.youngest) if s), key=lambda s: s.rank)
            if victim.rank <= sequence.rank:
                return False
            self._preempt(victim)
        sequence.block_ids += block_ids
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """By recompute: it waits at its age, with its tokens and nothing else."""
        self._preemptions += 1
        self._drop(sequence)
        sequence.num_computed = 0
        self._waiting.add(sequence)

    def _start_waiting(self, now_s: float) -> Sequence | None:
        """The oldest waiting sequence, with its blocks; None while it has to wait."""
        sequence = self._waiting.oldest
        if sequence is None or len(sequence.choices) > self._num_free_slots or not self._may_take_blocks(sequence):
            return None
        num_shared = blocks_for(len(sequence.token_ids), self._limits.block_size)
        block_ids = self._pool.reserve(self._num_needed(sequence))
        assert block_ids is not None
        sequence.block_ids, sequence.spare_ids = block_ids[:num_shared], block_ids[num_shared:]
        self._waiting.remove(sequence)
        self._join(sequence, now_s)
        return sequence

    def _may_take_blocks(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could have its blocks now: there are enough, and no older hand-off wants them."""
        claim = self._reservations.oldest
        if claim is not None and claim.number < sequence.group.number:
            return False
        # The watermark is kept for sequences that ran before, and from nobody where nothing runs.
        spares = not sequence.joined and (len(self._running) or len(self._imported))
        num_left = self._pool.num_free - self._num_needed(sequence)
        return num_left >= (self._limits.num_watermark_blocks if spares else 0)

    def _num_needed(self, sequence: Sequence) -> int:
        return self._limits.num_needed(len(sequence.token_ids), len(sequence.choices))

    @property
    def _num_free_slots(self) -> int:
        return self._limits.max_num_seqs - self._running.num_choices

    def _join(self, sequence: Sequence, now_s: float) -> None:
        self._running.add(sequence)
        if not sequence.joined:
            sequence.joined = True
            group = sequence.group
            handles = tuple(start.handle for _, start in sequence.choices)
            self._started.append(Started(group.job.router, handles, now_s - group.admitted_s))

    def _private_tail(self, sequence: Sequence) -> tuple[BlockCopy, ...]:
        """Before a parted choice writes for the first time, it gets its own copy of the tail that it still shares.

        The shared one may be reused at once: a step copies before it computes anything."""
        if len(sequence.choices) > 1 or not sequence.spare_ids:
            return ()
        source, (target,) = sequence.block_ids[-1], sequence.spare_ids
        sequence.block_ids, sequence.spare_ids = (*sequence.block_ids[:-1], target), ()
        self._pool.release((source,))
        return (BlockCopy(source, target),)

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        job = sequence.group.job
        samples: tuple[Sample, ...] = ()
        if end == len(sequence.token_ids):
            banned = banned_token_ids(job.stops, sequence.num_output)
            samples = tuple(Sample(choice.seed, end, job.sampling, banned) for _, choice in sequence.choices)
        return Chunk(
            sequence_id=sequence.number,
            token_ids=tuple(sequence.token_ids[start:end]),
            start=start,
            block_ids=sequence.block_ids[: blocks_for(end, self._limits.block_size)],
            samples=samples,
        )

    # Outcomes

    def _take_started(self) -> tuple[Event, ...]:
        started, self._started = tuple(self._started), []
        return started

    def _append(self, sequence: Sequence, drawn: tuple[DrawnToken, ...]) -> list[SequenceToken]:
        """One token to each choice; from here on each is a sequence of its own."""
        router, stops = sequence.group.job.router, sequence.group.job.stops
        tokens = []
        for parted, token in zip(self._part(sequence), drawn, strict=True):
            handle, index = parted.choices[0][1].handle, parted.num_output
            parted.token_ids.append(token.token_id)
            reason = finish_reason(stops, token.token_id, index + 1)
            tokens.append(SequenceToken(router, handle, index, SampledToken(token.token_id, token.logprobs, reason)))
            if reason is not None:
                self._sequences_done += 1
                self._end_choice(router, handle)
        return tokens

    def _part(self, sequence: Sequence) -> list[Sequence]:
        """One sequence per choice, all on the same blocks. Each but the first has a spare block for its own tail."""
        choices, spare_ids = sequence.choices, sequence.spare_ids
        sequence.choices, sequence.spare_ids = choices[:1], ()
        parted = [sequence]
        for place, choice in enumerate(choices[1:]):
            other = Sequence(self._next_number, sequence.group, (choice,), list(sequence.token_ids))
            self._next_number += 1
            self._pool.share(sequence.block_ids)
            other.num_computed, other.block_ids, other.joined = sequence.num_computed, sequence.block_ids, True
            other.spare_ids = spare_ids[place : place + 1]
            self._sequences[sequence.group.job.router, choice[1].handle] = other
            self._running.add(other)
            parted.append(other)
        return parted

    def _expire(self, group: Group) -> Event:
        router = group.job.router
        handles = tuple(start.handle for start in group.job.sequences if (router, start.handle) in self._sequences)
        sequences = [self._sequences[router, handle] for handle in handles]
        drawn = max(sequence.num_output for sequence in sequences)
        phase = "decode" if any(sequence.joined for sequence in sequences) else "the decode queue"
        for handle in handles:
            self._end_choice(router, handle)
        text = f"{group.job.timeout_s:.3g} s passed in {phase}, with {drawn} of {group.job.stops.max_tokens} tokens"
        return Failed(router, handles, DeadlineExceeded(text))

    def _end_choice(self, router: MemberId, handle: int) -> None:
        """It ends, whatever the reason; its blocks are free. Nothing when it had ended."""
        sequence = self._sequences.pop((router, handle), None)
        if sequence is None:
            return
        group = sequence.group
        group.num_live -= 1
        if group.num_live == 0:
            del self._groups[group.number]
            self._deadlines.discard(group.number)
        if len(sequence.choices) == 1:
            self._drop(sequence)
            return
        holder = self._holder(sequence)
        holder.remove(sequence)  # its rank may change
        sequence.choices = tuple(choice for choice in sequence.choices if choice[1].handle != handle)
        self._pool.release(sequence.spare_ids[:1])
        sequence.spare_ids = sequence.spare_ids[1:]
        holder.add(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Takes it out of where it is, and its references with it."""
        self._holder(sequence).remove(sequence)
        self._pool.release(sequence.block_ids + sequence.spare_ids)
        sequence.block_ids = sequence.spare_ids = ()

    def _holder(self, sequence: Sequence) -> ByAge:
        return next(holder for holder in (self._running, self._imported, self._waiting) if sequence in holder)

    def _inspect(self, inspection_id: int) -> Event:
        violation = ""
        try:
            self.check()
        except AssertionError as error:
            violation = str(error)
        figures = {
            "running": self._running.num_choices,
            "waiting": self._waiting.num_choices + self._imported.num_choices,
            "handoffs_waiting": self._reservations.num_waiting,
            "steps": self._steps,
            "preemptions": self._preemptions,
            "tokens_drawn": self._tokens_drawn,
            "tokens_computed": self._tokens_computed,
            "sequences_done": self._sequences_done,
        }
        return Inspected(inspection_id, self._pool.counts(), {name: float(n) for name, n in figures.items()}, violation)


def _failed(job: DecodeJob, error: TandemError) -> Failed:
    return Failed(job.router, tuple(start.handle for start in job.sequences), error)
