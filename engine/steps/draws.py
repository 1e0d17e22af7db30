"""Draws all tokens of a step in parts, so that the temporary memory of drawing does not grow with the number of
samples.

A prompt with many choices has one row of logits for all of them: a worker that ends many such prompts in one step would
otherwise hold thousands of rows at once.
"""

import itertools
from collections.abc import Iterator

import torch

from engine.scheduling.step import DrawnToken, Sample, StepPlan
from engine.staging import to_device
from engine.steps.sampler import Draw, RowDraw

_ELEMENTS_AT_ONCE = 1 << 26  # 256 MiB as float32, and 256 rows of the largest vocabularies


class StepDraws:
    """The draws of one step. The constructor does not wait; `read` waits for the tokens.

    The tokens of an ordinary step are drawn in one part, launched at once. Further parts are drawn by `read`, one after
    another, so that at most one is in memory. Unless `is_whole`, the logits must not change until `read`.
    """

    def __init__(self, logits: torch.Tensor, plan: StepPlan, compiled: RowDraw | None = None) -> None:
        """`logits` is `[rows, vocab]`: one row per chunk, or one per sample of a chunk with draft tokens."""
        self._parts = parts(logits, plan, _ELEMENTS_AT_ONCE)
        self._compiled = compiled
        self._on_its_way = [Draw(*part, compiled) for part in itertools.islice(self._parts, 1)]
        first = self._on_its_way[0] if self._on_its_way else None
        num_samples = sum(len(chunk.samples) for chunk in plan.chunks)
        self.is_whole = first is None or first.num_rows == num_samples  # `read` has nothing left to draw
        self.token_ids = None if first is None else first.token_ids  # of the first part, on the logits' device
        self.redrawn: list[int] = []  # samples whose token, once read, is not the one in `token_ids`

    def read(self) -> list[DrawnToken]:
        """Return the tokens. May be called once."""
        tokens: list[DrawnToken] = []
        while self._on_its_way:
            draw = self._on_its_way.pop()
            num_before = len(tokens)
            tokens += draw.read()
            self.redrawn += [num_before + row for row in draw.redrawn]
            self._on_its_way += (Draw(*part, self._compiled) for part in itertools.islice(self._parts, 1))
        return tokens


def parts(logits: torch.Tensor, plan: StepPlan, most_elements: int) -> Iterator[tuple[torch.Tensor, list[Sample]]]:
    """Yield the plan's samples in order with their rows of logits, in parts of at most `most_elements` elements, or one
    row. Contiguous rows are not copied."""
    sampled = list(_rows_and_samples(plan))
    size = max(1, most_elements // max(1, logits.shape[1]))
    for start in range(0, len(sampled), size):
        rows = [row for row, _ in sampled[start : start + size]]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            taken = logits[rows[0] : rows[0] + len(rows)]
        else:
            taken = logits[to_device(torch.tensor(rows), logits.device)]
        yield taken, [sample for _, sample in sampled[start : start + size]]


def _rows_and_samples(plan: StepPlan) -> Iterator[tuple[int, Sample]]:
    row = 0
    for chunk in plan.chunks:
        for place, sample in enumerate(chunk.samples):
            yield (row + place if chunk.num_draft_tokens else row), sample
        row += len(chunk.samples) if chunk.num_draft_tokens else bool(chunk.samples)
