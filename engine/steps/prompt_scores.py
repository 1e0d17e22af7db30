"""Scores the tokens of prompts: their log-probabilities, their ranks and the most likely tokens at their positions.

The forward computes the logits of all scored positions beside those that tokens are drawn from. A step scores few
enough positions (`max_scored_tokens`) for their logits to fit the memory that steps have beside the pool, and float32
copies are made of a few rows at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cluster.messages import PromptLogprobs
from engine.batch import PackedBatch
from engine.scheduling.step import ScoredTokens, StepPlan
from engine.staging import to_device, to_host

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
        """Return the logits that the step draws from, as they are without scores."""
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
