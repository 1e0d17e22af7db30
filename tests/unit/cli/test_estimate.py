"""KV arithmetic from configurations, against figures that can be worked out by hand."""

import pytest

from cluster.errors import ConfigError
from engine.kv.capacity import estimate

GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
LLAMA_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
LLAMA_3_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "dtype": "bfloat16",
}


def test_the_kv_of_gpt2_at_its_full_length_takes_36_mib() -> None:
    assert estimate(GPT2, "float16").request_bytes(1024) == 37_748_736


def test_llama_7b_at_4096_tokens_takes_two_gibibytes() -> None:
    assert estimate(LLAMA_7B, "float16").request_bytes(4096) == 2 << 30


def test_llama_3_70b_counts_its_kv_heads_only() -> None:
    assert estimate(LLAMA_3_70B).bytes_per_token == 320 << 10


def test_requests_take_whole_blocks() -> None:
    kv = estimate(GPT2, "float16")
    assert kv.request_bytes(17, block_size=16) == 32 * kv.bytes_per_token
    assert kv.num_sequences(64 * kv.bytes_per_token, num_tokens=17, block_size=16) == 2
    assert kv.num_sequences(63 * kv.bytes_per_token, num_tokens=17, block_size=16) == 1


def test_auto_is_the_checkpoints_dtype_and_float32_without_one() -> None:
    assert estimate(LLAMA_3_70B).dtype == "bfloat16"
    assert estimate(GPT2).dtype == "float32"


def test_latent_attention_counts_k_and_v_apart() -> None:
    config = LLAMA_7B | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert estimate(config, "float16").bytes_per_token == 32 * 32 * (192 + 128) * 2


def test_the_text_config_of_a_multimodal_model_is_used() -> None:
    assert estimate({"text_config": GPT2}, "float16") == estimate(GPT2, "float16")


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_kv_of_eight_bits_includes_its_scales(dtype: str) -> None:
    kv = estimate(LLAMA_3_70B, kv_cache_dtype=dtype)
    assert kv.bytes_per_token == 160 * 1024 + 80 * 2 * 8 * 2  # codes; a scale of two bytes for K and V of each head
    assert kv.request_bytes(100, block_size=16) == 112 * kv.bytes_per_token


def test_the_longest_sequence_is_that_of_the_configuration_or_unknown() -> None:
    assert estimate({**GPT2, "n_positions": 1024}).max_tokens == 1024
    assert estimate({**LLAMA_7B, "max_position_embeddings": 4096}).max_tokens == 4096
    assert estimate(GPT2).max_tokens is None


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        estimate({"hidden_size": 64, "num_attention_heads": 4})
