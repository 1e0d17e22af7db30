"""The scheduler: commands in, step plans and events out. Pure: no clock, no model, no waiting.

It admits jobs as sequences of a `Batch`, plans steps, and turns their outcomes into events. The batch decides which
sequence gets slots and blocks. Every running decode gets one token of a step; prompts share the rest of the budget. A
sequence is decoded here, or it is an export: a prompt whose KV another worker imports.
"""

from collections.abc import Callable
from functools import partial

from cluster import holders
from cluster.errors import StepFailed, TandemError
from cluster.fair_queue import FairQueue
from cluster.messages import FinishReason, MemberId, SampledToken
from cluster.protocol.hashing import NATIVE, NewChain
from cluster.service_times import ServiceTimes
from engine.kv.block_pool import BlockPool
from engine.scheduling.admission import SequenceAdmission
from engine.scheduling.batching.batch import Batch
from engine.scheduling.batching.block_tables import BlockTables, PreemptionCost, SwapSpace
from engine.scheduling.batching.chunks import NewDrafter, Speculation, finish_reason_of, until_finished
from engine.scheduling.batching.reservations import Reservations
from engine.scheduling.batching.sequences import Group, LiveSequences, Sequence
from engine.scheduling.commands import (
    AdmitExport,
    AdmitImported,
    AdmitLocal,
    Announce,
    CancelExport,
    CancelSequences,
    Command,
    Discard,
    DrainExports,
    Event,
    Failed,
    Freeze,
    ImporterWaits,
    Inspect,
    Inspected,
    LimitQueue,
    LimitSteps,
    Quiet,
    Release,
    Reserve,
    SequenceToken,
    SetRole,
    StepTokens,
    Thaw,
)
from engine.scheduling.exports import PromptExports, SequenceFreezer, TicketLeases
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import FirstCome, Policy
from engine.scheduling.prefix_access import PrefixAccess
from engine.scheduling.step import Chunk, ChunkBudget, DrawnToken, PromptTime, StepPlan, StepResult
from engine.scheduling.steps_in_flight import PlannedStep, StepsInFlight, started_events


class SequenceScheduler:
    """The scheduler of a worker; it implements `engine.scheduling.step.Scheduler`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        new_chain: NewChain,
        wire_dtype: str = NATIVE,
        cost: PreemptionCost | None = None,
        policy: Policy | None = None,
        lengths: LengthPredictor | None = None,
        new_drafter: NewDrafter | None = None,
        times: Callable[[], ServiceTimes | None] = lambda: None,
    ) -> None:
        """`lengths`: predicts output lengths; without it only the watermark is kept available for growth. `times`: the
        speed of this worker, by which prompts beside running sequences are limited; while it returns None, they use all
        of `max_prefill_tokens`."""
        self._limits = limits
        self._step_limit = limits.step_limit
        self._times = times
        self._cost = cost or PreemptionCost()
        pool = self._pool = BlockPool(limits.num_blocks, limits.prefix_eviction)
        swaps = self._swaps = SwapSpace(limits.num_swap_slots, self._cost)
        tables = self._tables = BlockTables(limits, new_chain, pool, swaps)
        tenants = self._tenants = FairQueue()
        reservations = self._reservations = Reservations(
            pool, tenants, num_longest=limits.num_longest_blocks, num_watermark=limits.num_watermark_blocks
        )
        batch = self._batch = Batch(
            limits,
            pool=pool,
            swaps=swaps,
            tables=tables,
            reservations=reservations,
            policy=policy or FirstCome(),
            tenants=tenants,
        )
        self._speculation = Speculation(new_drafter, tables, limits.block_size)
        leases = self._leases = TicketLeases(pool, limits.block_size)
        live = self._live = LiveSequences(lengths, tenants)
        self._admission = SequenceAdmission(
            limits,
            batch=batch,
            pool=pool,
            reservations=reservations,
            live=live,
            leases=leases,
            new_chain=new_chain,
            wire_dtype=wire_dtype,
            lengths=lengths,
        )
        self._exports = PromptExports(
            limits, batch=batch, pool=pool, tables=tables, live=live, leases=leases, new_chain=new_chain
        )
        self._prefixes = PrefixAccess(
            pool, leases=leases, reservations=reservations, num_to_leave=lambda: batch.num_blocks_waited_for
        )
        self._freezer = SequenceFreezer(self._batch, self._live, self._leases)
        self._in_flight = StepsInFlight()
        self._steps = 0
        self._tokens_drawn = 0
        self._tokens_computed = 0
        self._sequences_done = 0

    def apply(self, command: Command, now_s: float) -> tuple[Event, ...]:
        events: tuple[Event, ...] = ()
        match command:
            case Reserve():
                events = self._admission.reserve(command, now_s)
            case Announce(handoff_id):
                self._reservations.announce(handoff_id)
            case ImporterWaits(ticket_id, wait):
                self._leases.record_wait(ticket_id, wait)
            case Discard(handoff_id, quarantined):
                self._reservations.discard(handoff_id, quarantined)
            case Quiet(block_ids):
                self._pool.end_quarantine(sorted(block_ids))
            case AdmitImported():
                events = self._admission.admit_imported(command, now_s)
            case AdmitLocal(job):
                events = self._admission.admit_local(job, now_s)
            case CancelSequences(router, handles):
                for handle in sorted(handles):
                    self._end_choice(router, handle, None, now_s)
            case Freeze():
                events = (self._freezer.freeze(command, now_s),)
            case Thaw():
                events = (self._freezer.thaw(command, now_s),)
            case AdmitExport():
                events = (self._exports.admit(command, now_s),)
            case CancelExport(ticket_id):
                events = self._exports.cancel(ticket_id)
            case DrainExports():
                events = self._exports.drain()
            case Release(ticket_id):
                self._exports.release(ticket_id)
            case SetRole(role):
                self._batch.set_role(role)
            case LimitSteps(step_limit):
                self._step_limit = step_limit
            case LimitQueue(max_queue):
                self._admission.max_queue = self._exports.max_queue = max_queue
            case Inspect(inspection_id):
                events = (self._inspect(inspection_id, now_s),)
            case _:
                events = self._prefixes.apply(command)
        return events + self._admission.grant_blocks(now_s)

    def reap(self, now_s: float) -> tuple[tuple[Event, ...], float | None]:
        expired = tuple(event for group in self._live.due(now_s) for event in self._expire(group, now_s))
        granted = self._admission.grant_blocks(now_s) if expired else ()
        return (*self._prefixes.due(), *expired, *granted), self._live.next_deadline_s

    def plan(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        assert not self._in_flight, "a step is in flight"
        return self._plan(now_s)

    @property
    def may_plan_ahead(self) -> bool:
        only = self._in_flight.only
        return only is not None and only.may_plan_ahead

    def may_apply(self, command: Command) -> bool:
        # Freezing needs the last token, and no step in flight may write to the sequence's blocks.
        return self.may_plan_ahead and not isinstance(command, Freeze)

    def plan_ahead(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        if not self.may_plan_ahead or not self._speculation.is_off:
            return (), None
        self._in_flight.assume_completed()
        return self._plan(now_s) if self._batch.can_plan_ahead() else ((), None)

    def written(self, plan: StepPlan) -> tuple[Event, ...]:
        step = self._in_flight.only
        assert step is not None and step.plan is plan, "only the step that computes writes"
        pairs = zip(step.sequences, plan.chunks, strict=True)
        return tuple(event for sequence, chunk in pairs for event in self._exports.announce(sequence, chunk.end))

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        step = self._end_step(plan, has_failed=False)
        self._cost.observe_copies(len(plan.swaps_out) + len(plan.swaps_in), result.swap_s)
        if result.redrawn:
            self._in_flight.block_planning_ahead()
        started = started_events(step)
        for scored, logprobs in zip(plan.scored, result.scored, strict=True):
            self._exports.record_scored(step.sequences[scored.chunk], logprobs)
        tokens: list[SequenceToken] = []
        exported: list[Event] = []
        for place, (sequence, chunk, drawn) in enumerate(zip(step.sequences, plan.chunks, result.tokens, strict=True)):
            self._tokens_computed += len(chunk.token_ids)
            if sequence.is_over:
                self._batch.free_ended(sequence)
            elif place in result.refused:
                exported += self._refuse(sequence, result.refused[place], now_s)
            else:
                num_advanced = 0 if step.is_assumed else len(chunk.token_ids)
                if sequence.group.export is None:
                    tokens += self._apply_outcome(sequence, chunk, drawn, num_advanced, now_s)
                else:
                    sequence.advance(num_advanced)
                    exported += self._exports.advance(sequence, drawn, now_s)
        for sequence, chunk, drafted in zip(step.sequences, plan.chunks, result.draft_tokens, strict=False):
            if chunk.draft is not None:
                self._speculation.store(sequence, drafted)
        self._tokens_drawn += len(tokens)
        appended = (StepTokens(self._steps, tuple(tokens)),) if tokens else ()
        return (*started, *exported, *appended, *self._admission.grant_blocks(now_s))

    def fail(self, plan: StepPlan, error: Exception, now_s: float) -> tuple[Event, ...]:
        step = self._end_step(plan, has_failed=True)
        started = started_events(step)
        reason = StepFailed(f"the step of these sequences failed: {type(error).__name__}: {error}")
        handles: dict[Group, list[int]] = {}
        failed: list[Event] = []
        for sequence in step.sequences:
            if sequence.is_over:
                self._batch.free_ended(sequence)
            elif sequence.group.export is not None:
                failed += self._exports.fail(sequence, reason)
            else:
                handles.setdefault(sequence.group, []).extend(start.handle for _, start in sequence.choices)
        failed += (self._fail(group, tuple(ended), reason, now_s) for group, ended in handles.items())
        return (*started, *failed, *self._admission.grant_blocks(now_s))

    def check(self) -> None:
        """Raise AssertionError if the pool, the sequences, the hand-offs, the leases and the tenants disagree."""
        self._batch.check(self._live.check())
        self._tenants.check((*self._live.tenants, *(request.tenant for request, _ in self._reservations.requests)))
        self._pool.check_leases(self._leases.leases)

    def holders(self) -> frozenset[str]:
        """Return the names of everything that holds blocks or waits for them."""
        handoff_ids = (*self._reservations.handoff_ids, *self._pool.quarantined_for)
        return frozenset(
            (
                *map(holders.hand_off, handoff_ids),
                *map(holders.ticket, self._leases.ticket_ids),
                *map(holders.ticket, self._live.tickets),
                *(holders.sequence(router, handle) for router, handle in self._live.names()),
            )
        )

    # Steps

    def _plan(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        self._batch.begin_step(now_s)
        decoding = [*self._batch.decoding(now_s), *self._batch.resume_swapped(now_s)]
        budget = ChunkBudget(self._limits.max_prefill_tokens, len(decoding), self._limits.max_scored_tokens)
        prompts = self._batch.prompt_parts(budget, partial(self._prompt_time, decoding), now_s)
        self._batch.charge(decoding, prompts)
        parts = [*((sequence, 1) for sequence in decoding), *prompts]
        swaps_out, swaps_in = self._swaps.swaps_out, self._swaps.swaps_in
        if not parts and not swaps_out:
            # A waiting sequence may have to wait for a hand-off that ranks before it by now.
            return self._admission.grant_blocks(now_s), None
        exports = [sequence for sequence, _ in prompts if sequence.group.export is not None and not sequence.has_run]
        announced = tuple(event for sequence in exports for event in self._exports.start(sequence, now_s))
        copies = tuple(copy for sequence in decoding for copy in self._tables.copy_shared_tail(sequence))
        draft_tokens = self._speculation.propose(decoding, budget, self._batch.num_spare_blocks)
        feeds = self._in_flight.feeds()
        chunks = tuple(self._speculation.chunk(*part, draft_tokens.get(part[0].number, ()), feeds) for part in parts)
        announces = any(self._exports.will_seal(*prompt) for prompt in prompts)
        plan = StepPlan(chunks, copies, swaps_out, swaps_in, announces, self._exports.score(prompts, len(decoding)))
        self._in_flight.begin(plan, tuple(sequence for sequence, _ in parts), now_s)
        return announced, plan

    def _prompt_time(self, decoding: list[Sequence], find_oldest: Callable[[], tuple[float, int]]) -> PromptTime | None:
        """Return the time for prompts in a step in which these sequences decode; None: they are not limited.
        `find_oldest` returns how long the oldest prompt has waited, and its number of tokens. The batch class is not
        protected."""
        times = self._times()
        if times is None or all(sequence.group.job.is_batch for sequence in decoding):
            return None
        age_s, num_oldest = find_oldest()
        batch, context = len(decoding), sum(len(sequence.token_ids) for sequence in decoding)
        limit_s = self._step_limit.seconds(times.step_s(batch, context), age_s, times.prefill_s(num_oldest))
        return PromptTime(times.prefill, times.prompts_within_s(limit_s, batch, context), self._limits.block_size)

    def _end_step(self, plan: StepPlan, *, has_failed: bool) -> PlannedStep:
        self._steps += 1
        self._tables.end_step(has_failed=has_failed)
        return self._in_flight.end(plan)

    def _apply_outcome(
        self, sequence: Sequence, chunk: Chunk, drawn: tuple[DrawnToken, ...], num_advanced: int, now_s: float
    ) -> list[SequenceToken]:
        """Apply the outcome of a chunk. `num_advanced`: how many of its tokens do not count as computed yet."""
        if chunk.num_draft_tokens:
            return self._apply_draft_outcome(sequence, chunk, drawn, now_s)
        if chunk.samples and not drawn:  # its input token was drawn again, so the chunk is computed again
            return []
        sequence.advance(num_advanced)
        self._tables.cache_sealed(sequence)
        if not drawn:
            return []
        if len(sequence.choices) == 1:
            return [self._append(sequence, drawn[0], now_s)]
        # From now on each choice is a sequence of its own.
        split = self._batch.split_choices(sequence, self._live.new_number, now_s)
        for other in split[1:]:
            self._live.add_split(other)
        return [self._append(choice, token, now_s) for choice, token in zip(split, drawn, strict=True)]

    def _apply_draft_outcome(
        self, sequence: Sequence, chunk: Chunk, drawn: tuple[DrawnToken, ...], now_s: float
    ) -> list[SequenceToken]:
        """Apply the outcome of a chunk with draft tokens. Accepted ones have KV; the last drawn token has none yet."""
        self._speculation.judge(sequence, chunk, drawn)
        *right, last = until_finished(sequence.group.job.stops, drawn, sequence.num_output)
        router, handle, first = sequence.group.router, sequence.choices[0][1].handle, sequence.num_output
        sequence.token_ids += [token.token_id for token in right]
        sequence.advance(len(chunk.token_ids) - chunk.num_draft_tokens + len(right))
        self._tables.cache_sealed(sequence)
        self._tables.trim(sequence)
        sampled = [SampledToken(token.token_id, token.logprobs, None) for token in right]
        return [
            *(SequenceToken(router, handle, index, token) for index, token in enumerate(sampled, start=first)),
            self._append(sequence, last, now_s),
        ]

    def _append(self, sequence: Sequence, token: DrawnToken, now_s: float) -> SequenceToken:
        """Append a drawn token to a sequence with one choice, and end the sequence if it is finished."""
        router, handle, index = sequence.group.router, sequence.choices[0][1].handle, sequence.num_output
        sequence.token_ids.append(token.token_id)
        reason = finish_reason_of(sequence)
        if reason is None:
            self._live.predict(sequence)
        else:
            self._sequences_done += 1
            self._end_choice(router, handle, reason, now_s)
        return SequenceToken(router, handle, index, SampledToken(token.token_id, token.logprobs, reason))

    # Ends

    def _refuse(self, sequence: Sequence, error: TandemError, now_s: float) -> tuple[Event, ...]:
        """End a sequence whose grammar allows no token."""
        if sequence.group.export is not None:
            return self._exports.fail(sequence, error)
        handles = tuple(start.handle for _, start in sequence.choices)
        return (self._fail(sequence.group, handles, error, now_s),)

    def _expire(self, group: Group, now_s: float) -> tuple[Event, ...]:
        if group.export is not None:
            return self._exports.expire(group)
        return (self._fail(group, tuple(self._live.of_group(group)), self._live.missed_deadline(group), now_s),)

    def _fail(self, group: Group, handles: tuple[int, ...], error: TandemError, now_s: float) -> Event:
        for handle in handles:
            self._end_choice(group.router, handle, None, now_s)
        return Failed(group.router, handles, error)

    def _end_choice(self, router: MemberId, handle: int, reason: FinishReason | None, now_s: float) -> None:
        """End a choice and free its blocks. `reason`: why it finished; None if it was cancelled or failed. Does nothing
        if it had ended before."""
        sequence = self._live.end(router, handle, reason)
        if sequence is None:
            return
        if len(sequence.choices) > 1:
            self._batch.remove_choice(sequence, handle, now_s)
        else:
            self._batch.remove(sequence)

    def _inspect(self, inspection_id: int, now_s: float) -> Event:
        violation = ""
        try:
            self.check()
        except AssertionError as error:
            violation = str(error)
        figures = {
            "leased_tickets": len(self._leases),
            "steps": self._steps,
            "tokens_drawn": self._tokens_drawn,
            "tokens_computed": self._tokens_computed,
            "sequences_done": self._sequences_done,
            "pulls": self._reservations.num_pulls,
            **self._exports.figures,
            **self._batch.figures(now_s),
            **self._speculation.figures,
        }
        numbers = {name: float(n) for name, n in figures.items()}
        return Inspected(inspection_id, self._pool.counts(), numbers, violation, self.holders())
