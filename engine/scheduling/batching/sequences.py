"""The scheduler's sequences: their state, their destination, and their chunks of a step. Pure. Owned by the scheduler
alone.

A sequence is decoded *here*, or it is an *export*: a prompt whose blocks are leased to a ticket as they are sealed, and
that ends with its first tokens.

A sequence that is decoded here has several choices only while their shared prompt is being prefilled. With the prompt's
last chunk every choice draws its own token and becomes a sequence of its own.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from cluster.messages import DecodeJob, FinishReason, MemberId, PrefillJob, SequenceStart, TokenStops
from cluster.protocol.hashing import BlockChain
from engine.scheduling.policies import Rank
from engine.scheduling.schedule import banned_token_ids, blocks_for, finish_reason
from engine.scheduling.step import Chunk, DraftRequest, DrawnToken, Sample
from engine.speculation.drafter import Drafter


@dataclass(slots=True, eq=False)
class Export:
    """The destination of a sequence whose KV another worker imports. Its KV leaves through the ticket."""

    ticket_id: bytes
    has_importer: bool  # False as soon as no importer will come: nothing more is leased or announced
    num_leased: int = 0  # leading blocks that are sealed, leased and announced
    started_s: float = 0.0  # when its first step was planned


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
    """One choice as it is computed here, or several choices while their prompt is prefilled. `token_ids`: prompt,
    committed and drawn tokens, and a placeholder while a step is planned ahead. The KV of the first `num_computed`
    tokens is in `block_ids`, or swapped out."""

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
    predicted_tokens: int = 0  # total length of the output; 0: unknown
    drafter: Drafter | None = None  # None until its first speculative step
    # Input to policies (engine.scheduling.policies.Work).
    num_done: int = 0  # the highest num_computed so far
    num_done_waiting: int = 0  # num_done when its last wait ended
    waits_since_s: float | None = None  # None while it runs; a running prompt waits while steps pass it over
    waited_s: float = 0.0  # duration of its last wait

    @property
    def num_left(self) -> int:
        """The number of known tokens without KV: 1 while it decodes."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.group.num_prompt

    @property
    def num_output_left(self) -> int:
        return self.group.job.stops.max_tokens - self.num_output

    @property
    def is_last_token_next(self) -> bool:
        """Whether the next token is certain to end it."""
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
        )


def reaches_last_known(sequence: Sequence, num_tokens: int) -> bool:
    """Return whether a chunk of `num_tokens` reaches the last known token, so that the next token is drawn."""
    return sequence.num_computed + num_tokens == len(sequence.token_ids)


def chunk_of(
    sequence: Sequence,
    num_tokens: int,
    block_size: int,
    draft_tokens: tuple[int, ...] = (),
    draft: DraftRequest | None = None,
) -> Chunk:
    """Return a chunk of the next `num_tokens` known tokens and the draft tokens that may follow them."""
    start = sequence.num_computed
    end = start + num_tokens + len(draft_tokens)
    return Chunk(
        sequence_id=sequence.number,
        token_ids=(*sequence.token_ids[start : start + num_tokens], *draft_tokens),
        start=start,
        block_ids=sequence.block_ids[: blocks_for(end, block_size)],
        samples=_samples(sequence, len(draft_tokens)) if reaches_last_known(sequence, num_tokens) else (),
        num_draft_tokens=len(draft_tokens),
        draft=draft,
    )


def until_finished(stops: TokenStops, drawn: SequenceOf[DrawnToken], num_output: int) -> SequenceOf[DrawnToken]:
    """Return the drawn tokens up to and including the one that ends the sequence. `num_output`: output tokens
    before."""
    for place, token in enumerate(drawn, start=1):
        if finish_reason(stops, token.token_id, num_output + place) is not None:
            return drawn[:place]
    return drawn


def finish_reason_of(sequence: Sequence) -> FinishReason | None:
    """Return why the sequence ends with its last token, or None if it continues."""
    return finish_reason(sequence.group.job.stops, sequence.token_ids[-1], sequence.num_output)


def _samples(sequence: Sequence, num_draft_tokens: int) -> tuple[Sample, ...]:
    """Return one sample per choice; with draft tokens, one per draft token and one for the token after them."""
    job, known, num_output = sequence.group.job, len(sequence.token_ids), sequence.num_output
    if not num_draft_tokens:
        banned = banned_token_ids(job.stops, num_output)
        return tuple(Sample(choice.seed, known, job.sampling, banned) for _, choice in sequence.choices)
    ((_, choice),) = sequence.choices
    return tuple(
        Sample(choice.seed, known + place, job.sampling, banned_token_ids(job.stops, num_output + place))
        for place in range(num_draft_tokens + 1)
    )
