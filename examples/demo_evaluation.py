"""Measures how well the demo model predicts held-out tokens, how clear its choices are, and how well an n-gram model
predicts the same tokens.

Never trains the model and never writes a file.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from demo_corpus import CONTEXT, END_OF_TEXT_ID, VOCAB_SIZE
from ngram import KneserNey
from transformers import LlamaForCausalLM

NGRAM_ORDER = 5
NEAR_TIE = 0.1

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Evaluation:
    loss: float  # nats per token
    median_margin: float  # top-1 logit minus top-2 logit
    near_ties: float  # share of positions whose margin is below NEAR_TIE
    accuracy: float  # share of positions whose top-1 is what came next


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokens: Ids) -> Evaluation:
    """Evaluate each token once, in adjacent windows of the full context; the last window is shorter."""
    losses, margins, hits = [], [], []
    for start in range(0, len(tokens) - 1, CONTEXT):
        window = torch.from_numpy(tokens[start : start + CONTEXT + 1])[None]
        logits, targets = predict(model, window)
        top = logits.topk(2, dim=-1)
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        margins.append(top.values[:, 0] - top.values[:, 1])
        hits.append(top.indices[:, 0] == targets)
    margin = torch.cat(margins)
    return Evaluation(
        loss=torch.cat(losses).mean().item(),
        median_margin=margin.median().item(),
        near_ties=(margin < NEAR_TIE).float().mean().item(),
        accuracy=torch.cat(hits).float().mean().item(),
    )


def ngram_loss(train: Ids, held_out: Ids) -> float:
    """Return the n-gram model's nats per token over the targets of `evaluate`, with full history even where a window
    begins."""
    history = np.full(NGRAM_ORDER - 2, END_OF_TEXT_ID)
    model = KneserNey(np.concatenate([history, train]), order=NGRAM_ORDER, vocab_size=VOCAB_SIZE)
    return float(-model.log_probs(np.concatenate([history, held_out])).mean())


def predict(model: LlamaForCausalLM, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return next-token logits and the tokens that followed: `[sequences, length + 1]` -> `[tokens, vocab]`,
    `[tokens]`."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return logits.flatten(0, 1), windows[:, 1:].flatten()
