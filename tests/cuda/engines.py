"""Small engines on the GPU."""

from pathlib import Path

import pytest
import torch
import transformers

from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from tests.golden.families import BLOCK_SIZE, CHUNK_TOKENS, FAMILIES, Family
from tests.golden.forced import num_blocks

DEVICE = "cuda"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Heads as wide as the libraries' kernels want them.
WIDE = Family(
    "wide_llama",
    transformers.LlamaConfig,
    {**FAMILIES["llama"].settings, "hidden_size": 128, "head_dim": 64},
    std=0.1,
)


def build(folder: Path, family: Family, **changes: object) -> Engine:
    """Build an engine with a pool for the sequences of the golden tests."""
    family.save(folder)
    given: dict[str, object] = {
        "model": str(folder),
        "dtype": "float32",
        "device": DEVICE,
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks(),
        "max_prefill_tokens": CHUNK_TOKENS,
        "max_num_seqs": 20,
    }
    return build_engine(EngineSettings(**given | changes))  # type: ignore[arg-type]
