"""Drawing in parts: the tokens equal those of one draw over all rows for every size of parts, and no part is too
large.
"""

import pytest
import torch

from cluster.messages import Sampling
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.sampler import StepDraws, draw, parts

VOCAB = 50


def chunk(*positions: int, num_draft_tokens: int = 0) -> Chunk:
    """`positions` of its samples."""
    sampling = Sampling(temperature=1.0, top_p=0.9, num_logprobs=2)
    samples = tuple(
        Sample(seed=place, position=position, sampling=sampling) for place, position in enumerate(positions)
    )
    return Chunk(0, (1, 2, 3, 4), 0, (0,), samples, num_draft_tokens)


# Three choices of one prompt, a prompt that is not over, a token, two draft tokens and what follows, five choices.
PLAN = StepPlan((chunk(4, 4, 4), chunk(), chunk(9), chunk(5, 6, 7, num_draft_tokens=2), chunk(1, 1, 1, 1, 1)))
ROWS = [0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 5, 5]


@pytest.mark.parametrize("most_rows", [1, 2, 3, 5, 100])
def test_drawing_in_parts_changes_no_token_and_bounds_the_rows_of_a_part(most_rows: int) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    samples = [sample for planned in PLAN.chunks for sample in planned.samples]
    found = list(parts(logits, PLAN, most_elements=most_rows * VOCAB + VOCAB - 1))

    assert max(len(rows) for rows, _ in found) <= most_rows
    assert torch.equal(torch.cat([rows for rows, _ in found]), logits[ROWS])
    assert [token for rows, some in found for token in draw(rows, some)] == draw(logits[ROWS], samples)


@pytest.mark.parametrize("most_rows", [1, 5, 100])
def test_a_step_gives_the_same_tokens_for_every_size_of_parts(monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("engine.steps.sampler._LOGITS_AT_ONCE", most_rows * VOCAB)
    samples = [sample for planned in PLAN.chunks for sample in planned.samples]
    assert StepDraws(logits, PLAN).read() == draw(logits[ROWS], samples)


def test_rows_of_ordinary_steps_are_not_copied() -> None:
    logits = torch.randn(7, VOCAB)
    ((rows, _),) = parts(logits, StepPlan(tuple(chunk(at) for at in range(7))), most_elements=1 << 20)
    assert rows.data_ptr() == logits.data_ptr()


def test_a_step_that_ends_no_prompt_draws_no_token() -> None:
    assert StepDraws(torch.empty(0, VOCAB), StepPlan((chunk(),))).read() == []
