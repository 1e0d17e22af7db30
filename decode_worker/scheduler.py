"""What the decode worker computes next, and what it tells of it. Pure: no clock, no model, no waiting.

Turns commands into sequences of a `Batch`, the batch into steps, and their outcome into events. Which sequence gets a
slot or a block is the batch's rule. Decodes come first in every step; what they leave of the budget goes to prompts.
"""

from dataclasses import replace
from itertools import count

from cluster.errors import DeadlineExceeded, DuplicateRequest, InternalError, NotFound, QueueFull, TandemError
from cluster.hashing import NATIVE, BlockChain, NewChain
from cluster.messages import DecodeJob, FinishReason, Inspect, Inspected, MemberId, SampledToken, SequenceStart
from decode_worker.batch import Batch
from decode_worker.chunks import chunk_of, ends_known, reason_of, up_to_the_end
from decode_worker.claims import claim_of
from decode_worker.commands import (
    AdmitImported,
    AdmitLocal,
    CancelSequences,
    Command,
    Discard,
    Event,
    Failed,
    Freeze,
    FreezeRefused,
    Frozen,
    OfferPrefix,
    PrefixOffered,
    Quiet,
    Release,
    Reserve,
    Reserved,
    SequenceToken,
    Started,
    StepTokens,
    Thaw,
    Thawed,
    ThawRefused,
    Unreservable,
)
from decode_worker.limits import DecodeLimits
from decode_worker.offers import Offers
from decode_worker.preemption_cost import PreemptionCost
from decode_worker.reservations import Grant
from decode_worker.sequences import Group, Sequence
from decode_worker.speculation import NewGuesser, Speculation
from engine.deadlines import Deadlines
from engine.length_prediction import LengthPredictor
from engine.policies import FirstCome, Policy
from engine.schedule import ChunkBudget
from engine.step import Chunk, DrawnToken, StepPlan, StepResult


class DecodeScheduler:
    """Implements `engine.step.Scheduler`."""

    def __init__(
        self,
        limits: DecodeLimits,
        *,
        new_chain: NewChain,
        wire_dtype: str = NATIVE,
        cost: PreemptionCost | None = None,
        policy: Policy | None = None,
        lengths: LengthPredictor | None = None,
        new_guesser: NewGuesser | None = None,
    ) -> None:
        """`lengths`: what outputs are expected to be like; without it nothing is left for those that will grow but the
        watermark."""
        self._limits = limits
        self._new_chain = new_chain
        self._wire_dtype = wire_dtype  # of the KV that is imported
        self._cost = cost or PreemptionCost()
        self._lengths = lengths
        self._batch = Batch(limits, new_chain, self._cost, policy or FirstCome())
        self._speculation = Speculation(new_guesser, self._batch.tables)
        self._offers = Offers(self._batch.pool, limits.block_size)
        self._sequences: dict[tuple[MemberId, int], Sequence] = {}  # of every live (router, handle)
        self._groups: dict[int, Group] = {}
        self._deadlines: Deadlines[int] = Deadlines()  # by group number
        self._in_step: list[Sequence] = []  # of the plan that is being computed, in its order
        self._planned_s = 0.0
        self._started: tuple[Event, ...] = ()  # told with the outcome of their first step
        self._arrivals = count()
        self._numbers = count()
        self._steps = 0
        self._tokens_drawn = 0
        self._tokens_computed = 0
        self._sequences_done = 0

    def apply(self, command: Command, now_s: float) -> tuple[Event, ...]:
        events: tuple[Event, ...] = ()
        self._batch.ranking.now_s = now_s
        match command:
            case Reserve():
                events = self._reserve(command, now_s)
            case Discard(handoff_id, quarantined):
                self._batch.reservations.discard(handoff_id, quarantined)
            case Quiet(block_ids):
                self._batch.pool.end_quarantine(sorted(block_ids))
            case AdmitImported():
                events = self._admit_imported(command, now_s)
            case AdmitLocal(job):
                events = self._admit_local(job, now_s)
            case CancelSequences(router, handles):
                for handle in sorted(handles):
                    self._end_choice(router, handle)
            case Freeze():
                events = (self._freeze(command),)
            case Thaw():
                events = (self._thaw(command),)
            case OfferPrefix(ticket_id, block_hashes, min_blocks):
                leased = self._offers.lease_prefix(ticket_id, block_hashes, min_blocks)
                events = (PrefixOffered(ticket_id, leased),)
            case Release(ticket_id):
                self._offers.release(ticket_id)
            case Inspect(inspection_id):
                events = (self._inspect(inspection_id),)
        return events + self._grant_reservations()

    def reap(self, now_s: float) -> tuple[tuple[Event, ...], float | None]:
        self._batch.ranking.now_s = now_s
        expired = tuple(self._expire(self._groups[number]) for number in self._deadlines.due(now_s))
        return expired + (self._grant_reservations() if expired else ()), self._deadlines.next_s()

    def plan(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        self._batch.ranking.now_s = now_s
        self._batch.begin_step()
        decoding = [*self._batch.decoding(), *self._batch.resume_swapped()]
        budget = ChunkBudget(self._limits.max_prefill_tokens, len(decoding))
        parts = [(sequence, 1) for sequence in decoding]
        prompts = self._batch.prompts()
        while budget.left and (sequence := next(prompts, None)) is not None:
            parts.append((sequence, budget.take(sequence.num_left)))
        swaps_out, swaps_in = self._batch.swaps.outward, self._batch.swaps.inward
        if not parts and not swaps_out:
            return self._grant_reservations(), None  # what waits may wait for a hand-off that by now goes first
        copies = tuple(copy for sequence in decoding for copy in self._batch.tables.own_tail(sequence))
        self._planned_s, self._in_step = now_s, [sequence for sequence, _ in parts]
        self._started = self._first_runs(now_s)
        guesses = self._speculation.propose(decoding, budget, self._batch.num_spare_blocks)
        chunks = tuple(self._chunk(*part, guesses.get(part[0].number, ())) for part in parts)
        return (), StepPlan(chunks, copies, swaps_out, swaps_in)

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        self._steps += 1
        self._batch.ranking.now_s = now_s
        self._batch.tables.end_step(has_failed=False)
        self._measure(plan, result, now_s)
        tokens: list[SequenceToken] = []
        for sequence, chunk, drawn in zip(self._in_step, plan.chunks, result.tokens, strict=True):
            tokens += self._take_in(sequence, chunk, drawn)
        for sequence, chunk, drafted in zip(self._in_step, plan.chunks, result.guesses, strict=False):
            if chunk.draft is not None:
                self._speculation.take(sequence, drafted)
        self._tokens_drawn += len(tokens)
        told = (StepTokens(self._steps, tuple(tokens)),) if tokens else ()
        return self._started + told + self._grant_reservations()

    def fail(self, plan: StepPlan, error: Exception, now_s: float) -> tuple[Event, ...]:
        self._steps += 1
        self._batch.ranking.now_s = now_s
        self._batch.tables.end_step(has_failed=True)
        reason = InternalError(f"the step of these sequences failed: {type(error).__name__}: {error}")
        handles: dict[int, list[int]] = {}
        for sequence in self._in_step:
            handles.setdefault(sequence.group.number, []).extend(start.handle for _, start in sequence.choices)
        failed = tuple(self._fail(self._groups[number], tuple(ended), reason) for number, ended in handles.items())
        return self._started + failed + self._grant_reservations()

    def check(self) -> None:
        """Raises AssertionError when the pool and its users disagree."""
        self._batch.check({sequence.number for sequence in self._sequences.values()})
        self._batch.pool.check_leases(self._offers.leases)
        num_live = sum(group.num_live for group in self._groups.values())
        assert num_live == len(self._sequences), f"groups count {num_live} live choices of {len(self._sequences)}"

    # Admission

    def _reserve(self, command: Reserve, now_s: float) -> tuple[Event, ...]:
        refusal = self._limits.reservation_refusal(command.num_blocks)
        if refusal is None and self._batch.reservations.num_waiting >= self._limits.max_queue:
            refusal = QueueFull(f"{self._limits.max_queue} hand-offs wait for blocks, which is --max-queue: try later")
        if refusal is not None:
            return (Unreservable(command.handoff_id, refusal),)
        claim = claim_of(command, next(self._arrivals), now_s, self._limits.block_size, self._lengths)
        self._batch.reservations.claim(claim)
        return ()

    def _grant_reservations(self) -> tuple[Event, ...]:
        granted = self._batch.grant_reservations()
        return tuple(Reserved(grant.claim.handoff_id, grant.block_ids, grant.num_cached) for grant in granted)

    def _admit_imported(self, command: AdmitImported, now_s: float) -> tuple[Event, ...]:
        job, grant = command.job, self._batch.reservations.take(command.handoff_id)
        if grant is None:
            return (_refused(job, InternalError(f"hand-off {command.handoff_id} has no blocks here")),)
        refusal = self._refusal(job) or self._limits.import_refusal(command, grant.block_ids)
        if refusal is None:
            chain = self._new_chain(job.cache_salt, self._wire_dtype)
            chain.hashes = list(grant.claim.block_hashes)
            self._batch.pool.keep(command.sealed_block_ids, chain.hashes, chain.parent_of(0))
            if any(token_id is not None for token_id in command.first_tokens):
                self._admit_choices(command, grant, chain, now_s)
        self._batch.pool.release(grant.block_ids)  # what no sequence shares is free now, or cached
        return (_refused(job, refusal),) if refusal is not None else ()

    def _admit_choices(self, command: AdmitImported, grant: Grant, chain: BlockChain, now_s: float) -> None:
        group = self._new_group(grant.claim.number, command.job, now_s)
        for index, (start, first_token_id) in enumerate(zip(command.job.sequences, command.first_tokens, strict=True)):
            if first_token_id is None:
                continue
            sequence = self._new_sequence(group, ((index, start),), chain.copy())
            sequence.advance(len(sequence.token_ids))
            sequence.num_kept = len(command.sealed_block_ids)
            sequence.num_cached = grant.num_cached * self._limits.block_size
            sequence.token_ids.append(first_token_id)
            sequence.block_ids = command.sealed_block_ids + command.tail_block_ids[index : index + 1]
            self._batch.pool.share(sequence.block_ids)
            self._batch.add_ready(sequence)

    def _admit_local(self, job: DecodeJob, now_s: float) -> tuple[Event, ...]:
        refusal, num_waiting = self._refusal(job), self._batch.num_waiting
        if refusal is None and num_waiting >= self._limits.max_queue:
            refusal = QueueFull(f"{num_waiting} sequences wait and --max-queue is {self._limits.max_queue}: try later")
        if refusal is not None:
            return (_refused(job, refusal),)
        group = self._new_group(next(self._arrivals), job, now_s)
        fresh = tuple((i, start) for i, start in enumerate(job.sequences) if not start.committed_token_ids)
        alone = [(i, start) for i, start in enumerate(job.sequences) if start.committed_token_ids]
        if fresh and self._limits.fit_together(len(job.prompt_token_ids), len(fresh)):
            self._batch.add_waiting(self._new_sequence(group, fresh, self._new_chain(job.cache_salt, NATIVE)))
        else:
            alone += fresh
        for choice in alone:
            self._batch.add_waiting(self._new_sequence(group, (choice,), self._new_chain(job.cache_salt, NATIVE)))
        return ()

    def _refusal(self, job: DecodeJob) -> TandemError | None:
        refusal = self._limits.job_refusal(job)
        if refusal is None and any((job.router, start.handle) in self._sequences for start in job.sequences):
            refusal = DuplicateRequest("a handle of this job is in use")
        return refusal

    def _new_group(self, number: int, job: DecodeJob, now_s: float) -> Group:
        group = Group(number, job, now_s, num_live=0)
        self._groups[number] = group
        self._deadlines.add(number, now_s + job.timeout_s)
        return group

    def _new_sequence(
        self, group: Group, choices: tuple[tuple[int, SequenceStart], ...], chain: BlockChain
    ) -> Sequence:
        """Of choices that go on from the same tokens. They are live from here on."""
        token_ids = list(group.job.prompt_token_ids + choices[0][1].committed_token_ids)
        sequence = Sequence(next(self._numbers), group, choices, token_ids, chain)
        self._predict(sequence)
        group.num_live += len(choices)
        for _, start in choices:
            self._sequences[group.job.router, start.handle] = sequence
        return sequence

    def _predict(self, sequence: Sequence) -> None:
        """At its beginning, and again when it outlives what was predicted."""
        job = sequence.group.job
        if self._lengths is not None and sequence.num_output >= sequence.predicted_tokens:
            num_prompt, num_output = len(job.prompt_token_ids), sequence.num_output
            sequence.predicted_tokens = self._lengths.predict(
                job.cache_salt, num_prompt, num_output, job.stops.max_tokens
            )

    # Migration

    def _freeze(self, command: Freeze) -> Event:
        sequence = self._sequences.get((command.router, command.handle))
        if sequence is None or not self._batch.decodes(sequence):
            return FreezeRefused(command.ticket_id, NotFound(f"sequence {command.handle} does not decode here"))
        self._batch.freeze(sequence)
        sealed_ids, tail = self._offers.lease(command.ticket_id, sequence)
        return Frozen(
            ticket_id=command.ticket_id,
            request_id=sequence.group.job.request_id,
            token_ids=tuple(sequence.token_ids[: sequence.num_computed]),
            last_token_id=sequence.token_ids[-1],
            num_output=sequence.num_output,
            sealed_block_ids=sealed_ids,
            tail=tail,
        )

    def _thaw(self, command: Thaw) -> Event:
        router, new_handle = command.router, command.new_handle
        sequence = self._sequences.get((router, command.handle))
        if sequence is None or not self._batch.is_frozen(sequence):
            return ThawRefused(router, new_handle, NotFound(f"sequence {command.handle} is not frozen here"))
        if (router, new_handle) in self._sequences:
            return ThawRefused(router, new_handle, DuplicateRequest(f"handle {new_handle} is in use"))
        self._batch.thaw(sequence)
        ((index, start),) = sequence.choices
        sequence.choices = ((index, replace(start, handle=new_handle)),)
        del self._sequences[router, command.handle]
        self._sequences[router, new_handle] = sequence
        return Thawed(router, new_handle)

    # Steps

    def _first_runs(self, now_s: float) -> tuple[Event, ...]:
        """Started for those that are in a step for the first time, by group."""
        first: dict[int, list[Sequence]] = {}
        for sequence in self._in_step:
            if not sequence.has_run:
                sequence.has_run = True
                first.setdefault(sequence.group.number, []).append(sequence)
        events = []
        for number, sequences in first.items():
            handles = tuple(start.handle for sequence in sequences for _, start in sequence.choices)
            group = self._groups[number]
            num_cached = max(sequence.num_cached for sequence in sequences)
            events.append(Started(group.job.router, handles, now_s - group.admitted_s, num_cached))
        return tuple(events)

    def _chunk(self, sequence: Sequence, num_tokens: int, guesses: tuple[int, ...]) -> Chunk:
        draft = self._speculation.request(sequence) if ends_known(sequence, num_tokens) else None
        return chunk_of(sequence, num_tokens, self._limits.block_size, guesses, draft)

    def _take_in(self, sequence: Sequence, chunk: Chunk, drawn: tuple[DrawnToken, ...]) -> list[SequenceToken]:
        """The outcome of its part of a step."""
        self._tokens_computed += len(chunk.token_ids)
        if chunk.num_guesses:
            return self._take_run(sequence, chunk, drawn)
        sequence.advance(len(chunk.token_ids))
        self._batch.tables.keep_sealed(sequence)
        if not drawn:
            return []
        # From here on each choice is a sequence of its own.
        parted = self._batch.part(sequence, self._numbers)
        return [self._append(choice, token) for choice, token in zip(parted, drawn, strict=True)]

    def _take_run(self, sequence: Sequence, chunk: Chunk, drawn: tuple[DrawnToken, ...]) -> list[SequenceToken]:
        """Guesses that were drawn are computed, as if they had been known; the last token is not."""
        self._speculation.judge(sequence, chunk, drawn)
        *right, last = up_to_the_end(sequence.group.job.stops, drawn, sequence.num_output)
        router, handle, first = sequence.group.job.router, sequence.choices[0][1].handle, sequence.num_output
        sequence.token_ids += [token.token_id for token in right]
        sequence.advance(len(chunk.token_ids) - chunk.num_guesses + len(right))
        self._batch.tables.keep_sealed(sequence)
        self._batch.tables.trim(sequence)
        told = [SampledToken(token.token_id, token.logprobs, None) for token in right]
        return [
            *(SequenceToken(router, handle, index, token) for index, token in enumerate(told, start=first)),
            self._append(sequence, last),
        ]

    def _append(self, sequence: Sequence, token: DrawnToken) -> SequenceToken:
        """To a sequence of one choice."""
        router, handle, index = sequence.group.job.router, sequence.choices[0][1].handle, sequence.num_output
        self._sequences[router, handle] = sequence
        sequence.token_ids.append(token.token_id)
        reason = reason_of(sequence)
        if reason is None:
            self._predict(sequence)
        else:
            self._sequences_done += 1
            self._end_choice(router, handle, reason)
        return SequenceToken(router, handle, index, SampledToken(token.token_id, token.logprobs, reason))

    def _measure(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        self._cost.observe_copies(len(plan.swaps_out) + len(plan.swaps_in), result.swap_s)
        lengths = [len(chunk.token_ids) for chunk in plan.chunks]
        num_prompt = sum(len(chunk.token_ids) for chunk in plan.chunks if len(chunk.token_ids) > 1 + chunk.num_guesses)
        self._cost.observe_compute(num_prompt, sum(lengths), now_s - self._planned_s - result.swap_s)

    # Ends

    def _expire(self, group: Group) -> Event:
        stops = group.job.stops
        live = {handle: sequence for (_, handle), sequence in self._sequences.items() if sequence.group is group}
        handles, sequences = tuple(live), live.values()
        phase = "decode" if any(sequence.has_run for sequence in sequences) else "the decode queue"
        progress = f"{max(sequence.num_output for sequence in sequences)} of {stops.max_tokens} tokens"
        error = DeadlineExceeded(f"{group.job.timeout_s:.3g} s passed in {phase}, with {progress}")
        return self._fail(group, handles, error)

    def _fail(self, group: Group, handles: tuple[int, ...], error: TandemError) -> Event:
        for handle in handles:
            self._end_choice(group.job.router, handle)
        return Failed(group.job.router, handles, error)

    def _end_choice(self, router: MemberId, handle: int, reason: FinishReason | None = None) -> None:
        """It ends, for whatever reason, by its own tokens or not; its blocks are free. Nothing when it had ended."""
        sequence = self._sequences.pop((router, handle), None)
        if sequence is None:
            return
        group = sequence.group
        if self._lengths is not None:
            job, was_cut = group.job, reason is not FinishReason.STOP
            self._lengths.observe(job.cache_salt, len(job.prompt_token_ids), sequence.num_output, was_cut=was_cut)
        group.num_live -= 1
        if group.num_live == 0:
            del self._groups[group.number]
            self._deadlines.discard(group.number)
        if len(sequence.choices) > 1:
            self._batch.drop_choice(sequence, handle)
        else:
            self._batch.drop(sequence)

    def _inspect(self, inspection_id: int) -> Event:
        violation = ""
        try:
            self.check()
        except AssertionError as error:
            violation = str(error)
        figures = {
            "leased_tickets": len(self._offers),
            "steps": self._steps,
            "tokens_drawn": self._tokens_drawn,
            "tokens_computed": self._tokens_computed,
            "sequences_done": self._sequences_done,
            **self._batch.figures,
            **self._speculation.figures,
        }
        blocks = self._batch.pool.counts()
        return Inspected(inspection_id, blocks, {name: float(n) for name, n in figures.items()}, violation)


def _refused(job: DecodeJob, error: TandemError) -> Failed:
    return Failed(job.router, tuple(start.handle for start in job.sequences), error)
