"""The scheduler's sequences: their state, their destination, their chunks of a step, and the table of live ones. Pure.
Owned by the scheduler alone.

A sequence is decoded *here*, or it is an *export*: a prompt whose blocks are leased to a ticket as they are sealed, and
that ends with its first tokens.

A sequence that is decoded here has several choices only while their shared prompt is being prefilled. With the prompt's
last chunk every choice draws its own token and becomes a sequence of its own.
"""

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil
from typing import Generic, TypeVar

from cluster.errors import DeadlineExceeded
from cluster.fair_queue import FairQueue
from cluster.messages import (
    DecodeJob,
    FinishReason,
    MemberId,
    PrefillJob,
    PromptLogprobs,
    SequenceStart,
    TenantShare,
)
from cluster.protocol.hashing import BlockChain
from engine.sampling.logit_state import GrammarState, LogitState
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.policies import Rank
from engine.speculation.drafter import Drafter

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True, eq=False)
class Export:
    """The destination of a sequence whose KV another worker imports. Its KV leaves through the ticket."""

    ticket_id: bytes
    has_importer: bool  # False as soon as no importer will come: nothing more is leased or announced
    num_leased: int = 0  # leading blocks that are sealed, leased and announced
    started_s: float = 0.0  # when its first step was planned
    chunks: list[tuple[int, float]] = field(default_factory=list)  # tokens of each step, and when it ended since then
    num_noted: int = 0  # tokens of the prompt up to the last chunk
    num_prompt_logprobs: int | None = None  # as in PrefillJob
    num_scored: int = 1  # leading tokens whose log-probabilities steps have, or will have, returned; the first has none
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one job. `number` is the order of arrival; a hand-off arrives with its Reserve."""

    number: int
    job: DecodeJob | PrefillJob
    num_prompt: int  # tokens of the prompt, without committed ones
    admitted_s: float
    num_live: int = 0  # choices that have not ended; an export counts as one
    export: Export | None = None  # None: its sequences are decoded here

    @property
    def router(self) -> MemberId:
        """The router that receives the tokens of sequences decoded here."""
        assert isinstance(self.job, DecodeJob), "an export has no router's stream"
        return self.job.router


@dataclass(frozen=True, slots=True)
class Swapped:
    """The KV of a preempted sequence: its `first` leading blocks are shared and stay in the prefix cache, the others
    are in slots of host memory."""

    first: int
    slots: tuple[int, ...]
    unverified: set[int] = field(default_factory=set)  # indices of its blocks whose KV was not verified


@dataclass(slots=True, eq=False)
class Sequence:
    """A choice as it is computed here, or several choices while their prompt is prefilled. `token_ids`: prompt,
    committed and drawn tokens, and a placeholder while a step is planned ahead. The KV of the first `num_computed`
    tokens is in `block_ids`, or swapped out.
    """

    number: int  # identifies it in plans
    group: Group
    choices: tuple[tuple[int, SequenceStart], ...]  # (index in the job, start)
    token_ids: list[int]
    chain: BlockChain  # hashes of its full blocks
    # Places in a step, and copies of the tail block: one per choice. An export draws all its tokens from one place.
    num_slots: int
    num_computed: int = 0
    num_kept: int = 0  # leading blocks that are sealed and in the prefix cache
    num_cached: int = 0  # leading tokens whose KV was found in the prefix cache
    block_ids: tuple[int, ...] = ()
    # Reserved for private copies of a shared tail: one per further choice before the split, then at most one.
    spare_ids: tuple[int, ...] = ()
    swapped: Swapped | None = None  # only while it waits
    has_run: bool = False  # has been in a step; if it waits, it was preempted
    num_steps_in_flight: int = 0  # steps in flight that contain it
    is_over: bool = False  # ended; the outcome of a step in flight is dropped
    rank: Rank = ()  # at the last sort of its queue; lower ranks go first
    virtual_start: float = 0.0  # by the tenants' fair queue at the last sort
    charged: float = 0.0  # to its tenant for its prompt, in tokens of output
    predicted_tokens: int = 0  # total length of the output; 0: unknown
    drafter: Drafter | None = None  # None until its first speculative step
    logit_state: LogitState | None = None  # None until it draws, and if its request changes no logits
    grammar_state: GrammarState | None = None  # None until it draws, and if its request has no grammar
    # Input to policies (engine.scheduling.policies.Work).
    num_done: int = 0  # the highest num_computed so far
    num_done_waiting: int = 0  # num_done when its last wait ended
    waits_since_s: float | None = None  # None while it runs; a running prompt waits while steps pass it over
    waited_s: float = 0.0  # duration of its last wait

    @property
    def num_left(self) -> int:
        """Return the number of known tokens without KV: 1 for a sequence that decodes."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.group.num_prompt

    @property
    def num_output_left(self) -> int:
        return self.group.job.stops.max_tokens - self.num_output

    @property
    def is_scored(self) -> bool:
        """Return whether the request asks for the log-probabilities of its prompt. Then all positions are computed,
        cached or not."""
        return self.group.export is not None and self.group.export.num_prompt_logprobs is not None

    @property
    def is_last_token_next(self) -> bool:
        """Return whether the next token is certain to end it."""
        return self.group.export is not None or self.num_output_left <= 1

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more tokens as computed."""
        self.num_computed += num_tokens
        self.num_done = max(self.num_done, self.num_computed)

    def wait(self, now_s: float) -> None:
        """Begin to wait, unless it waits already."""
        if self.waits_since_s is None:
            self.waits_since_s = now_s

    def run(self, now_s: float) -> None:
        """End its wait, if it waits."""
        if self.waits_since_s is None:
            return
        self.waited_s, self.waits_since_s, self.num_done_waiting = now_s - self.waits_since_s, None, self.num_done

    def split_off(self, number: int, choice: tuple[int, SequenceStart], spare_ids: tuple[int, ...]) -> "Sequence":
        """Return a new sequence for one of the choices, on the same blocks."""
        assert not self.num_steps_in_flight
        return replace(
            self,
            number=number,
            choices=(choice,),
            num_slots=1,
            token_ids=list(self.token_ids),
            chain=self.chain.copy(),
            num_cached=0,
            spare_ids=spare_ids,
            drafter=None,
            logit_state=None,
            grammar_state=None,
        )


def expected_output_left(job: DecodeJob, num_output: int, predicted_tokens: int) -> int:
    """Return how many more tokens a choice is expected to generate, by this worker's prediction (0: unknown), or else
    by its router's."""
    expected = predicted_tokens or ceil(job.num_expected_output) or job.stops.max_tokens
    return max(1, min(expected, job.stops.max_tokens) - num_output)


Choices = tuple[tuple[int, SequenceStart], ...]


class LiveSequences:
    """`lengths` records the output length of each choice that ends and predicts that of new ones. `tenants` counts the
    groups of each tenant."""

    def __init__(self, lengths: LengthPredictor | None, tenants: FairQueue) -> None:
        self._lengths = lengths
        self._tenants = tenants
        # A sequence with several choices has one entry per handle.
        self._sequences: dict[tuple[MemberId, int], Sequence] = {}
        self._exports: dict[bytes, Sequence] = {}
        self._groups: dict[int, Group] = {}
        self._deadlines: Deadlines[int] = Deadlines()  # by group number
        self._numbers = count()
        self._arrivals = count()

    @property
    def next_deadline_s(self) -> float | None:
        return self._deadlines.next_s()

    def __contains__(self, key: tuple[MemberId, int]) -> bool:
        return key in self._sequences

    def names(self) -> Iterable[tuple[MemberId, int]]:
        """Return the router and the handle of every live choice that is decoded here."""
        return self._sequences.keys()

    @property
    def tenants(self) -> list[TenantShare]:
        """The tenant of each live group."""
        return [group.job.tenant for group in self._groups.values()]

    @property
    def tickets(self) -> Iterable[bytes]:
        """The tickets of all live exports."""
        return self._exports.keys()

    def get(self, router: MemberId, handle: int) -> Sequence | None:
        return self._sequences.get((router, handle))

    def get_export(self, ticket_id: bytes) -> Sequence | None:
        return self._exports.get(ticket_id)

    def due(self, now_s: float) -> Iterator[Group]:
        """Yield the groups whose deadline has passed."""
        for number in self._deadlines.due(now_s):
            yield self._groups[number]

    def of_group(self, group: Group) -> dict[int, Sequence]:
        """Return the live sequences of a group by handle."""
        return {handle: sequence for (_, handle), sequence in self._sequences.items() if sequence.group is group}

    def missed_deadline(self, group: Group) -> DeadlineExceeded:
        """Return the error of a group that is decoded here and whose deadline has passed."""
        sequences = self.of_group(group).values()
        phase = "decode" if any(sequence.has_run for sequence in sequences) else "the decode queue"
        progress = f"{max(sequence.num_output for sequence in sequences)} of {group.job.stops.max_tokens} tokens"
        return DeadlineExceeded(f"{group.job.timeout_s:.3g} s passed in {phase}, with {progress}")

    def next_arrival(self) -> int:
        """Return the number of a group or a hand-off that arrives now."""
        return next(self._arrivals)

    def new_group(self, number: int, job: DecodeJob, now_s: float) -> Group:
        return self._add_group(Group(number, job, len(job.prompt_token_ids), now_s))

    def new_sequence(self, group: Group, choices: Choices, chain: BlockChain) -> Sequence:
        """Create a sequence for choices that continue from the same tokens, and list its choices as live."""
        assert isinstance(group.job, DecodeJob)
        token_ids = list(group.job.prompt_token_ids + choices[0][1].committed_token_ids)
        sequence = Sequence(next(self._numbers), group, choices, token_ids, chain, num_slots=len(choices))
        self.predict(sequence)
        group.num_live += len(choices)
        for _, start in choices:
            self._sequences[group.router, start.handle] = sequence
        return sequence

    def new_export(self, export: Export, job: PrefillJob, chain: BlockChain, now_s: float) -> Sequence:
        """Create the sequence of an export and list it as live."""
        num_prompt = len(job.token_ids) - job.num_committed
        group = self._add_group(Group(self.next_arrival(), job, num_prompt, now_s, num_live=1, export=export))
        choices = tuple((index, SequenceStart(handle=index, seed=seed)) for index, seed in enumerate(job.seeds))
        sequence = Sequence(next(self._numbers), group, choices, list(job.token_ids), chain, num_slots=1)
        self._exports[export.ticket_id] = sequence
        return sequence

    def new_number(self) -> int:
        """Return the number of a sequence that is split off."""
        return next(self._numbers)

    def add_split(self, sequence: Sequence) -> None:
        """List a sequence that was split off under the handle of its only choice."""
        self._sequences[sequence.group.router, sequence.choices[0][1].handle] = sequence

    def rename(self, sequence: Sequence, new_handle: int) -> None:
        """Change the handle of a sequence with one choice."""
        router, ((index, start),) = sequence.group.router, sequence.choices
        sequence.choices = ((index, replace(start, handle=new_handle)),)
        del self._sequences[router, start.handle]
        self._sequences[router, new_handle] = sequence

    def predict(self, sequence: Sequence) -> None:
        """Predict its output length, if it has no prediction or has exceeded it."""
        if self._lengths is not None and sequence.num_output >= sequence.predicted_tokens:
            group, job = sequence.group, sequence.group.job
            known = group.num_prompt, sequence.num_output
            sequence.predicted_tokens = self._lengths.predict(job.cache_salt, *known, job.stops.max_tokens)

    def end(self, router: MemberId, handle: int, reason: FinishReason | None) -> Sequence | None:
        """Remove a choice. `reason`: why it finished; None if it was cancelled or failed. Return the sequence that it
        was a choice of, or None if it had ended before."""
        sequence = self._sequences.pop((router, handle), None)
        if sequence is None:
            return None
        if self._lengths is not None:
            was_cut = reason is not FinishReason.STOP
            salt, num_prompt = sequence.group.job.cache_salt, sequence.group.num_prompt
            self._lengths.observe(salt, num_prompt, sequence.num_output, was_cut=was_cut)
        self._end_choice(sequence.group)
        return sequence

    def end_export(self, ticket_id: bytes) -> Sequence | None:
        """Remove an export. Return its sequence, or None if it had ended before."""
        sequence = self._exports.pop(ticket_id, None)
        if sequence is not None:
            self._end_choice(sequence.group)
        return sequence

    def check(self) -> set[int]:
        """Raise AssertionError if groups and sequences disagree. Return the numbers of all sequences."""
        num_live = sum(group.num_live for group in self._groups.values())
        num_listed = len(self._sequences) + len(self._exports)
        assert num_live == num_listed, f"groups count {num_live} live choices of {num_listed}"
        return {sequence.number for sequence in (*self._sequences.values(), *self._exports.values())}

    def _add_group(self, group: Group) -> Group:
        self._groups[group.number] = group
        self._tenants.enter(group.job.tenant)
        self._deadlines.add(group.number, group.admitted_s + group.job.timeout_s)
        return group

    def _end_choice(self, group: Group) -> None:
        group.num_live -= 1
        if group.num_live == 0:
            del self._groups[group.number]
            self._tenants.leave(group.job.tenant)
            self._deadlines.discard(group.number)


class Deadlines(Generic[Key]):
    """The deadlines of one scheduler's work, by key. A scheduler discards a key when its work ends for any reason.

    `due` costs O(1) until a deadline may have passed.
    """

    def __init__(self) -> None:
        self._deadlines: dict[Key, float] = {}
        self._earliest_s = math.inf  # at or before the earliest deadline; exact after each scan

    def add(self, key: Key, deadline_s: float) -> None:
        assert key not in self._deadlines, f"{key!r} has a deadline already"
        self._deadlines[key] = deadline_s
        self._earliest_s = min(self._earliest_s, deadline_s)

    def discard(self, key: Key) -> None:
        self._deadlines.pop(key, None)

    def due(self, now_s: float) -> tuple[Key, ...]:
        """Remove and return the keys whose deadline has passed, in the order they were added."""
        if now_s < self._earliest_s:
            return ()
        due = tuple(key for key, deadline_s in self._deadlines.items() if deadline_s <= now_s)
        for key in due:
            del self._deadlines[key]
        self._earliest_s = min(self._deadlines.values(), default=math.inf)
        return due

    def next_s(self) -> float | None:
        """Return a time no later than the earliest deadline, or None if there is none."""
        return self._earliest_s if self._deadlines else None
