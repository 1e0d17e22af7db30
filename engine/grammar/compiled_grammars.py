"""The compiled grammars of a worker, and the masks that they give to the positions of a step.

`CompiledGrammars` keeps grammars by digest and within bounds; any thread may use it. The tokens of the model are loaded
with the first grammar, and a grammar is compiled before its sequence is admitted, so neither stops a step. Routers have
compiled each grammar within their bounds before they send it.

`StepMasks` computes the masks of a step on a thread of its own, beside the forward. A row without a grammar costs one
comparison. A state that rejects its sequence's tokens, or has no mask, is refused: the step goes on, and the scheduler
ends that sequence alone.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cluster.errors import ConfigError, GrammarRejected, InvalidGrammar, NoGrammarWorker
from cluster.grammar.engine import GrammarEngine, Matcher, grammar_engine_id
from cluster.grammar.tokenizer_files import locate
from cluster.messages import Grammar
from engine.sampling.logit_state import GrammarState
from engine.scheduling.step import StepPlan

_MAX_KEPT = 256


class CompiledGrammars:
    def __init__(self, folder: Path | None) -> None:
        """`folder`: of the model's small files; None: this worker applies no grammars. Raises ConfigError."""
        self._folder = folder
        self.engine_id = grammar_engine_id(folder) if folder is not None else ""
        self._lock = threading.Lock()
        self._engine: GrammarEngine | None = None
        self._compiled: OrderedDict[bytes, Matcher] = OrderedDict()  # before the first token, by digest

    @property
    def engine(self) -> GrammarEngine:
        """The engine, loaded at the first call. Raises ConfigError, NoGrammarWorker."""
        if self._engine is None:
            if self._folder is None or not self.engine_id:
                raise NoGrammarWorker("this worker applies no grammars: llguidance or the model's tokenizer is missing")
            self._engine = GrammarEngine.load(self._folder)
        return self._engine

    async def prepare(self, grammar: Grammar) -> None:
        """Compile the grammar of a job that will be admitted, on another thread. Raises ConfigError, InvalidGrammar,
        NoGrammarWorker."""
        if grammar.digest not in self._compiled:
            await asyncio.to_thread(self.matcher, grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a new state before the first token. Raises ConfigError, InvalidGrammar, NoGrammarWorker."""
        with self._lock:
            digest = grammar.digest
            if digest not in self._compiled:
                self._compiled[digest] = self.engine.matcher(grammar)
            self._compiled.move_to_end(digest)
            while len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
            return self._compiled[digest].copy()


_LOG = logging.getLogger("tandem.worker")


def worker_grammars(model: str, revision: str = "") -> CompiledGrammars:
    """Return the grammars of a worker that serves this model. It serves requests without grammars in any case."""
    try:
        grammars = CompiledGrammars(locate(model, revision))
    except ConfigError as error:
        _LOG.info("grammars: off (%s)", error.message)
        return CompiledGrammars(None)
    reason = "llguidance is not installed, or the model has no tokenizer.json or no end-of-sequence token"
    _LOG.info("grammars: %s", grammars.engine_id or f"off ({reason})")
    return grammars


@dataclass(frozen=True, slots=True)
class _Work:
    place: int  # of the chunk
    state: GrammarState
    draft_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """The masks of one step while they are computed."""

    work: tuple[_Work, ...]
    computing: "Future[None]"

    def wait(self) -> Mapping[int, GrammarRejected]:
        """Wait for the masks, which the states then hold. Return the refused chunks, by their place in the plan."""
        self.computing.result()
        return {work.place: work.state.refusal for work in self.work if work.state.refusal is not None}


@dataclass(slots=True, eq=False)
class StepMasks:
    """Computes the masks of steps. The step thread calls `begin` before the forward and `wait` before it draws."""

    grammars: CompiledGrammars
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "grammar masks"))

    def begin(self, plan: StepPlan) -> PendingMasks:
        """Begin with the masks of a step in which a sequence has a grammar."""
        work = tuple(
            _Work(place, state, chunk.samples[-1].draft_tokens)
            for place, chunk in enumerate(plan.chunks)
            if chunk.samples and (state := chunk.samples[0].grammar_state) is not None
        )
        return PendingMasks(work, self._thread.submit(self._compute, work))

    @torch.inference_mode()
    def _compute(self, work: tuple[_Work, ...]) -> None:
        engine = self.grammars.engine
        num_rows = sum(len(each.draft_tokens) + 1 for each in work)
        words = torch.empty((num_rows, engine.num_words), dtype=torch.int32)
        followed: list[tuple[_Work, Matcher, int]] = []
        batch: list[tuple[Matcher, int]] = []
        row = 0
        for each in work:
            state, num_positions = each.state, len(each.draft_tokens) + 1
            state.masks, state.refusal = words[row : row + num_positions], None
            matcher = self._follow(state)
            if matcher is not None and each.draft_tokens:
                _write_draft_masks(matcher, each.draft_tokens, words[row : row + num_positions])
            elif matcher is not None:
                batch.append((matcher, row))
            if matcher is not None:
                followed.append((each, matcher, row))
            row += num_positions
        engine.write_masks(batch, words.data_ptr(), num_rows)
        is_possible = torch.from_numpy(words.numpy().any(axis=1)).tolist()  # a quarter of the time that torch's takes
        for each, matcher, first in followed:
            _refuse_if_empty(each.state, matcher, is_possible[first])

    def _follow(self, state: GrammarState) -> Matcher | None:
        """Return the state's matcher after all output tokens. None: it is refused."""
        matcher = state.matcher
        try:
            if not isinstance(matcher, Matcher) or matcher.num_tokens > state.num_output:
                matcher = state.matcher = self.grammars.matcher(state.grammar)
        except InvalidGrammar as error:
            state.refusal = GrammarRejected(f"this worker cannot compile the request's grammar: {error.message}")
            return None
        expected = state.output_from(matcher.num_tokens)
        if matcher.advance(expected) == len(expected) and not matcher.is_over:
            return matcher
        if limit := matcher.error:
            state.refusal = _too_complex(matcher.num_tokens, limit)
            return None
        place, end = matcher.num_tokens, " after the end of the answer" if matcher.is_over else ""
        named = f"token {expected[0]} " if len(expected) == 1 else ""
        state.refusal = GrammarRejected(f"output {named}at index {place} does not follow the request's grammar{end}")
        return None


def _write_draft_masks(matcher: Matcher, draft_tokens: tuple[int, ...], rows: torch.Tensor) -> None:
    """Write the mask before each draft token and after the last one. What is drawn after a draft token that the grammar
    rejects does not count.
    """
    rows.fill_(-1)
    accepted = 0
    for place in range(len(rows)):
        rows[place] = torch.frombuffer(bytearray(matcher.mask()), dtype=torch.int32)
        if matcher.error or place == len(draft_tokens) or not matcher.advance(draft_tokens[place : place + 1]):
            break
        accepted += 1
        if matcher.is_over:
            break
    if not matcher.error:
        matcher.rollback(accepted)


def _too_complex(index: int, error: str) -> GrammarRejected:
    return GrammarRejected(f"the request's grammar became too complex at index {index}: {error}")


def _refuse_if_empty(state: GrammarState, matcher: Matcher, is_possible: bool) -> None:
    if error := matcher.error:
        state.refusal = _too_complex(state.num_output, error)
    elif not is_possible:
        state.refusal = GrammarRejected(f"no token may follow at index {state.num_output} of the answer")
