"""The load check accepts a model only if the engine computes the logits that the model computes by itself."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from cluster.errors import ModelRefused
from cluster.settings.worker_settings import EngineSettings
from engine.attention.interface import ATTENTION_NAME
from engine.model.load_check import deviation, thresholds
from engine.model.loaded import LoadedModel
from engine.model.loading import load
from tests.golden.families import FAMILIES, Family

LLAMA = dict(FAMILIES["llama"].settings)
LONGROPE = dict(FAMILIES["phi3"].settings) | {
    "sliding_window": None,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 6,
        "long_factor": [4.0] * 6,
    },
}
CHUNKED = LLAMA | {
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "moe_layers": [],
    "attention_chunk_size": 24,
    "no_rope_layers": [1, 0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SMALL = {"vocab_size": 128, "hidden_size": 48, "bos_token_id": 0, "eos_token_id": 0}


def load_checked(
    folder: Path, config_type: type[PreTrainedConfig], settings: Mapping[str, object], dtype: str, max_model_len: int
) -> LoadedModel:
    Family("probed", config_type, settings).save(folder)
    return load(EngineSettings(model=str(folder), dtype=dtype, device="cpu", block_size=8, max_model_len=max_model_len))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_scaling_that_looks_at_the_batchs_longest_position_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ModelRefused, match=r"rotary scaling 'longrope'.*--max-model-len 32 or less"):
        load_checked(tmp_path, transformers.Phi3Config, LONGROPE, dtype, max_model_len=0)


def test_the_same_model_is_served_below_its_threshold(tmp_path: Path) -> None:
    loaded = load_checked(tmp_path, transformers.Phi3Config, LONGROPE, "float32", max_model_len=32)
    assert loaded.info.max_model_len == 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunked_attention_that_exists_only_in_the_mask_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ModelRefused, match=r"chunked attention exists only in its mask.*--max-model-len 24 or less"):
        load_checked(tmp_path, transformers.Llama4TextConfig, CHUNKED, dtype, max_model_len=0)


def test_chunked_attention_is_served_within_one_chunk(tmp_path: Path) -> None:
    assert (
        load_checked(tmp_path, transformers.Llama4TextConfig, CHUNKED, "float32", max_model_len=24).info.max_model_len
        == 24
    )


@pytest.mark.parametrize(
    ("config_type", "settings"),
    [
        (transformers.BloomConfig, SMALL | {"n_layer": 2, "n_head": 4}),
        (transformers.FalconConfig, SMALL | {"num_hidden_layers": 2, "num_attention_heads": 4}),
        (transformers.MambaConfig, SMALL | {"num_hidden_layers": 2, "state_size": 8}),
        (transformers.GPTJConfig, {"vocab_size": 128, "n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    ],
    ids=["bloom", "falcon", "mamba", "gptj"],
)
def test_a_class_that_bypasses_the_interface_is_refused(
    tmp_path: Path, config_type: type[PreTrainedConfig], settings: Mapping[str, object]
) -> None:
    with pytest.raises(ModelRefused, match="bypasses the attention interface"):
        load_checked(tmp_path, config_type, settings, "float32", max_model_len=64)


def test_attention_that_ignores_an_option_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load check runs on a model whose sliding window the attention function does not receive."""
    settings = FAMILIES["mistral"].settings
    registered = transformers.AttentionInterface._global_mapping
    load_checked(tmp_path, transformers.MistralConfig, settings, "float32", max_model_len=0)
    ours = registered[ATTENTION_NAME]

    def forgetful(*states: object, **keywords: object) -> object:
        return ours(*states, **(keywords | {"sliding_window": None}))

    monkeypatch.setattr("engine.attention.interface.attend", forgetful)
    try:
        with pytest.raises(ModelRefused, match="would be silently wrong"):
            load_checked(tmp_path, transformers.MistralConfig, settings, "float32", max_model_len=0)
    finally:
        registered[ATTENTION_NAME] = ours


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt_oss"])
def test_models_in_sixteen_bits_pass_with_unchanged_weights(tmp_path: Path, name: str, dtype: str) -> None:
    family = FAMILIES[name]
    loaded = load_checked(
        tmp_path, type(family.config_type(**family.settings)), family.settings, dtype, max_model_len=0
    )

    assert loaded.info.dtype == dtype
    untouched = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).state_dict()
    for tensor_name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, untouched[tensor_name]), tensor_name


def test_the_check_of_a_faster_forward_uses_the_logits_of_the_load_check(tmp_path: Path) -> None:
    loaded = load_checked(tmp_path, transformers.LlamaConfig, LLAMA, "bfloat16", max_model_len=0)
    own = dict(loaded.own_logits)

    assert deviation(loaded, EngineSettings().max_prefill_tokens, loaded.forward).fault is None

    assert len(own) == 2
    assert all(loaded.own_logits[key] is logits for key, logits in own.items())
    assert len(loaded.own_logits) == 2


def test_thresholds_are_the_lengths_within_reach() -> None:
    config = {"sliding_window": 100, "attention_chunk_size": 700, "nested": {"floor_scale": 300}, "hidden_size": 64}
    assert thresholds(config, max_model_len=512) == (100, 300)
    assert thresholds(config, max_model_len=100) == ()


def test_counts_of_layers_are_no_lengths() -> None:
    assert thresholds({"max_window_layers": 28, "sliding_window_pattern": 6, "sliding_window": 100}, 512) == (100,)


def test_rotary_lengths_count_only_where_scaling_depends_on_length() -> None:
    lengths = {"original_max_position_embeddings": 64, "max_position_embeddings": 256}
    assert thresholds(lengths | {"rope_parameters": {"rope_type": "dynamic"}}, max_model_len=512) == (64, 256)
    assert thresholds(lengths | {"rope_parameters": {"rope_type": "llama3"}}, max_model_len=512) == ()


def test_a_threshold_beyond_the_pool_is_not_checked(tmp_path: Path) -> None:
    Family("probed", transformers.Phi3Config, LONGROPE).save(tmp_path)
    loaded = load(EngineSettings(model=str(tmp_path), dtype="float32", device="cpu", block_size=8, num_blocks=4))
    assert loaded.info.max_model_len == 32
