"""The rows of a draw that have masks, and their logits without the tokens that the masks exclude."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.scheduling.step import Sample
from engine.staging import to_device

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The masks of some rows of a step."""

    rows: list[int]  # ascending
    words: torch.Tensor  # [rows, words], int32, on the CPU; bit i of a row: token i may be drawn

    def in_place_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy of the step's `logits`, `[all rows, vocab]`, with -inf for excluded tokens."""
        index = to_device(torch.tensor(self.rows), logits.device)
        is_allowed = _unpacked(to_device(self.words, logits.device), logits.shape[1])
        masked = logits.index_select(0, index).masked_fill_(~is_allowed, -torch.inf)
        return logits.index_copy(0, index, masked)


def masked_rows(samples: Sequence[Sample]) -> MaskedRows | None:
    """Return the masks of a step's samples, which have been computed; None if no sample has one. A refused state has
    none: what is drawn for it is dropped."""
    rows, words = [], []
    for row, sample in enumerate(samples):
        state = sample.grammar_state
        if state is not None and state.refusal is None:
            assert isinstance(state.masks, torch.Tensor)
            rows.append(row)
            words.append(state.masks[len(sample.draft_tokens)])
    return MaskedRows(rows, torch.stack(words)) if rows else None


def _unpacked(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the bits as booleans `[rows, vocab_size]`; tokens beyond the masks are not allowed."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    bits = ((words.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)
    lacking = vocab_size - bits.shape[1]
    return torch.nn.functional.pad(bits, (0, lacking)) if lacking > 0 else bits[:, :vocab_size]
