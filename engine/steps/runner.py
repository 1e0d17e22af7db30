"""Computes steps on one device. Owns the order inside a step: copies, forward, draw; never decides its content.

`ScoredBatch` scores the tokens of prompts: their log-probabilities, their ranks and the most likely tokens at their
positions. The forward computes the logits of all scored positions beside those that tokens are drawn from. A step
scores few enough positions (`max_scored_tokens`) for their logits to fit the memory that steps have beside the pool,
and float32 copies are made of a few rows at a time.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cluster.errors import GrammarRejected
from cluster.messages import PromptLogprobs
from engine.batch import PackedBatch, pack, to_device, to_host
from engine.grammar.compiled_grammars import PendingMasks, StepMasks
from engine.kv.pool import KvPool
from engine.scheduling.step import Chunk, DrawnToken, ScoredTokens, StepPlan, StepResult
from engine.steps.forward import Forward
from engine.steps.sampler import RowDraw, StepDraws

_LOGITS_OF_A_STEP = 1 << 25  # 128 MiB as float32
_LOGITS_AT_ONCE = 1 << 22
_LEAST_TOKENS = 16


def max_scored_tokens(vocab_size: int) -> int:
    """Return how many prompt tokens a step may score."""
    return max(_LEAST_TOKENS, _LOGITS_OF_A_STEP // vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """The scores of one step while they are copied to the host."""

    scored: tuple[ScoredTokens, ...]
    columns: Sequence[torch.Tensor]  # log-probabilities and ranks [tokens], best ids and theirs [tokens, most wanted]

    def read(self) -> tuple[PromptLogprobs, ...]:
        """Return the scores, once the device has done the step."""
        if not self.scored:
            return ()
        parts = zip(
            *(torch.split(column, [len(each.token_ids) for each in self.scored]) for column in self.columns),
            strict=True,
        )
        return tuple(_packed(each, *part) for each, part in zip(self.scored, parts, strict=True))


NO_SCORES = PromptScores((), ())


class ScoredBatch:
    """A packed step whose forward returns the logits of the scored positions too. `batch`: its rows are in order."""

    def __init__(self, plan: StepPlan, packed: PackedBatch) -> None:
        self._scored = plan.scored
        rows = [row for each in plan.scored for row in _rows(each, plan, packed)]
        device = packed.logit_rows.device
        wanted = torch.cat([packed.logit_rows, to_device(torch.tensor(rows), device)])
        ordered, order = wanted.sort()
        places = order.argsort()
        self._sampled, self._places = torch.split(places, [len(packed.logit_rows), len(rows)])
        self._targets = to_device(
            torch.tensor([token_id for each in plan.scored for token_id in each.token_ids]), device
        )
        self.batch = replace(packed, logit_rows=ordered)

    def sampled(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the rows of logits that tokens are drawn from, without the rows that only prompt scores need."""
        return logits[self._sampled]

    def scores(self, logits: torch.Tensor) -> PromptScores:
        num_top = min(max(each.num_top for each in self._scored), logits.shape[1])
        size = max(1, _LOGITS_AT_ONCE // logits.shape[1])
        slices = zip(torch.split(self._places, size), torch.split(self._targets, size), strict=True)
        parts = [_score(logits[places], targets, num_top) for places, targets in slices]
        return PromptScores(self._scored, to_host([torch.cat(column) for column in zip(*parts, strict=True)]))


def _rows(scored: ScoredTokens, plan: StepPlan, packed: PackedBatch) -> range:
    """Return the rows of the step at whose positions these tokens come next."""
    first = packed.rows[scored.chunk].start + scored.first_position - 1 - plan.chunks[scored.chunk].start
    return range(first, first + len(scored.token_ids))


def _score(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, targets.unsqueeze(1))
    best = logprobs.topk(num_top, dim=-1)
    return own.squeeze(1), (logprobs > own).sum(dim=-1).int() + 1, best.indices.int(), best.values


def _packed(
    scored: ScoredTokens, own: torch.Tensor, ranks: torch.Tensor, best_ids: torch.Tensor, best: torch.Tensor
) -> PromptLogprobs:
    width = min(scored.num_top, best.shape[1])
    columns = (own, ranks, best_ids[:, :width], best[:, :width])
    return PromptLogprobs(scored.first_position, width, *(_bytes(column) for column in columns))


def _bytes(column: torch.Tensor) -> bytes:
    return column.contiguous().numpy().tobytes()


class Drafts(Protocol):
    """Returns the draft tokens that follow the tokens of a step (`engine/speculation/draft_model.py`)."""

    def draft(self, plan: StepPlan, tokens: Sequence[Sequence[DrawnToken]]) -> tuple[tuple[int, ...], ...]: ...


class ModelRunner:
    """Runs one Forward over one pool; called by the step thread alone.

    A block is zeroed when a step writes to it first without filling it, and so are the positions of rejected draft
    tokens. So the positions after a sequence's last token are always zero, and its partly filled block can be exported
    without a change.
    """

    def __init__(self, forward: Forward, pool: KvPool) -> None:
        self.forward = forward  # may be replaced between steps
        self._pool = pool
        self.compiled_draw: RowDraw | None = None  # draws instead of torch, if set
        self.feeds = True  # its steps may feed steps that are launched after them
        self.drafts: Drafts | None = None  # answers DraftRequests, if a draft model is loaded
        # Called on a CPU in each step that `announces`, when its KV is in the pool; by the thread of the step.
        self.on_written: Callable[[], None] | None = None
        self.masks: StepMasks | None = None  # computes the masks of grammars; without it no sample has a grammar
        self._newest: StartedStep | None = None

    def run(self, plan: StepPlan) -> StepResult:
        return self.start(plan).result()

    def start(self, plan: StepPlan) -> "StartedStep":
        """Launch the step: on a CPU compute it, on a GPU enqueue it without waiting."""
        masks = self._begin_masks(plan)
        logits, scores = self._scored_logits(plan) if plan.scored else (self.logits(plan), NO_SCORES)
        refused = masks.wait() if masks is not None else {}
        draws = StepDraws(logits, plan, self.compiled_draw)
        can_feed = self.feeds and draws.is_whole
        self._newest = StartedStep(self, plan, draws, scores, self._mark(), refused, can_feed=can_feed)
        return self._newest

    def finish(self, started: "StartedStep") -> StepResult:
        plan, remaining = started.plan, iter(started.draws.read())
        tokens = tuple(tuple(next(remaining) for _ in chunk.samples) for chunk in plan.chunks)
        tokens = tuple(map(_accepted, plan.chunks, tokens))
        dropped = started.misfed | started.refused.keys()
        tokens = tuple(() if place in dropped else drawn for place, drawn in enumerate(tokens))
        if self._zero_rejected_draft_tokens(plan, tokens):
            started.written = self._mark()
        if started.written is not None:
            started.written.synchronize()
        redrawn = self._take_back(started)
        draft_tokens = self.drafts.draft(plan, tokens) if self.drafts is not None else ()
        return StepResult(tokens, draft_tokens, redrawn, refused=started.refused, scored=started.scores.read())

    def _begin_masks(self, plan: StepPlan) -> PendingMasks | None:
        """Begin to compute the masks of grammars; None: no sequence of the step has a grammar."""
        return self.masks.begin(plan) if self.masks is not None and plan.has_grammar else None

    def _take_back(self, started: "StartedStep") -> tuple[int, ...]:
        """Zero the KV that the next step computed from tokens that were drawn again. Return the indices of these
        chunks."""
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
        """Compute the step up to the logits, `[rows, vocab]`: the row of each sampled chunk's last token, after the
        rows before its draft tokens."""
        batch = self._prepare(plan)
        return torch.empty(0, 0) if batch is None else self.forward(batch)

    @torch.inference_mode()
    def _scored_logits(self, plan: StepPlan) -> tuple[torch.Tensor, PromptScores]:
        """Compute the step like `logits`, and the scores of its prompts."""
        batch = self._prepare(plan)
        assert batch is not None, "a chunk of the plan is scored"
        scored = ScoredBatch(plan, batch)
        logits = self.forward(scored.batch)
        return scored.sampled(logits), scored.scores(logits)

    def _prepare(self, plan: StepPlan) -> PackedBatch | None:
        """Copy blocks and pack the step's chunks; None: it has none."""
        if plan.copies:
            self._pool.copy_blocks(plan.copies)
        if not plan.chunks:
            return None
        batch = pack(plan.chunks, self._pool.layout.block_size, self._pool.device)
        if plan.announces and self._pool.device.type == "cpu":  # on a GPU the writes are only launched by then
            batch = dataclasses.replace(batch, written=self.on_written)
        if batch.fresh_blocks is not None:
            self._pool.tensor.index_fill_(0, batch.fresh_blocks, 0)
        if batch.fed is not None:
            self._feed(batch.input_ids[0], batch.fed)
        return batch

    def _feed(self, input_ids: torch.Tensor, fed: torch.Tensor) -> None:
        """Copy the tokens that the step before has drawn into this step's inputs. On a GPU this follows those draws on
        the stream, without reading them on the host.
        """
        assert self._newest is not None and self._newest.draws.token_ids is not None, (
            "there is no step before it to read the token from"
        )
        places, samples = fed
        input_ids.index_copy_(0, places, self._newest.draws.token_ids.index_select(0, samples))

    def _mark(self) -> torch.cuda.Event | None:
        if self._pool.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._pool.device))
        return event

    def _zero_rejected_draft_tokens(self, plan: StepPlan, tokens: tuple[tuple[DrawnToken, ...], ...]) -> bool:
        places = [
            (chunk, position)
            for chunk, accepted in zip(plan.chunks, tokens, strict=True)
            if chunk.num_draft_tokens
            for position in range(chunk.end - chunk.num_draft_tokens - 1 + len(accepted), chunk.end)
        ]
        if places:
            self._zero(places)
        return bool(places)

    def _zero(self, places: Sequence[tuple[Chunk, int]]) -> None:
        """Zero these positions of the chunks' sequences."""
        size = self._pool.layout.block_size
        where = [(chunk.block_ids[position // size], position % size) for chunk, position in places]
        self._pool.zero_positions(*to_device(torch.tensor(where).T, self._pool.device))


class StartedStep:
    """A launched step. `written` is an event after its last write. `misfed` are its chunks whose input token was drawn
    again."""

    def __init__(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        draws: StepDraws,
        scores: PromptScores,
        written: torch.cuda.Event | None,
        refused: Mapping[int, GrammarRejected],
        *,
        can_feed: bool,
    ) -> None:
        self.plan = plan
        self.draws = draws
        self.scores = scores
        self.written = written
        self.refused = refused
        self.misfed: frozenset[int] = frozenset()
        self.can_feed = can_feed
        self._runner = runner

    def result(self) -> StepResult:
        """Wait for the step's tokens and its last write, and return its result."""
        return self._runner.finish(self)


def _accepted(chunk: Chunk, drawn: tuple[DrawnToken, ...]) -> tuple[DrawnToken, ...]:
    """Return the accepted draft tokens and the drawn token after them.

    They equal the tokens of steps without draft tokens, as each draw depends on its position and logits alone.
    """
    if not chunk.num_draft_tokens:
        return drawn
    draft_tokens = chunk.token_ids[-chunk.num_draft_tokens :]
    num_right = next((i for i, token_id in enumerate(draft_tokens) if drawn[i].token_id != token_id), len(draft_tokens))
    return drawn[: num_right + 1]


class LaunchingRunner(ModelRunner):
    """A Launcher: `result` waits for a launched step, in the order of the launches.

    Tandem's own kernels run on the calling thread's current device, which is the first GPU unless it was set.
    """

    def __init__(self, forward: Forward, pool: KvPool) -> None:
        super().__init__(forward, pool)
        self._device = pool.device

    def launch(self, plan: StepPlan) -> StartedStep:
        """Launch a step. If launching raises, wait until all enqueued work is done: the step's blocks are then freed
        and may be written by other streams."""
        try:
            return self.start(plan)
        except Exception:
            torch.cuda.current_stream(self._device).synchronize()
            raise

    def start(self, plan: StepPlan) -> StartedStep:
        with torch.cuda.device(self._device):
            return super().start(plan)

    def finish(self, started: StartedStep) -> StepResult:
        with torch.cuda.device(self._device):
            return super().finish(started)
