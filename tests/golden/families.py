"""Tiny models, one per family that Tandem promises, built from configurations and seeded.

Every weight is random, biases, norms and sinks included, so that none of them can be left out unseen. Matrices are
drawn wide enough for decisive logits: a top-1 margin of 1e-3 would otherwise be missed too often. The weights of a
family are the same in every run on every machine: `tests/golden/test_seeded_weights.py` compares their checksums.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

BLOCK_SIZE = 8
CHUNK_TOKENS = 20
WINDOW = 18

_SHAPE = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_NO_HEAD_DIM = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
_NO_GROUPS = {key: value for key, value in _NO_HEAD_DIM.items() if key != "num_key_value_heads"}
_MIXED = ["sliding_attention", "full_attention"]


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    config_type: Callable[..., PreTrainedConfig]
    settings: Mapping[str, object]
    std: float = 0.2
    seed: int = 0  # chosen so that what a test measures is far from its limit: near-ties differ between models

    def build(self) -> PreTrainedModel:
        """Build the model and draw every parameter from a generator that its name seeds. No value remains that the
        constructor has drawn from torch's global generator or has left uninitialised.
        """
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            self.config_type(**self.settings)
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                generator = np.random.default_rng((self.seed, zlib.crc32(name.encode())))
                noise = torch.from_numpy(generator.standard_normal(tuple(parameter.shape), dtype=np.float32))
                if parameter.dim() >= 2:
                    parameter.copy_(noise * self.std)
                else:
                    parameter.copy_(_centre(parameter) + noise * 0.1)
        return model

    def save(self, folder: Path) -> None:
        """Save the model as a checkpoint that `--model` accepts."""
        self.build().save_pretrained(folder)


def _centre(vector: torch.Tensor) -> float:
    """Return the value around which a vector's weights are drawn: 1 or 0 for the weights of a norm, else 0."""
    return 1.0 if bool((vector == 1.0).all()) else 0.0


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", transformers.LlamaConfig, _SHAPE, seed=2),
        Family(
            "qwen2",
            transformers.Qwen2Config,
            _NO_HEAD_DIM | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ),
        Family("qwen3", transformers.Qwen3Config, _SHAPE),
        Family("mistral", transformers.MistralConfig, _SHAPE | {"sliding_window": WINDOW}),
        Family(
            "gemma2",
            transformers.Gemma2Config,
            _SHAPE
            | {
                "num_hidden_layers": 4,
                "sliding_window": WINDOW,
                "layer_types": _MIXED * 2,
                "query_pre_attn_scalar": 24,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 10.0,
            },
        ),
        Family(
            "gemma3",
            transformers.Gemma3TextConfig,
            _SHAPE | {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": _MIXED * 2},
        ),
        Family("phi3", transformers.Phi3Config, _NO_HEAD_DIM | {"sliding_window": WINDOW}),
        Family(
            "gpt2",
            transformers.GPT2Config,
            {
                "vocab_size": 128,
                "n_embd": 48,
                "n_layer": 3,
                "n_head": 4,
                "n_positions": 128,
                "bos_token_id": 0,
                "eos_token_id": 0,
            },
        ),
        Family("gpt_neox", transformers.GPTNeoXConfig, _NO_GROUPS | {"rotary_pct": 0.5}),
        Family(
            "mixtral",
            transformers.MixtralConfig,
            _SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2},
            seed=1,
        ),
        Family("olmo2", transformers.Olmo2Config, _NO_HEAD_DIM),
        Family(
            "gpt_oss",
            transformers.GptOssConfig,
            _SHAPE
            | {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": WINDOW,
                "layer_types": _MIXED,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            seed=1,
        ),
    )
}
