"""The models and loads of the GPU benchmark, and the arithmetic of its limits."""

from dataclasses import dataclass

from transformers import LlamaConfig

_BFLOAT16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Loads:
    prompt_tokens: tuple[int, ...]
    chunk_tokens: int  # most of a prompt in one step
    batch_sizes: tuple[int, ...]
    context: int  # tokens of each decoding sequence in the middle of the timed steps
    steps: int  # timed decode steps


GPU_LOADS = Loads((512, 2_048, 8_192, 32_768), 8_192, (1, 16, 64, 256), 2_048, 64)
TINY_LOADS = Loads((16, 40), 32, (1, 5), 24, 4)


def llama_8b() -> LlamaConfig:
    """Return the shape of Llama 3.1 8B, without its rotary scaling, which changes no cost."""
    return _llama(4_096, 14_336, num_layers=32, num_heads=32, is_tied=False)


def llama_3b() -> LlamaConfig:
    """Return the shape of Llama 3.2 3B, for smaller GPUs."""
    return _llama(3_072, 8_192, num_layers=28, num_heads=24, is_tied=True)


def llama_1b() -> LlamaConfig:
    """Return the shape of Llama 3.2 1B."""
    return _llama(2_048, 8_192, num_layers=16, num_heads=32, is_tied=True)


def _llama(hidden: int, intermediate: int, *, num_layers: int, num_heads: int, is_tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=hidden // num_heads,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=is_tied,
    )


def tiny() -> LlamaConfig:
    """Return the smallest shape, for machines without a GPU."""
    return LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a step: bytes read and operations of its products."""

    layer_params: int  # of all layers' matrices
    head_params: int
    embedding_params: int  # beside the head's; none where they are the same
    kv_bytes_per_token: int
    attention_width: int  # features of all heads of all layers

    @classmethod
    def of(cls, config: LlamaConfig) -> "Work":
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        dim = config.hidden_size // heads
        attention = config.hidden_size * dim * (2 * heads + 2 * kv_heads)
        gated = 3 * config.hidden_size * config.intermediate_size
        layers = config.num_hidden_layers
        return cls(
            layer_params=layers * (attention + gated),
            head_params=config.vocab_size * config.hidden_size,
            embedding_params=0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size,
            kv_bytes_per_token=layers * 2 * kv_heads * dim * _BFLOAT16_BYTES,
            attention_width=layers * heads * dim,
        )

    @property
    def weight_bytes(self) -> int:
        return (self.layer_params + self.head_params + self.embedding_params) * _BFLOAT16_BYTES

    def prefill_flops(self, tokens: int) -> float:
        """Return the operations of every token's products with every layer, half of all pairs of a query and a key, and
        one row of logits."""
        return 2.0 * tokens * (self.layer_params + self.attention_width * tokens) + 2.0 * self.head_params

    def decode_bytes(self, sequences: int, context: int) -> float:
        weights = (self.layer_params + self.head_params) * _BFLOAT16_BYTES
        return weights + float(sequences) * context * self.kv_bytes_per_token
