"""What the decode worker computes next, and what it tells of it. Pure: no clock, no model, no waiting.

Turns commands into sequences of a `Batch`, the batch into steps, and their outcome into events. Which sequence gets a
slot or a block is the batch's rule. Decodes come first in every step; what they leave of the budget goes to prompts.
"""

from dataclasses import replace

from cluster import holders
from cluster.errors import DeadlineExceeded, InternalError, TandemError
from cluster.messages import FinishReason, Inspect, Inspected, MemberId, SampledToken
from cluster.protocol.hashing import NATIVE, NewChain
from decode_worker.scheduling.admission import Admission
from decode_worker.scheduling.batch import Batch
from decode_worker.scheduling.chunks import chunk_of, ends_known, reason_of, up_to_the_end
from decode_worker.scheduling.commands import (
    AdmitImported,
    AdmitLocal,
    CancelSequences,
    Command,
    Discard,
    Event,
    Failed,
    Freeze,
    OfferPrefix,
    PrefixOffered,
    Quiet,
    Release,
    Reserve,
    SequenceToken,
    StepTokens,
    Thaw,
)
from decode_worker.scheduling.departures import Departures
from decode_worker.scheduling.flights import Flight, Flights, first_runs
from decode_worker.scheduling.limits import DecodeLimits
from decode_worker.scheduling.live import LiveSequences
from decode_worker.scheduling.offers import Offers
from decode_worker.scheduling.preemption_cost import PreemptionCost
from decode_worker.scheduling.sequences import Group, Sequence
from decode_worker.scheduling.speculation import NewGuesser, Speculation
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.policies import FirstCome, Policy
from engine.scheduling.schedule import ChunkBudget
from engine.scheduling.step import UNKNOWN_TOKEN, Chunk, DrawnToken, StepPlan, StepResult


class DecodeScheduler:
    """Implements `engine.scheduling.step.Scheduler`."""

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
        self._cost = cost or PreemptionCost()
        self._batch = Batch(limits, new_chain, self._cost, policy or FirstCome())
        self._speculation = Speculation(new_guesser, self._batch.tables)
        self._offers = Offers(self._batch.pool, limits.block_size)
        self._live = LiveSequences(lengths)
        self._admission = Admission(
            limits, self._batch, self._live, new_chain=new_chain, wire_dtype=wire_dtype, lengths=lengths
        )
        self._departures = Departures(self._batch, self._live, self._offers)
        self._flights = Flights()
        self._ended_s = 0.0  # the last step
        self._steps = 0
        self._tokens_drawn = 0
        self._tokens_computed = 0
        self._sequences_done = 0

    def apply(self, command: Command, now_s: float) -> tuple[Event, ...]:
        events: tuple[Event, ...] = ()
        self._batch.ranking.now_s = now_s
        match command:
            case Reserve():
                events = self._admission.reserve(command, now_s)
            case Discard(handoff_id, quarantined):
                self._batch.reservations.discard(handoff_id, quarantined)
            case Quiet(block_ids):
                self._batch.pool.end_quarantine(sorted(block_ids))
            case AdmitImported():
                events = self._admission.imported(command, now_s)
            case AdmitLocal(job):
                events = self._admission.local(job, now_s)
            case CancelSequences(router, handles):
                for handle in sorted(handles):
                    self._end_choice(router, handle)
            case Freeze():
                events = (self._departures.freeze(command),)
            case Thaw():
                events = (self._departures.thaw(command),)
            case OfferPrefix(ticket_id, block_hashes, min_blocks):
                leased = self._offers.lease_prefix(ticket_id, block_hashes, min_blocks)
                events = (PrefixOffered(ticket_id, leased, self._offers.unverified(ticket_id)),)
            case Release(ticket_id):
                self._offers.release(ticket_id)
            case Inspect(inspection_id):
                events = (self._inspect(inspection_id),)
        return events + self._admission.grant()

    def reap(self, now_s: float) -> tuple[tuple[Event, ...], float | None]:
        self._batch.ranking.now_s = now_s
        expired = tuple(map(self._expire, self._live.due(now_s)))
        return expired + (self._admission.grant() if expired else ()), self._live.next_deadline_s

    def plan(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        assert not self._flights, "a step is under way"
        return self._plan(now_s)

    @property
    def may_plan_ahead(self) -> bool:
        only = self._flights.only
        return only is not None and only.is_open

    def may_apply(self, command: Command) -> bool:
        # A frozen sequence's last token must be known, and nothing may be written behind it.
        return self.may_plan_ahead and not isinstance(command, Freeze)

    def plan_ahead(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        if not self.may_plan_ahead or not self._speculation.is_off:
            return (), None
        self._flights.presume()
        return self._plan(now_s) if self._batch.has_room_to_go_on() else ((), None)

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        flight = self._end_flight(plan, now_s, has_failed=False)
        self._measure(flight, result, now_s)
        if result.redrawn:
            self._flights.close()
        started = first_runs(flight)
        tokens: list[SequenceToken] = []
        for sequence, chunk, drawn in zip(flight.sequences, plan.chunks, result.tokens, strict=True):
            self._tokens_computed += len(chunk.token_ids)
            if sequence.is_over:
                self._batch.let_go(sequence)
            else:
                tokens += self._take_in(sequence, chunk, drawn, 0 if flight.is_presumed else len(chunk.token_ids))
        for sequence, chunk, drafted in zip(flight.sequences, plan.chunks, result.guesses, strict=False):
            if chunk.draft is not None:
                self._speculation.take(sequence, drafted)
        self._tokens_drawn += len(tokens)
        told = (StepTokens(self._steps, tuple(tokens)),) if tokens else ()
        return started + told + self._admission.grant()

    def fail(self, plan: StepPlan, error: Exception, now_s: float) -> tuple[Event, ...]:
        flight = self._end_flight(plan, now_s, has_failed=True)
        started = first_runs(flight)
        reason = InternalError(f"the step of these sequences failed: {type(error).__name__}: {error}")
        handles: dict[Group, list[int]] = {}
        for sequence in flight.sequences:
            if sequence.is_over:
                self._batch.let_go(sequence)
            else:
                handles.setdefault(sequence.group, []).extend(start.handle for _, start in sequence.choices)
        failed = tuple(self._fail(group, tuple(ended), reason) for group, ended in handles.items())
        return started + failed + self._admission.grant()

    def check(self) -> None:
        """Raises AssertionError when the pool and its users disagree."""
        self._batch.check(self._live.check())
        self._batch.pool.check_leases(self._offers.leases)

    def holders(self) -> frozenset[str]:
        """Everything that holds blocks, or waits for them."""
        handoff_ids = (*self._batch.reservations.handoff_ids, *self._batch.pool.quarantined_for)
        return frozenset(
            (
                *map(holders.hand_off, handoff_ids),
                *map(holders.ticket, self._offers.ticket_ids),
                *(holders.sequence(router, handle) for router, handle in self._live.names()),
            )
        )

    # Steps

    def _plan(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
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
            return self._admission.grant(), None  # what waits may wait for a hand-off that by now goes first
        copies = tuple(copy for sequence in decoding for copy in self._batch.tables.own_tail(sequence))
        guesses = self._speculation.propose(decoding, budget, self._batch.num_spare_blocks)
        feeds = self._flights.feeds()
        chunks = tuple(self._chunk(*part, guesses.get(part[0].number, ()), feeds) for part in parts)
        plan = StepPlan(chunks, copies, swaps_out, swaps_in)
        self._flights.begin(plan, tuple(sequence for sequence, _ in parts), now_s)
        return (), plan

    def _end_flight(self, plan: StepPlan, now_s: float, *, has_failed: bool) -> Flight:
        self._steps += 1
        self._batch.ranking.now_s = now_s
        self._batch.tables.end_step(has_failed=has_failed)
        return self._flights.end(plan)

    def _chunk(self, sequence: Sequence, num_tokens: int, guesses: tuple[int, ...], feeds: dict[int, int]) -> Chunk:
        """`feeds`: which sample of the step under way draws the tokens that are not known."""
        draft = self._speculation.request(sequence) if ends_known(sequence, num_tokens) else None
        chunk = chunk_of(sequence, num_tokens, self._limits.block_size, guesses, draft)
        is_fed = chunk.token_ids[-1] == UNKNOWN_TOKEN
        return replace(chunk, fed_by=feeds[sequence.number]) if is_fed else chunk

    def _take_in(
        self, sequence: Sequence, chunk: Chunk, drawn: tuple[DrawnToken, ...], num_advanced: int
    ) -> list[SequenceToken]:
        """The outcome of its part of a step. `num_advanced`: of its tokens, those that do not count as computed yet."""
        if chunk.num_guesses:
            return self._take_run(sequence, chunk, drawn)
        if chunk.samples and not drawn:  # of a token that was drawn again: it is computed anew
            return []
        sequence.advance(num_advanced)
        self._batch.tables.keep_sealed(sequence)
        if not drawn:
            return []
        # From here on each choice is a sequence of its own.
        parted = self._batch.part(sequence, self._live.numbers)
        for other in parted[1:]:
            self._live.part(other)
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
        sequence.token_ids.append(token.token_id)
        reason = reason_of(sequence)
        if reason is None:
            self._live.predict(sequence)
        else:
            self._sequences_done += 1
            self._end_choice(router, handle, reason)
        return SequenceToken(router, handle, index, SampledToken(token.token_id, token.logprobs, reason))

    def _measure(self, flight: Flight, result: StepResult, now_s: float) -> None:
        plan, began_s, self._ended_s = flight.plan, max(flight.planned_s, self._ended_s), now_s
        self._cost.observe_copies(len(plan.swaps_out) + len(plan.swaps_in), result.swap_s)
        lengths = [len(chunk.token_ids) for chunk in plan.chunks]
        num_prompt = sum(len(chunk.token_ids) for chunk in plan.chunks if len(chunk.token_ids) > 1 + chunk.num_guesses)
        self._cost.observe_compute(num_prompt, sum(lengths), now_s - began_s - result.swap_s)

    # Ends

    def _expire(self, group: Group) -> Event:
        stops = group.job.stops
        live = self._live.of_group(group)
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
        sequence = self._live.end(router, handle, reason)
        if sequence is None:
            return
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
        numbers = {name: float(n) for name, n in figures.items()}
        return Inspected(inspection_id, blocks, numbers, violation, self.holders())
