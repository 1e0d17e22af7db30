"""The demo model's perplexity and divergence on held-out text when its pool keeps KV of 8 bits.

`python -m tests.golden.pool_perplexity 30` prints, for 30 files, the figures of benchmarks/results/cpu_engine.md.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cluster.messages import Sampling
from engine.kv.layout import lay_out
from engine.kv.pool import KvPool
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.runner import ModelRunner
from tests.golden.wire_perplexity import (
    BLOCK_SIZE,
    NUM_TOKENS,
    PROMPT_TOKENS,
    Increase,
    compare,
    demo_model,
    held_out,
)

_NUM_BLOCKS = -(-NUM_TOKENS // BLOCK_SIZE)
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss against a pool in the model's own dtype: perplexity, and mean KL divergence of the next token in
    nats.
    """

    increase: Increase
    divergence: float


def losses(kv_dtypes: Sequence[str], num_sequences: int) -> dict[str, Loss]:
    native = demo_model().layout.dtype
    sequences = held_out(num_sequences)
    logits = {dtype: torch.cat(_logits(dtype, sequences)) for dtype in (native, *kv_dtypes)}
    targets = torch.tensor([token_id for token_ids in sequences for token_id in token_ids[PROMPT_TOKENS + 1 :]])
    nats = {dtype: F.cross_entropy(rows, targets, reduction="none").double() for dtype, rows in logits.items()}
    expected = logits[native].log_softmax(-1)
    return {
        dtype: Loss(
            compare(nats[native], nats[dtype]),
            F.kl_div(logits[dtype].log_softmax(-1), expected, log_target=True, reduction="batchmean").item(),
        )
        for dtype in kv_dtypes
    }


def _logits(kv_dtype: str, sequences: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return the logits after each token behind the prompt: computed in chunks, then token by token, over a pool of
    this dtype.
    """
    loaded = demo_model()
    pool = KvPool(lay_out([place.shape for place in loaded.layout.layers], BLOCK_SIZE, kv_dtype), _NUM_BLOCKS)
    runner = ModelRunner(loaded.forward(pool), pool)
    blocks = tuple(range(_NUM_BLOCKS))
    found = []
    for token_ids in sequences:
        for start in range(0, PROMPT_TOKENS, _CHUNK):
            end = min(start + _CHUNK, PROMPT_TOKENS)
            runner.logits(StepPlan((Chunk(0, token_ids[start:end], start, blocks),)))
        # Every token on its own, as in decoding, in one step: each sees the ones before it.
        decodes = tuple(
            Chunk(0, token_ids[at : at + 1], at, blocks, (Sample(seed=0, position=at + 1, sampling=Sampling()),))
            for at in range(PROMPT_TOKENS, NUM_TOKENS - 1)
        )
        found.append(runner.logits(StepPlan(decodes)).float())
    pool.close()
    return found


if __name__ == "__main__":
    for kv_dtype, loss in losses(("int8", "fp8"), int(sys.argv[1])).items():
        print(kv_dtype, loss)
