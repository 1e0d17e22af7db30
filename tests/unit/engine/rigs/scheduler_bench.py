"""Drives a SequenceScheduler step by step on the fake runner, with work of both destinations, and judges every token
against a serial run.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from cluster.messages import (
    NO_TENANT,
    DecodeJob,
    FinishReason,
    LogitRules,
    MemberId,
    Sampling,
    SequenceStart,
    TenantShare,
    TokenStops,
)
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes
from engine.scheduling.batching.chunks import NewDrafter, banned_token_ids, finish_reason
from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.commands import (
    AdmitImported,
    AdmitLocal,
    CancelSequences,
    Discard,
    Event,
    Failed,
    Freeze,
    FreezeRefused,
    Frozen,
    Release,
    Reserve,
    Reserved,
    Started,
    StepTokens,
    Thaw,
    Thawed,
    ThawRefused,
    Unreservable,
)
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.step import DraftRequest, Sample
from tests.unit.engine.rigs.export_bench import ExportBench
from tests.unit.engine.rigs.fake_paged_runner import VOCAB_SIZE, next_token, sample_after

ROUTER = MemberId("router", "1")
GREEDY = Sampling()


def speed(seconds: float) -> ServiceTimes:
    """Return the service times of a worker whose decode steps take `seconds`, and a third of that more per token of a
    prompt."""
    return ServiceTimes(PrefillTimes(seconds, seconds / 3, 0.0, 0.0), DecodeTimes(seconds, 0.0, 0.0, 0.0))


# None: prompts are not limited. A bench's step takes one second, so prompts of a slow worker never count as old.
SPEEDS = (None, speed(1.0), speed(1e6))


def known_lengths(num_output: int = 6) -> LengthPredictor:
    """Return a predictor that has observed 100 sequences, which all ended after `num_output` tokens."""
    lengths = LengthPredictor()
    for _ in range(100):
        lengths.observe("", 4, num_output, was_cut=False)
    return lengths


@dataclass
class Choice:
    """The state of one choice as its client sees it."""

    job: DecodeJob
    start: SequenceStart
    output: list[int]
    started: bool = False
    ended: str = ""  # stop, length, failed or cancelled


@dataclass
class HandOff:
    """The importer's side of one hand-off."""

    handoff_id: int
    job: DecodeJob
    block_ids: tuple[int, ...] | None = None
    num_cached: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.job.prompt_token_ids + self.job.sequences[0].committed_token_ids


def _sample_of(choice: Choice, known: tuple[int, ...], banned: frozenset[int]) -> Sample:
    """Return the sample that follows these tokens of the prompt and the output."""
    job, seed = choice.job, choice.start.seed
    return sample_after(known, len(job.prompt_token_ids), seed=seed, sampling=job.sampling, banned=banned)


@dataclass
class _KnowingDrafter:
    """Proposes the tokens that a serial run would draw, except for every `draft_period`-th one."""

    bench: "SchedulerBench"
    num_made: int = 0
    judged: int = 0

    def propose(self, token_ids: SequenceOf[int], limit: int, num_sequences: int) -> tuple[int, ...]:
        known = tuple(token_ids)
        draft_tokens: tuple[int, ...] = ()
        choice = next(c for c in self.bench.choices.values() if (*c.job.prompt_token_ids, *c.output) == known)
        for _ in range(min(limit, 5)):
            self.num_made += 1
            banned = banned_token_ids(choice.job.stops, len(choice.output) + len(draft_tokens))
            sample = _sample_of(choice, known + draft_tokens, banned)
            is_right = self.num_made % self.bench.draft_period
            draft_tokens += (next_token(known + draft_tokens, sample) if is_right else VOCAB_SIZE,)
        return draft_tokens

    def request(self, token_ids: list[int], num_sequences: int) -> DraftRequest | None:
        return None

    def judge(self, num_draft_tokens: int, num_right: int) -> None:
        assert 0 <= num_right <= num_draft_tokens <= 5
        self.judged += num_draft_tokens

    def store(self, num_known: int, draft_tokens: tuple[int, ...]) -> None:
        raise AssertionError("no draft was requested")


@dataclass
class SchedulerBench(ExportBench):
    rules: LogitRules | None = None  # of every other job
    draft_period: int = 0  # every draft_period-th draft token is wrong; 0: speculation is off
    choices: dict[int, Choice] = field(default_factory=dict)
    handoffs: dict[int, HandOff] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)
    refused_handoffs: list[Unreservable] = field(default_factory=list)
    frozen: dict[bytes, Frozen] = field(default_factory=dict)  # by ticket, until it is released
    refused_moves: list[FreezeRefused | ThawRefused] = field(default_factory=list)
    ended_at_prefill: set[int] = field(default_factory=set)  # a refused job names them too

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next_handle = 0
        self._frozen_content: dict[bytes, list[list[int | None]]] = {}

    def job(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int = 4,
        num_choices: int = 1,
        committed: Iterable[int] = (0,),
        stops: Iterable[int] = (),
        min_tokens: int = 0,
        timeout_s: float = 1e6,
        salt: str = "",
        priority: int = 0,
        is_batch: bool = False,
        tenant: TenantShare = NO_TENANT,
    ) -> DecodeJob:
        """Return a job. `committed`: the number of tokens that each choice has already, which are those of the serial
        run."""
        prompt = tuple(prompt)
        token_stops = TokenStops(max_tokens, min_tokens, frozenset(stops))
        counts = tuple(committed) * num_choices
        sampling = Sampling(rules=self.rules if self._next_handle % 2 else None)
        starts = []
        for place in range(num_choices):
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            known = self.serial(prompt, token_stops, handle, counts[place], sampling)
            starts.append(SequenceStart(handle, seed=handle, committed_token_ids=known))
        return DecodeJob(
            "request",
            0,
            ROUTER,
            prompt,
            sampling,
            token_stops,
            tuple(starts),
            None,
            timeout_s,
            salt,
            priority,
            is_batch,
            tenant=tenant,
        )

    def serial(
        self, prompt: tuple[int, ...], stops: TokenStops, seed: int, num_output: int, sampling: Sampling = GREEDY
    ) -> tuple[int, ...]:
        """Return the first tokens of the output of a serial run, ignoring the end of the sequence."""
        known = prompt
        for index in range(num_output):
            banned = banned_token_ids(stops, index)
            sample = sample_after(known, len(prompt), seed=seed, sampling=sampling, banned=banned)
            known += (next_token(known, sample),)
        return known[len(prompt) :]

    def admit(self, job: DecodeJob) -> list[int]:
        self._track(job)
        self.apply(AdmitLocal(job))
        return [start.handle for start in job.sequences]

    def reserve(self, job: DecodeJob, *, is_announced: bool = True) -> HandOff:
        """Reserve blocks for a hand-off, whose choices continue from the same tokens."""
        handoff_id = self.new_handoff_id()
        handoff = self.handoffs[handoff_id] = HandOff(handoff_id, job)
        num_blocks = self.limits.num_needed(len(handoff.token_ids), len(job.sequences))
        chain = self.new_chain(job.cache_salt, self.wire_dtype)
        chain.extend(handoff.token_ids)
        self.apply(Reserve(handoff.handoff_id, num_blocks, tuple(chain.hashes), job, is_announced=is_announced))
        return handoff

    def finish(self, handoff: HandOff, *, is_verified: bool = True) -> None:
        """Write the blocks that the importer has read, and admit the choices that did not end with their first
        token."""
        assert handoff.block_ids is not None
        del self.handoffs[handoff.handoff_id]
        job, size, token_ids = handoff.job, self.limits.block_size, handoff.token_ids
        num_sealed = len(token_ids) // size
        sealed_ids = handoff.block_ids[:num_sealed]
        tail_ids = handoff.block_ids[num_sealed:] if len(token_ids) % size else ()
        for place, token_id in enumerate(token_ids):
            if place < handoff.num_cached * size:
                continue  # not moved: it was here
            for block_id in sealed_ids[place // size : place // size + 1] or tail_ids:
                self.runner.written[block_id][place % size] = token_id
        self._track(job)
        first_tokens = tuple(self._first_token(start.handle) for start in job.sequences)
        unverified = frozenset(() if is_verified else handoff.block_ids[handoff.num_cached :])
        self.apply(AdmitImported(handoff.handoff_id, job, sealed_ids, tail_ids, first_tokens, unverified))

    def discard(self, handoff: HandOff, quarantined: Iterable[int] = ()) -> None:
        del self.handoffs[handoff.handoff_id]
        self.quarantined |= set(quarantined)
        self.apply(Discard(handoff.handoff_id, frozenset(quarantined)))

    def cancel(self, handles: Iterable[int]) -> None:
        handles = frozenset(handles)
        for handle in handles & self.choices.keys():
            self.choices[handle].ended = self.choices[handle].ended or "cancelled"
        self.apply(CancelSequences(ROUTER, handles))

    def freeze(self, handle: int) -> Frozen | None:
        """Freeze a sequence and return the event; None: it was refused."""
        ticket_id = self.new_ticket()
        self.apply(Freeze(ticket_id, ROUTER, handle))
        frozen = self.frozen.get(ticket_id)
        if frozen is not None:
            choice = self.choices[handle]
            known = [*choice.job.prompt_token_ids, *choice.output]
            assert ([*frozen.token_ids, frozen.last_token_id], frozen.num_output) == (known, len(choice.output))
            self.read(frozen)
        return frozen

    def read(self, frozen: Frozen) -> None:
        """Check a ticket's blocks as its reader sees them: digests cover whole blocks, with a tail's unused
        positions."""
        tail_ids = () if frozen.tail is None else (frozen.tail.block_id,)
        content = [list(self.runner.written[block_id]) for block_id in frozen.sealed_block_ids + tail_ids]
        assert self._frozen_content.setdefault(frozen.ticket_id, content) == content, "a leased block has changed"
        num_valid = 0 if frozen.tail is None else frozen.tail.num_valid
        size, num_tokens = self.limits.block_size, len(frozen.token_ids)
        assert len(frozen.sealed_block_ids) * size + num_valid == num_tokens
        assert self.runner.read(frozen.sealed_block_ids + tail_ids, num_tokens) == frozen.token_ids

    def release(self, ticket_id: bytes) -> None:
        """End the lease of a ticket after a last read."""
        self.read(self.frozen.pop(ticket_id))
        self.apply(Release(ticket_id))

    def thaw(self, handle: int) -> int:
        """Thaw a sequence and return its new handle."""
        new_handle, self._next_handle = self._next_handle, self._next_handle + 1
        self.choices[new_handle] = self.choices[handle]
        self.apply(Thaw(ROUTER, handle, new_handle))
        if any(isinstance(refused, ThawRefused) and refused.handle == new_handle for refused in self.refused_moves):
            del self.choices[new_handle]
            return handle
        del self.choices[handle]
        return new_handle

    def receive(self, source: "SchedulerBench", frozen: Frozen, handle: int) -> int:
        """Continue the sequence on this bench from the blocks of the ticket. Return its handle here."""
        source.read(frozen)
        moving = source.choices[handle]
        new_handle, self._next_handle = self._next_handle, self._next_handle + 1
        start = replace(moving.start, handle=new_handle, committed_token_ids=tuple(moving.output[:-1]))
        handoff = self.reserve(replace(moving.job, sequences=(start,)))
        self.finish(handoff)
        assert self.choices[new_handle].output == moving.output, "it starts from another token"
        return new_handle

    def sequence(self, handle: int) -> Sequence:
        sequence = self.scheduler._live.get(ROUTER, handle)
        assert sequence is not None
        return sequence

    @property
    def live(self) -> list[int]:
        return [handle for handle, choice in self.choices.items() if not choice.ended]

    def end_all(self) -> None:
        """Discard all hand-offs, end their reads and run to the end. Assert that no sequence is cut and no block
        held."""
        for handoff in list(self.handoffs.values()):
            if handoff.handoff_id in self.handoffs:
                self.discard(handoff)
        self.end_quarantine()
        self.run()
        self.assert_idle()
        for choice in self.choices.values():
            if choice.ended == FinishReason.LENGTH:
                assert len(choice.output) == choice.job.stops.max_tokens

    def assert_idle(self) -> None:
        """Assert that every sequence has ended, and no block is in use."""
        inspected = self.inspect()
        assert self.live == [] and inspected.violation == ""
        assert inspected.blocks["free"] + inspected.blocks["cached"] == self.limits.num_blocks, inspected.blocks
        assert self.prefix_caching or not inspected.blocks["cached"]
        assert inspected.figures["running"] == inspected.figures["waiting"] == 0
        assert inspected.figures["swap_slots_used"] == 0

    def _track(self, job: DecodeJob) -> None:
        for start in job.sequences:
            self.choices[start.handle] = Choice(job, start, list(start.committed_token_ids))

    def _first_token(self, handle: int) -> int | None:
        """Return the token that the prefill worker drew; None if it ended the choice."""
        token_id, reason = self._expected(self.choices[handle])
        self.choices[handle].output.append(token_id)
        self.choices[handle].ended = reason or ""
        if reason is not None:
            self.ended_at_prefill.add(handle)
        return token_id if reason is None else None

    def _expected(self, choice: Choice) -> tuple[int, FinishReason | None]:
        stops, prompt, output = choice.job.stops, choice.job.prompt_token_ids, tuple(choice.output)
        banned = banned_token_ids(stops, len(output))
        token_id = next_token(prompt + output, _sample_of(choice, prompt + output, banned))
        return token_id, finish_reason(stops, token_id, len(output) + 1)

    def _new_drafter(self) -> NewDrafter | None:
        return (lambda: _KnowingDrafter(self)) if self.draft_period else None

    def _on_event(self, event: Event) -> None:
        match event:
            case Reserved(handoff_id, block_ids, num_cached):
                handoff = self.handoffs[handoff_id]
                assert handoff.block_ids is None, "reserved twice"
                handoff.block_ids, handoff.num_cached = block_ids, num_cached
                found = handoff.token_ids[: num_cached * self.limits.block_size]
                assert self.runner.read(block_ids[:num_cached], len(found)) == found
                for block_id in block_ids[num_cached:]:
                    self.runner.scribble(block_id, mark=handoff_id + 1)
            case Unreservable():
                del self.handoffs[event.handoff_id]
                self.refused_handoffs.append(event)
            case Started(_, handles):
                for handle in handles:
                    assert not self.choices[handle].started, "started twice"
                    self.choices[handle].started = True
            case StepTokens():
                self._take_tokens(event)
            case Failed(_, handles):
                self.failures.append(event)
                for handle in handles:
                    assert not self.choices[handle].ended or handle in self.ended_at_prefill, "failed after its end"
                    self.choices[handle].ended = "failed"
            case Frozen():
                self.frozen[event.ticket_id] = event
            case FreezeRefused() | ThawRefused():
                self.refused_moves.append(event)
            case Thawed(_, handle):
                assert handle in self.choices
            case _:
                super()._on_event(event)

    def _take_tokens(self, event: StepTokens) -> None:
        assert event.step == self.steps
        for told in event.tokens:
            choice = self.choices[told.handle]
            assert choice.started, "a token before its start"
            assert not choice.ended, f"a token after the end: {choice}"
            assert told.index == len(choice.output), "repeated or missing token"
            assert (told.token.token_id, told.token.finish_reason) == self._expected(choice)
            choice.output.append(told.token.token_id)
            choice.ended = told.token.finish_reason or ""


def import_now(bench: SchedulerBench, job: DecodeJob) -> list[int]:
    """Import a hand-off from reservation to admission without a step in between. Return the handles."""
    bench.finish(bench.reserve(job))
    return [start.handle for start in job.sequences]
