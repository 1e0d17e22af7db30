"""Computes the masks of a step's positions on a thread of its own, beside the forward.

A row without a grammar costs one comparison. A state that rejects its sequence's tokens, or has no mask, is refused:
the step goes on, and the scheduler ends that sequence alone.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from cluster.errors import GrammarRejected, InvalidGrammar
from cluster.grammar.engine import Matcher
from engine.grammar.compiled_grammars import CompiledGrammars
from engine.grammar.grammar_state import GrammarState
from engine.scheduling.step import StepPlan


@dataclass(frozen=True, slots=True)
class _Work:
    place: int  # of the chunk
    state: GrammarState
    draft_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """The masks of one step while they are computed; nothing if no row of it has a grammar."""

    work: tuple[_Work, ...] = ()
    computing: "Future[None] | None" = None

    def wait(self) -> Mapping[int, GrammarRejected]:
        """Wait for the masks, which the states then hold. Return the refused chunks, by their place in the plan."""
        if self.computing is None:
            return {}
        self.computing.result()
        return {work.place: work.state.refusal for work in self.work if work.state.refusal is not None}


NO_MASKS = PendingMasks()


@dataclass(slots=True, eq=False)
class StepMasks:
    """Used by the step thread, which calls `begin` before the forward and `wait` before it draws."""

    grammars: CompiledGrammars
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "grammar masks"))

    def begin(self, plan: StepPlan) -> PendingMasks:
        work = tuple(
            _Work(place, state, chunk.samples[-1].draft_tokens)
            for place, chunk in enumerate(plan.chunks)
            if chunk.samples and (state := chunk.samples[0].grammar_state) is not None
        )
        return PendingMasks(work, self._thread.submit(self._compute, work)) if work else NO_MASKS

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
        is_possible = words.any(dim=1).tolist()
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
        place, end = matcher.num_tokens, " after the end of the answer" if matcher.is_over else ""
        named = f"token {expected[0]} " if len(expected) == 1 else ""
        state.refusal = GrammarRejected(f"output {named}at index {place} does not follow the request's grammar{end}")
        return None


def _write_draft_masks(matcher: Matcher, draft_tokens: tuple[int, ...], rows: torch.Tensor) -> None:
    """Write the mask before each draft token and after the last one. Behind a draft token that the grammar rejects
    nothing is drawn that counts."""
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


def _refuse_if_empty(state: GrammarState, matcher: Matcher, is_possible: bool) -> None:
    if error := matcher.error:
        state.refusal = GrammarRejected(
            f"the request's grammar became too complex at index {state.num_output}: {error}"
        )
    elif not is_possible:
        state.refusal = GrammarRejected(f"no token may follow at index {state.num_output} of the answer")
