"""The demo model's perplexity on held-out text whose beginning was prefilled on another pool and handed over.

`python -m tests.golden.wire_perplexity 30` prints, for 30 files, the figures of benchmarks/results/wire_dtypes.md.
"""

import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.model.loading import load
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.runner import ModelRunner
from kvtransfer.wire.wire_format import WireDtype

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "demo_model"
BLOCK_SIZE = 16
PROMPT_TOKENS = 16 * BLOCK_SIZE + 8  # the last block is a tail
NUM_TOKENS = PROMPT_TOKENS + 1 + 128


@dataclass(frozen=True, slots=True)
class Increase:
    """The increase of perplexity over a native hand-off, in per cent, with the standard error over the scored
    tokens.
    """

    percent: float
    standard_error: float
    perplexity: float
    num_tokens: int


@cache
def demo_model() -> LoadedModel:
    torch.set_num_threads(1)
    return load(EngineSettings(model=str(MODEL), device="cpu", block_size=BLOCK_SIZE, max_prefill_tokens=64))


def held_out(num_sequences: int) -> list[tuple[int, ...]]:
    """Return the beginnings of `num_sequences` sufficiently long files on which the demo model was not trained."""
    spec = importlib.util.spec_from_file_location("demo_corpus", EXAMPLES / "demo_corpus.py")
    assert spec is not None and spec.loader is not None
    corpus = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = corpus  # its dataclasses look themselves up
    spec.loader.exec_module(corpus)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    found: list[tuple[int, ...]] = []
    for text in corpus.read_corpus().held_out:
        token_ids = (corpus.END_OF_TEXT_ID, *tokenizer.encode(text[: 8 * NUM_TOKENS]).ids)
        if len(token_ids) >= NUM_TOKENS and len(found) < num_sequences:
            found.append(token_ids[:NUM_TOKENS])
    assert len(found) == num_sequences, f"only {len(found)} held-out files are long enough"
    return found


class HandedOver:
    """A prefill pool and a decode pool of one sequence each, with a model over both."""

    def __init__(self) -> None:
        loaded = demo_model()
        num_blocks = -(-NUM_TOKENS // BLOCK_SIZE)
        self._source, self._target = KvPool(loaded.layout, num_blocks), KvPool(loaded.layout, num_blocks)
        self._prefill, self._decode = (
            ModelRunner(loaded.forward(self._source), self._source),
            ModelRunner(loaded.forward(self._target), self._target),
        )
        self._blocks = tuple(range(num_blocks))
        self._layout = loaded.layout

    def losses(self, token_ids: tuple[int, ...], wire_dtypes: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the loss in nats of every token after the prompt's first one, each predicted from KV in the wire
        dtype.
        """
        prompt = Chunk(0, token_ids[:PROMPT_TOKENS], 0, self._blocks)
        self._prefill.logits(StepPlan((prompt,)))
        prompt_blocks = range(-(-PROMPT_TOKENS // BLOCK_SIZE))
        found = {}
        for name in wire_dtypes:
            wire = WireDtype(name)
            sent, received = wire.format(self._source, self._layout), wire.format(self._target, self._layout)
            sent.encode(prompt_blocks)
            self._target.raw.zero_()
            received.memory.raw.copy_(sent.memory.raw)
            received.decode(prompt_blocks)
            found[name] = self._score(token_ids)
        return found

    def _score(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """Score every token in a separate chunk, as in decoding, in one step: each attends to the tokens before it,
        whose K and V the step has already written."""
        chunks = tuple(
            Chunk(0, token_ids[at : at + 1], at, self._blocks, (Sample(seed=0, position=at + 1, sampling=Sampling()),))
            for at in range(PROMPT_TOKENS, NUM_TOKENS - 1)
        )
        logits = self._decode.logits(StepPlan(chunks)).float()
        return F.cross_entropy(logits, torch.tensor(token_ids[PROMPT_TOKENS + 1 :]), reduction="none")


def increases(wire_dtypes: Sequence[str], num_sequences: int) -> dict[str, Increase]:
    handed_over = HandedOver()
    names = ("native", *wire_dtypes)
    per_sequence = [handed_over.losses(token_ids, names) for token_ids in held_out(num_sequences)]
    losses = {name: torch.cat([found[name] for found in per_sequence]).double() for name in names}
    return {name: compare(losses["native"], losses[name]) for name in names}


def compare(native: torch.Tensor, other: torch.Tensor) -> Increase:
    more = other - native
    return Increase(
        percent=100 * math.expm1(more.mean().item()),
        standard_error=100 * more.std().item() / math.sqrt(len(more)),
        perplexity=math.exp(other.mean().item()),
        num_tokens=len(more),
    )


if __name__ == "__main__":
    for wire_dtype, increase in increases(("int8", "fp8", "int4"), int(sys.argv[1])).items():
        print(wire_dtype, increase)
