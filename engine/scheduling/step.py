"""One engine step as values: a scheduler's plan and the runner's result. Pure.

A step computes a packed batch of chunks. A chunk is a run of consecutive tokens of one sequence: a whole prompt, a part
of one, or the single newest token of a decoding sequence. Prefill chunks and decodes may share a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from cluster.messages import Sampling, TokenLogprobs

Command = TypeVar("Command", contravariant=True)
Event = TypeVar("Event", covariant=True)

UNKNOWN_TOKEN = -1  # placeholder for a token that a running step has not returned yet


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to draw from a chunk's last logits. The noise depends on (seed, position, token id) alone."""

    seed: int
    position: int  # position of the drawn token in the whole sequence, counted from 0
    sampling: Sampling
    banned_token_ids: frozenset[int] = frozenset()  # stop tokens while min_tokens is not reached


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
class StepPlan:
    """The work of one step, performed in this order: blocks are swapped out, swapped in, copied, and computed."""

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockSwap, ...] = ()
    swaps_in: tuple[BlockSwap, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens[i]` has one DrawnToken per `plan.chunks[i].samples`; with draft tokens, only the accepted ones and one
    more, and the KV of the rejected ones has been zeroed. When it is returned, everything the step wrote to the pool is
    visible to any reader of it (on a GPU: an event behind the last write has completed).

    `redrawn` are the samples, counted over the step, whose final token differs from the one that the next step was
    launched with. The KV that the next step computed from the wrong token is zeroed, and its sample is dropped.
    `draft_tokens`: for each chunk the draft model's answer to its DraftRequest; empty if no chunk has one. `swap_s`:
    how long the swaps took.
    """

    tokens: tuple[tuple[DrawnToken, ...], ...]
    draft_tokens: tuple[tuple[int, ...], ...] = ()
    redrawn: tuple[int, ...] = ()
    swap_s: float = 0.0


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
    """A launched step behind which another step may be launched before its result is read."""

    @property
    def can_feed(self) -> bool:
        """Whether the next step's chunks can read this step's drawn tokens on the device, without overwriting anything
        of this step that is still to be read."""
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
    `complete` or `fail` for it. Nothing is called between `plan` and its `complete` or `fail`, so nothing that a
    running step reads or writes is freed under it.
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
        """Whether anything may be decided before the running step ends."""
        ...

    def may_apply(self, command: Command) -> bool:
        """Return whether a command may be applied while the step runs; if not, it and all later commands wait for the
        step's end."""
        ...

    def plan_ahead(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        """Plan the next step as if no sequence of the running step ended with a token that is not known yet. Return
        None if that token is needed first. Sequences that did end are dropped from the next step's result."""
        ...
