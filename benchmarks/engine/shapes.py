"""The models and loads of the engine's benchmark: shapes of small public models, with random weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated feed-forward, in bfloat16; the head is the embedding."""

    name: str
    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of one layer's matrices, those that share their input as one."""
        attention = (self.heads + 2 * self.kv_heads) * self.head_dim
        gated = 2 * self.intermediate
        return ((attention, self.hidden), (self.hidden, self.hidden), (gated, self.hidden), (self.hidden, gated // 2))

    @property
    def attention_width(self) -> int:
        """Return the features of all heads of all layers. Each pair of a query and a key costs four times as many
        operations."""
        return self.layers * self.heads * self.head_dim

    @property
    def layer_params(self) -> int:
        return sum(out * into for out, into in self.products)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def save(self, folder: Path) -> Path:
        """Write a folder with a configuration and nothing else."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self._config()))
        return folder

    def _config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM" if self.model_type == "llama" else "Qwen2ForCausalLM"],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


@dataclass(frozen=True, slots=True)
class Load:
    """A number of concurrent sequences, with their tokens in and out."""

    sequences: int
    tokens_in: int
    tokens_out: int

    @property
    def name(self) -> str:
        return f"{self.sequences} x {self.tokens_in}/{self.tokens_out}"


MODELS = (
    ModelShape("SmolLM2-135M", "llama", 576, 1536, 30, 9, 3, 49152),
    ModelShape("Qwen2.5-0.5B", "qwen2", 896, 4864, 24, 14, 2, 151936),
)
LOADS = (Load(1, 256, 64), Load(4, 1024, 128), Load(16, 256, 64), Load(64, 256, 64))


def prompt(load: Load, index: int) -> list[int]:
    """Return the token ids of one sequence. No two sequences of a load share a prefix."""
    return [(7 * position + 13 * index) % 40_000 + 10 for position in range(load.tokens_in)]
