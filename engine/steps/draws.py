"""Draws all tokens of a step, in parts, so that what drawing takes for a while does not grow with a step's samples.

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
    """Making it waits for nothing; `read` waits for the tokens. What an ordinary step draws is one part, and on its way
    from the start; further ones are drawn when it is read, each when the one before it is done, so that there is never
    more than one. Unless it is whole, the logits must stay as they are until then."""

    def __init__(self, logits: torch.Tensor, plan: StepPlan, compiled: RowDraw | None = None) -> None:
        """`logits`: `[rows, vocab]`, one row for all samples of a chunk without guesses, one for each of another's."""
        self._parts = parts(logits, plan, _ELEMENTS_AT_ONCE)
        self._compiled = compiled
        self._on_its_way = [Draw(*part, compiled) for part in itertools.islice(self._parts, 1)]
        first = self._on_its_way[0] if self._on_its_way else None
        num_samples = sum(len(chunk.samples) for chunk in plan.chunks)
        self.is_whole = first is None or first.num_rows == num_samples  # nothing is drawn when it is read
        self.token_ids = None if first is None else first.token_ids  # of the first part, on the logits' device
        self.redrawn: list[int] = []  # samples whose token, once read, is not the one in `token_ids`

    def read(self) -> list[DrawnToken]:
        """Once."""
        tokens: list[DrawnToken] = []
        while self._on_its_way:
            draw = self._on_its_way.pop()
            num_before = len(tokens)
            tokens += draw.read()
            self.redrawn += [num_before + row for row in draw.redrawn]
            self._on_its_way += (Draw(*part, self._compiled) for part in itertools.islice(self._parts, 1))
        return tokens


def parts(logits: torch.Tensor, plan: StepPlan, most_elements: int) -> Iterator[tuple[torch.Tensor, list[Sample]]]:
    """The plan's samples in order, each with its row; so many at a time that the rows have at most `most_elements`, or
    one. Rows that are one run are not copied."""
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
            yield (row + place if chunk.num_guesses else row), sample
        row += len(chunk.samples) if chunk.num_guesses else bool(chunk.samples)
