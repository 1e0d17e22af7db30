"""The interface of the step loop with its scheduler and its runner: a step's budget, plan and result, and questions,
which are commands that the scheduler answers with one event each. Pure.

A step computes a packed batch of chunks. A chunk is a run of consecutive tokens of one sequence: a whole prompt, a part
of one, or the single newest token of a decoding sequence. Prefill chunks and decodes may share a step.

A step computes at most `max_prefill_tokens` tokens. Each decoding sequence uses one token of that budget first; the
rest goes to prompts, oldest first, as much as each can use. Chunks need not end on a block's boundary: ending a chunk
early would seal no block sooner and would leave budget unused. Beside running sequences, prompts also get limited time
(`PromptTime`), which protects the time between tokens.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from cluster.errors import GrammarRejected, TandemError
from cluster.messages import PromptLogprobs, Sampling, TokenLogprobs
from cluster.service_times import PrefillTimes
from engine.sampling.logit_state import GrammarState, LogitState

Command = TypeVar("Command", contravariant=True)
Event = TypeVar("Event", covariant=True)
AnswerT = TypeVar("AnswerT")
Key: TypeAlias = tuple[Hashable, ...]

UNKNOWN_TOKEN = -1  # placeholder for a token that a running step has not returned yet


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to draw from a chunk's last logits. The noise depends on (seed, position, token id) alone.

    With a `logit_state` the logits are changed first (`engine/sampling/adjustment.py`), and with a `grammar_state` only
    tokens that may follow are drawn (`engine/grammar/`). Both are the sequence's own, and are read during the step.
    """

    seed: int
    position: int  # position of the drawn token in the whole sequence, counted from 0
    sampling: Sampling
    banned_token_ids: frozenset[int] = frozenset()  # stop tokens while min_tokens is not reached
    logit_state: LogitState | None = None  # None: the request changes no logits
    draft_tokens: tuple[int, ...] = ()  # with one of the states: those of the chunk before this position
    grammar_state: GrammarState | None = None  # None: the request has no grammar


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request to the runner's draft model for the tokens that may follow the one a chunk draws."""

    token_ids: Sequence[int]  # all known tokens, no draft tokens; the scheduler's own list, read during the step
    max_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute in this step."""

    sequence_id: int  # the scheduler's own number; the runner returns it unchanged
    token_ids: tuple[int, ...]
    start: int  # position of the first of them; positions before it are in the blocks already
    block_ids: tuple[int, ...]  # all blocks of the sequence, up to the last position written here
    samples: tuple[Sample, ...] = ()  # empty unless the chunk ends the known tokens; n for the n choices of a prompt
    # The last num_draft_tokens of token_ids are draft tokens. A chunk with draft tokens has num_draft_tokens + 1
    # samples of one choice: sample i draws the position of draft token i, and the last sample draws the position after
    # them.
    num_draft_tokens: int = 0
    draft: DraftRequest | None = None  # only with samples for one choice
    # Which sample of the step before, counted over that whole step, draws the only token of this chunk. It was not
    # known when this was planned: `token_ids` is UNKNOWN_TOKEN alone.
    fed_by: int | None = None

    @property
    def end(self) -> int:
        """The position after the last token computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block to copy inside the pool before anything is computed."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """A block of the pool and the slot of host memory that it is copied to or from."""

    block_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Consecutive tokens of a prompt whose log-probabilities the step returns. Those of the token at position p come
    from the logits of position p - 1, which the chunk computes."""

    chunk: int  # its place in the plan
    first_position: int
    token_ids: tuple[int, ...]
    num_top: int  # most likely tokens at each position


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, performed in this order: blocks are swapped out, swapped in, copied, and computed."""

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockSwap, ...] = ()
    swaps_in: tuple[BlockSwap, ...] = ()
    announces: bool = False  # it seals blocks that importers may read before the step's tokens are computed
    scored: tuple[ScoredTokens, ...] = ()

    @property
    def has_grammar(self) -> bool:
        """Return whether the token of a sequence must follow a grammar."""
        return any(chunk.samples and chunk.samples[0].grammar_state is not None for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class DrawnToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens[i]` has one DrawnToken per `plan.chunks[i].samples`; with draft tokens, only the accepted ones and one
    more, and the KV of the rejected ones has been zeroed. When it is returned, everything the step wrote to the pool is
    visible to any reader of it (on a GPU: an event after the last write has completed).

    `redrawn` are the samples, counted over the step, whose final token differs from the one that the next step was
    launched with. The KV that the next step computed from the wrong token is zeroed, and its sample is dropped.
    `draft_tokens`: for each chunk the draft model's answer to its DraftRequest; empty if no chunk has one. `swap_s`:
    how long the swaps took. `refused`: chunks, by their place in the plan, whose grammar allows no token. `scored`: one
    for each of the plan's.
    """

    tokens: tuple[tuple[DrawnToken, ...], ...]
    draft_tokens: tuple[tuple[int, ...], ...] = ()
    redrawn: tuple[int, ...] = ()
    swap_s: float = 0.0
    refused: Mapping[int, GrammarRejected] = field(default_factory=dict)
    scored: tuple[PromptLogprobs, ...] = ()


class PromptTime:
    """The seconds that the prompts of the step being planned may still add to it.

    Three exceptions keep prompts going. The first prompt gets at least one block of tokens. The last tokens of a
    prompt, if they are less than a block, are computed with those before them, since a step of their own would take
    longer. A prompt that follows another one gets at least one token.
    """

    def __init__(self, times: PrefillTimes, seconds: float, block_size: int) -> None:
        self._times = times
        self._left_s = seconds
        self._block_size = block_size
        self._is_first = True

    @property
    def is_used_up(self) -> bool:
        """Return whether no prompt may begin: less than a block at the start of a prompt would fit."""
        return not self._is_first and self._times.added_s(self._block_size, 0) > self._left_s

    def take(self, num_tokens: int, num_left: int, context: int) -> int:
        """Use the time for up to `num_tokens` of a prompt's `num_left` remaining tokens, after `context` computed ones.
        Return how many may be computed."""
        floor = self._block_size if self._is_first else 1
        taken = max(min(num_tokens, floor), self._times.tokens_within(self._left_s, context, num_tokens))
        if num_left - taken < self._block_size:
            taken = num_tokens
        self._left_s -= self._times.added_s(taken, context)
        self._is_first = False
        return taken


class ChunkBudget:
    """The number of tokens that the step being planned may still compute, and the time that prompts may use of it."""

    def __init__(self, max_prefill_tokens: int, num_decodes: int = 0, max_scored_tokens: int = 0) -> None:
        # At least one, so that a prompt advances even if decoding sequences use the whole budget.
        self.left = max(1, max_prefill_tokens - num_decodes)
        self._num_scored_left = max_scored_tokens
        self._prompt_time: PromptTime | None = None

    def limit_prompts(self, prompt_time: PromptTime | None) -> None:
        """Limit the time of prompts too; None: they may use all tokens."""
        self._prompt_time = prompt_time

    @property
    def has_room_for_prompts(self) -> bool:
        return self.left > 0 and (self._prompt_time is None or not self._prompt_time.is_used_up)

    def take(self, num_tokens: int) -> int:
        """Use the budget for up to `num_tokens` tokens and return how many fit."""
        taken = min(num_tokens, self.left)
        self.left -= taken
        return taken

    def take_for_prompt(self, num_left: int, context: int) -> int:
        """Like `take`, for a prompt with `num_left` tokens to compute after `context` computed ones. There must
        be room for prompts; at least one token fits.
        """
        fitting = min(num_left, self.left)
        return self.take(fitting if self._prompt_time is None else self._prompt_time.take(fitting, num_left, context))

    def take_for_scored_prompt(self, num_left: int, context: int) -> int:
        """Like `take_for_prompt`, for a prompt that needs the logits of all its positions. The number of such positions
        in a step is limited. Returns 0 if the limit is reached."""
        fitting = min(num_left, self._num_scored_left)
        taken = self.take_for_prompt(fitting, context) if fitting else 0
        self._num_scored_left -= taken
        return taken


class Runner(Protocol):
    """Computes steps on one device. Called by one thread."""

    def run(self, plan: StepPlan) -> StepResult: ...


class Launched(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return its result. Raises the step's error."""
        ...


@runtime_checkable
class Feeding(Protocol):
    """A launched step after which another step may be launched before its result is read."""

    @property
    def can_feed(self) -> bool:
        """Return whether the next step's chunks can read this step's drawn tokens on the device, without overwriting
        anything of this step that is still to be read."""
        ...

    def result(self) -> StepResult: ...


@runtime_checkable
class Launcher(Protocol):
    """A Runner whose device computes while the calling thread continues."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def launch(self, plan: StepPlan) -> Launched: ...


class Scheduler(Protocol[Command, Event]):
    """A pure decision maker, driven by one StepLoop thread; it owns the BlockPool.

    One turn of the loop calls `apply` for every command that has arrived, `reap`, `plan`, and, if there is a plan,
    `complete` or `fail` for it. Between `plan` and its `complete` or `fail` nothing but `written` is called, so nothing
    that a running step reads or writes is freed under it.
    """

    def apply(self, command: Command, now_s: float) -> tuple[Event, ...]:
        """Apply one command and return events for the event loop."""
        ...

    def reap(self, now_s: float) -> tuple[tuple[Event, ...], float | None]:
        """End work past its deadline. Return events, and the latest time of the next call (None if no deadline is
        set)."""
        ...

    def plan(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        """Return events to send before the next step, and that step, or None if there is nothing to compute before the
        next command or deadline."""
        ...

    def written(self, plan: StepPlan) -> tuple[Event, ...]:
        """Record that all KV of a step that `announces` is in the pool, while the step still computes its tokens.

        Return the events that announce its sealed blocks. `complete` announces blocks for which this was not called."""
        ...

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        """Record a planned step's result."""
        ...

    def fail(self, plan: StepPlan, error: Exception, now_s: float) -> tuple[Event, ...]:
        """Record that the step raised: its sequences end and their blocks are freed."""
        ...


@runtime_checkable
class PlanningAhead(Protocol[Command, Event]):
    """A Scheduler that can plan one step while another one runs, before the running step's tokens are known.

    While only one step runs, the loop calls `reap`, and `apply` for commands that `may_apply` allows, until it calls
    `plan_ahead`. After that it calls nothing before `complete` or `fail` of the first of the two steps. Blocks that a
    running step writes to are not freed before it has ended.
    """

    @property
    def may_plan_ahead(self) -> bool:
        """Return whether anything may be decided before the running step ends."""
        ...

    def may_apply(self, command: Command) -> bool:
        """Return whether a command may be applied while the step runs; if not, it and all later commands wait for the
        step's end."""
        ...

    def plan_ahead(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        """Plan the next step as if no sequence of the running step ended with a token that is not known yet. Return
        None if that token is needed first. Sequences that did end are dropped from the next step's result."""
        ...


class Question(Generic[AnswerT]):
    """A command that the scheduler answers with one event: an AnswerT or a Refusal with the same key."""

    __slots__ = ()

    @property
    def key(self) -> Key:
        """A key that is unique among the questions that wait for an answer."""
        raise NotImplementedError


class Answer:
    """An event that answers a question."""

    __slots__ = ()

    @property
    def key(self) -> Key:
        """The key of the question."""
        raise NotImplementedError


class Refusal(Answer):
    """An answer that raises its error at the caller who asked."""

    __slots__ = ()
    error: TandemError
