"""Computes steps on one device. Owns the order of a step: copies, forward, draw; never decides what is in it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from engine.batch import pack
from engine.draws import StepDraws
from engine.forward import Forward
from engine.pool import KvPool
from engine.sampler import RowDraw
from engine.staging import to_device
from engine.step import Chunk, DrawnToken, StepPlan, StepResult


class Drafts(Protocol):
    """Guesses what follows the tokens of a step (`engine/speculation/draft_model.py`)."""

    def draft(self, plan: StepPlan, tokens: Sequence[Sequence[DrawnToken]]) -> tuple[tuple[int, ...], ...]: ...


class ModelRunner:
    """Runs one Forward over one pool; called by the step thread alone.

    A block is zeroed when a step begins it without filling it, and so are the places of wrong guesses: the
    positions after a sequence's last token are zero at all times, and a tail is offered as it lies.
    """

    def __init__(self, forward: Forward, pool: KvPool) -> None:
        self.forward = forward  # another one may take its place between steps
        self._pool = pool
        self.compiled_draw: RowDraw | None = None  # draws in place of torch, where there is one
        self.feeds = True  # its steps may feed steps that are launched behind them
        self.drafts: Drafts | None = None  # who answers the DraftRequests, where there are any
        self._newest: torch.Tensor | None = None  # tokens of the step that was started last, where they were drawn

    def run(self, plan: StepPlan) -> StepResult:
        return self.start(plan).result()

    def start(self, plan: StepPlan) -> "StartedStep":
        """Computes the step on a CPU; on a GPU everything is on its way and nothing was waited for."""
        logits = self.logits(plan)
        draws = StepDraws(logits, plan, self.compiled_draw)
        self._newest = draws.token_ids
        return StartedStep(self, plan, draws, self._mark(), can_feed=self.feeds and draws.are_final)

    def finish(self, plan: StepPlan, drawn: Iterable[DrawnToken], written: torch.cuda.Event | None) -> StepResult:
        """`written`: an event behind the last write of what was started."""
        remaining = iter(drawn)
        tokens = tuple(tuple(next(remaining) for _ in chunk.samples) for chunk in plan.chunks)
        tokens = tuple(map(_accepted, plan.chunks, tokens))
        if self._forget_wrong_guesses(plan, tokens):
            written = self._mark()
        if written is not None:
            written.synchronize()
        return StepResult(tokens, self.drafts.draft(plan, tokens) if self.drafts is not None else ())

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Computes the step up to the logits, `[rows, vocab]`: of each sampled chunk the last token's, and before it
        those of the tokens that its guesses follow."""
        if plan.copies:
            self._pool.copy_blocks(plan.copies)
        if not plan.chunks:
            return torch.empty(0, 0)
        batch = pack(plan.chunks, self._pool.layout.block_size, self._pool.device)
        if batch.fresh_blocks is not None:
            self._pool.tensor.index_fill_(0, batch.fresh_blocks, 0)
        if batch.fed is not None:
            self._feed(batch.input_ids[0], batch.fed)
        return self.forward(batch)

    def _feed(self, input_ids: torch.Tensor, fed: torch.Tensor) -> None:
        """On a GPU in the order of its stream: behind the draws of the step before, which nobody has read yet."""
        assert self._newest is not None, "there is nothing to feed a step with"
        places, samples = fed
        input_ids.index_copy_(0, places, self._newest.index_select(0, samples))

    def _mark(self) -> torch.cuda.Event | None:
        if self._pool.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._pool.device))
        return event

    def _forget_wrong_guesses(self, plan: StepPlan, tokens: tuple[tuple[DrawnToken, ...], ...]) -> bool:
        block_size = self._pool.layout.block_size
        places = [
            (*divmod(position, block_size), chunk)
            for chunk, accepted in zip(plan.chunks, tokens, strict=True)
            if chunk.num_guesses
            for position in range(chunk.end - chunk.num_guesses - 1 + len(accepted), chunk.end)
        ]
        if places:
            where = [(chunk.block_ids[index], offset) for index, offset, chunk in places]
            self._pool.zero_positions(*to_device(torch.tensor(where).T, self._pool.device))
        return bool(places)


class StartedStep:
    """A step on its way."""

    def __init__(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        draws: StepDraws,
        written: torch.cuda.Event | None,
        *,
        can_feed: bool,
    ) -> None:
        self.can_feed = can_feed
        self._runner = runner
        self._plan = plan
        self._draws = draws
        self._written = written

    def result(self) -> StepResult:
        """Waits for its tokens and for its last write."""
        return self._runner.finish(self._plan, self._draws.read(), self._written)


def _accepted(chunk: Chunk, drawn: tuple[DrawnToken, ...]) -> tuple[DrawnToken, ...]:
    """Guesses that were drawn as guessed, and the first token that was not: the very tokens that steps of one token
    would have drawn, as each draw depends on its position and logits alone."""
    if not chunk.num_guesses:
        return drawn
    guesses = chunk.token_ids[-chunk.num_guesses :]
    num_right = next((i for i, guess in enumerate(guesses) if drawn[i].token_id != guess), len(guesses))
    return drawn[: num_right + 1]
