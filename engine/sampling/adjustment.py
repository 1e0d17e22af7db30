"""Computes the logits of rows whose requests change them; keeps nothing between calls.

The formulas are those that clients know. A bias is added to its token's logit (OpenAI, `transformers`' SequenceBias).
The repetition penalty of Keskar et al. (2019) divides the logit of a token that occurred in the prompt or the output if
it is positive, and multiplies it otherwise. OpenAI's frequency and presence penalties are subtracted: c * frequency,
and presence where c > 0, for a token that occurred c times in the output. Tokens that are not allowed, and those that
would complete a bad word, get -inf. The order is that of `transformers` and vLLM.

Rows are computed in float32, each by itself, so a row's logits do not depend on the other rows of a step.

Masks of grammars exclude tokens of their rows in the same way (`MaskedRows`).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from engine.batch import to_device
from engine.sampling.logit_state import LogitState
from engine.scheduling.step import Sample


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """The changed logits of some rows of a step."""

    rows: list[int]  # ascending
    logits: torch.Tensor  # [rows, vocab], contiguous; float32, or float64 if the step's logits are

    def in_place_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy of the step's `logits`, `[all rows, vocab]`, with the changed rows."""
        index = to_device(torch.tensor(self.rows), logits.device)
        return logits.to(self.logits.dtype).index_copy(0, index, self.logits)


def adjusted_rows(logits: torch.Tensor, samples: Sequence[Sample]) -> AdjustedRows:
    """Return the rows of `logits`, `[rows, vocab]`, that their samples change, at least one. The given logits stay as
    they are."""
    rows = [row for row, sample in enumerate(samples) if sample.logit_state is not None]
    index = to_device(torch.tensor(rows), logits.device)
    ours = logits.index_select(0, index)
    ours = ours if ours.dtype == torch.float64 else ours.float()
    states = [(state, samples[row].draft_tokens) for row in rows if (state := samples[row].logit_state) is not None]
    _add_bias(ours, [state for state, _ in states])
    _penalize(ours, states)
    _exclude(ours, states)
    return AdjustedRows(rows, ours)


def _add_bias(ours: torch.Tensor, states: Sequence[LogitState]) -> None:
    rows, ids, values = array("q"), array("q"), array("f")
    for row, state in enumerate(states):
        rows.extend(repeat(row, len(state.rules.logit_bias)))
        ids.extend(token_id for token_id, _ in state.rules.logit_bias)
        values.extend(value for _, value in state.rules.logit_bias)
    if ids:
        at = _index(rows, ids, ours.device)
        ours.index_put_(at, ours[at] + to_device(torch.tensor(values, dtype=ours.dtype), ours.device))


def _penalize(ours: torch.Tensor, states: Sequence[tuple[LogitState, tuple[int, ...]]]) -> None:
    rows, ids, counts = array("q"), array("q"), array("q")
    for row, (state, draft_tokens) in enumerate(states):
        seen = state.seen(draft_tokens)
        rows.extend(repeat(row, len(seen.ids)))
        ids.extend(seen.ids)
        counts.extend(seen.counts)
    if not ids:
        return
    rules = [state.rules for state, _ in states]
    penalties = torch.tensor(
        [[rule.repetition_penalty, rule.frequency_penalty, rule.presence_penalty] for rule in rules], dtype=ours.dtype
    )
    at = _index(rows, ids, ours.device)
    repetition, frequency, presence = to_device(penalties, ours.device)[at[0]].unbind(1)
    num_output = to_device(torch.tensor(counts), ours.device).to(ours.dtype)
    found = ours[at]
    found = torch.where(found > 0, found / repetition, found * repetition)
    ours.index_put_(at, found - frequency * num_output - presence * (num_output > 0))


def _exclude(ours: torch.Tensor, states: Sequence[tuple[LogitState, tuple[int, ...]]]) -> None:
    _allow(ours, [state for state, _ in states])
    rows, ids = array("q"), array("q")
    for row, (state, draft_tokens) in enumerate(states):
        forbidden = state.forbidden(draft_tokens)
        rows.extend(repeat(row, len(forbidden)))
        ids.extend(forbidden)
    if ids:
        ours.index_put_(_index(rows, ids, ours.device), ours.new_full((), -torch.inf))


def _allow(ours: torch.Tensor, states: Sequence[LogitState]) -> None:
    rows, ids = array("q"), array("q")
    for row, state in enumerate(states):
        rows.extend(repeat(row, len(state.rules.allowed_token_ids)))
        ids.extend(state.rules.allowed_token_ids)
    if ids:
        at = _index(rows, ids, ours.device)
        kept = ours[at]
        ours.index_fill_(0, to_device(torch.tensor(sorted(set(rows))), ours.device), -torch.inf)
        ours.index_put_(at, kept)


def _index(rows: "array[int]", ids: "array[int]", device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    placed = to_device(
        torch.stack([torch.frombuffer(rows, dtype=torch.int64), torch.frombuffer(ids, dtype=torch.int64)]), device
    )
    return placed[0], placed[1]


WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The masks of some rows of a step."""

    rows: list[int]  # ascending
    words: list[torch.Tensor]  # per row [words], int32, on the CPU; bit i: token i may be drawn

    def in_place_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy of the step's `logits`, `[all rows, vocab]`, with -inf for excluded tokens."""
        index = to_device(torch.tensor(self.rows), logits.device)
        is_allowed = _unpacked(to_device(torch.stack(self.words), logits.device), logits.shape[1])
        masked = logits.index_select(0, index).masked_fill_(~is_allowed, -torch.inf)
        return logits.index_copy(0, index, masked)


def masked_rows(samples: Sequence[Sample]) -> MaskedRows | None:
    """Return the masks of a step's samples, which have been computed; None if no sample has one. A refused state has
    none: the token drawn for it is dropped."""
    rows, words = [], []
    for row, sample in enumerate(samples):
        state = sample.grammar_state
        if state is not None and state.refusal is None:
            assert isinstance(state.masks, torch.Tensor)
            rows.append(row)
            words.append(state.masks[len(sample.draft_tokens)])
    return MaskedRows(rows, words) if rows else None


def _unpacked(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the bits as booleans `[rows, vocab_size]`; tokens beyond the masks are not allowed."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    bits = ((words.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)
    lacking = vocab_size - bits.shape[1]
    return torch.nn.functional.pad(bits, (0, lacking)) if lacking > 0 else bits[:, :vocab_size]
