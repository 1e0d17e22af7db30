"""Computes steps on one device. Owns the order of a step: copies, forward, draw; never decides what is in it."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.batch import pack
from engine.kv.pool import KvPool
from engine.scheduling.step import Chunk, DrawnToken, StepPlan, StepResult
from engine.staging import to_device
from engine.steps.draws import StepDraws
from engine.steps.forward import Forward
from engine.steps.sampler import RowDraw


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
        self._newest: StartedStep | None = None

    def run(self, plan: StepPlan) -> StepResult:
        return self.start(plan).result()

    def start(self, plan: StepPlan) -> "StartedStep":
        """Computes the step on a CPU; on a GPU everything is on its way and nothing was waited for."""
        logits = self.logits(plan)
        draws = StepDraws(logits, plan, self.compiled_draw)
        self._newest = StartedStep(self, plan, draws, self._mark(), can_feed=self.feeds and draws.is_whole)
        return self._newest

    def finish(self, started: "StartedStep") -> StepResult:
        plan, remaining = started.plan, iter(started.draws.read())
        tokens = tuple(tuple(next(remaining) for _ in chunk.samples) for chunk in plan.chunks)
        tokens = tuple(map(_accepted, plan.chunks, tokens))
        tokens = tuple(() if place in started.misfed else drawn for place, drawn in enumerate(tokens))
        if self._forget_wrong_guesses(plan, tokens):
            started.written = self._mark()
        if started.written is not None:
            started.written.synchronize()
        redrawn = self._take_back(started)
        guesses = self.drafts.draft(plan, tokens) if self.drafts is not None else ()
        return StepResult(tokens, guesses, redrawn)

    def _take_back(self, started: "StartedStep") -> tuple[int, ...]:
        """Of the step behind this one, what it computed of tokens that were drawn again. It is still the newest one."""
        behind = self._newest
        if not started.draws.redrawn or behind is None or behind is started:
            return ()
        redrawn = tuple(started.draws.redrawn)
        behind.misfed = frozenset(place for place, chunk in enumerate(behind.plan.chunks) if chunk.fed_by in redrawn)
        if behind.misfed:
            chunks = [behind.plan.chunks[place] for place in behind.misfed]
            self._zero([(chunk, chunk.start) for chunk in chunks])
            behind.written = self._mark()
        return redrawn

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
        assert self._newest is not None and self._newest.draws.token_ids is not None, "there is nothing to feed it with"
        places, samples = fed
        input_ids.index_copy_(0, places, self._newest.draws.token_ids.index_select(0, samples))

    def _mark(self) -> torch.cuda.Event | None:
        if self._pool.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._pool.device))
        return event

    def _forget_wrong_guesses(self, plan: StepPlan, tokens: tuple[tuple[DrawnToken, ...], ...]) -> bool:
        places = [
            (chunk, position)
            for chunk, accepted in zip(plan.chunks, tokens, strict=True)
            if chunk.num_guesses
            for position in range(chunk.end - chunk.num_guesses - 1 + len(accepted), chunk.end)
        ]
        if places:
            self._zero(places)
        return bool(places)

    def _zero(self, places: Sequence[tuple[Chunk, int]]) -> None:
        """Positions of chunks' sequences."""
        size = self._pool.layout.block_size
        where = [(chunk.block_ids[position // size], position % size) for chunk, position in places]
        self._pool.zero_positions(*to_device(torch.tensor(where).T, self._pool.device))


class StartedStep:
    """A step on its way. `written`: an event behind its last write. `misfed`: its chunks fed with a token which
    was then drawn again."""

    def __init__(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        draws: StepDraws,
        written: torch.cuda.Event | None,
        *,
        can_feed: bool,
    ) -> None:
        self.plan = plan
        self.draws = draws
        self.written = written
        self.misfed: frozenset[int] = frozenset()
        self.can_feed = can_feed
        self._runner = runner

    def result(self) -> StepResult:
        """Waits for its tokens and for its last write."""
        return self._runner.finish(self)


def _accepted(chunk: Chunk, drawn: tuple[DrawnToken, ...]) -> tuple[DrawnToken, ...]:
    """Guesses that were drawn as guessed, and the first token that was not: the very tokens that steps of one token
    would have drawn, as each draw depends on its position and logits alone."""
    if not chunk.num_guesses:
        return drawn
    guesses = chunk.token_ids[-chunk.num_guesses :]
    num_right = next((i for i, guess in enumerate(guesses) if drawn[i].token_id != guess), len(guesses))
    return drawn[: num_right + 1]
