"""One engine step as values: what a scheduler plans and what the runner answers. Pure.

A step computes a packed batch of chunks. A chunk is a run of consecutive tokens of one sequence: a whole prompt, a part
of one, or the single newest token of a decoding sequence. Prefill chunks and decodes may share a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from cluster.messages import Sampling, TokenLogprobs

Command = TypeVar("Command", contravariant=True)
Event = TypeVar("Event", covariant=True)

UNKNOWN_TOKEN = -1  # stands where a token will be that a step under way has not told yet


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to draw from a chunk's last logits. The noise depends on (seed, position, token id) alone."""

    seed: int
    position: int  # of the token that is drawn, counted over the whole sequence from 0
    sampling: Sampling
    banned_token_ids: frozenset[int] = frozenset()  # stop tokens while min_tokens is not reached


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Asks the runner's draft model for guesses at what will follow the token that a chunk draws."""

    token_ids: Sequence[int]  # known of the whole sequence, without guesses: the scheduler's own list, read in the step
    max_guesses: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute in this step."""

    sequence_id: int  # the scheduler's own number; the runner only hands it back
    token_ids: tuple[int, ...]
    start: int  # position of the first of them; positions before it are in the blocks already
    block_ids: tuple[int, ...]  # all blocks of the sequence, up to the last position written here
    samples: tuple[Sample, ...] = ()  # empty unless the chunk ends the known tokens; n for the n choices of a prompt
    # So many of token_ids, the last ones, are guesses at tokens not drawn yet. Then there is one sample more than
    # guesses, for one choice: sample i draws the token that guess i stands for, the last one draws what follows them.
    num_guesses: int = 0
    draft: DraftRequest | None = None  # only with samples for one choice
    # Which sample of the step before, counted over that whole step, draws the only token of this chunk. It was not
    # known when this was planned: `token_ids` is UNKNOWN_TOKEN alone.
    fed_by: int | None = None

    @property
    def end(self) -> int:
        """Position after the last token computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block to copy inside the pool before anything is computed."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """A block and the slot of host memory that it is copied to, or from."""

    block_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """In this order: blocks are swapped out, swapped in, copied, and computed."""

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
    """`tokens[i]` has one DrawnToken per `plan.chunks[i].samples`; with guesses, only those that were right and one
    more, and the KV of the wrong ones is zero again. When it is returned, everything the step wrote to the pool is
    visible to any reader of it (on a GPU: an event behind the last write has completed).

    `redrawn`: samples, counted over the step, whose token is another than a step launched behind this one was fed with.
    What that one computed of it is zero again, and it draws nothing there.
    `guesses`: for each chunk what its DraftRequest brought, at most what it asked for; empty without any request.
    `swap_s`: how long the swaps took."""

    tokens: tuple[tuple[DrawnToken, ...], ...]
    guesses: tuple[tuple[int, ...], ...] = ()
    redrawn: tuple[int, ...] = ()
    swap_s: float = 0.0


class Runner(Protocol):
    """Computes steps on one device. Called by one thread."""

    def run(self, plan: StepPlan) -> StepResult: ...


class Launched(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Waits for it. Raises what the step raised."""
        ...


@runtime_checkable
class Feeding(Protocol):
    """A Launched that another step may be launched behind before its result is read."""

    @property
    def can_feed(self) -> bool:
        """Its tokens are where the next step's chunks can be fed from, and nothing that is still to be read of it is
        overwritten by that step."""
        ...

    def result(self) -> StepResult: ...


@runtime_checkable
class Launcher(Protocol):
    """A Runner of a device that computes on its own while the thread goes on."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def launch(self, plan: StepPlan) -> Launched: ...


class Scheduler(Protocol[Command, Event]):
    """A pure decision maker, driven by one StepLoop thread; it owns the BlockPool.

    One turn of the loop: `apply` every command that has come, `reap`, `plan`, and where there is a plan, `complete` or
    `fail` of it. Nothing is called between `plan` and its `complete` or `fail`, so nothing that a running step reads or
    writes is freed under it.
    """

    def apply(self, command: Command, now_s: float) -> tuple[Event, ...]:
        """Takes in what the outside asks; answers with events for the outside."""
        ...

    def reap(self, now_s: float) -> tuple[tuple[Event, ...], float | None]:
        """Ends what is past its deadline. Answers with events, and with the time at which to be asked again at the
        latest (None: no deadline is running)."""
        ...

    def plan(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        """What the outside should know before the next step is computed, and that step, or None when there is nothing
        to compute before the next command or deadline."""
        ...

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> tuple[Event, ...]:
        """Takes in what a planned step computed."""
        ...

    def fail(self, plan: StepPlan, error: Exception, now_s: float) -> tuple[Event, ...]:
        """The step raised: its sequences end, their blocks are freed."""
        ...


@runtime_checkable
class PlanningAhead(Protocol[Command, Event]):
    """A Scheduler that can plan one step behind the one that runs, before it knows what that one draws.

    While one step is under way, and no other: `reap`, and `apply` of what `may_apply`, until `plan_ahead` was called.
    Then nothing before the `complete` or `fail` of the first of the two. Blocks that a step under way writes to are
    freed for nobody before it has ended.
    """

    @property
    def may_plan_ahead(self) -> bool:
        """Of the step that is under way, whether anything may be decided before its end."""
        ...

    def may_apply(self, command: Command) -> bool:
        """While it is under way. False: after its end, and whatever came later after that."""
        ...

    def plan_ahead(self, now_s: float) -> tuple[tuple[Event, ...], StepPlan | None]:
        """The next step, as if no sequence of the one under way ended with a token that is not known, or None where
        that has to be known first. Sequences that did end with it are dropped from the outcome of this one."""
        ...
