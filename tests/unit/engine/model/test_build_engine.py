"""Building an engine from settings: where the model comes from, the length and number of its sequences, its
fingerprint, and one clear line for every refusal.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from cli.verbs.preparation.estimate import read_config
from cluster.errors import ConfigError, ModelRefused
from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.kv.capacity import estimate
from engine.kv.layout import lay_out
from engine.model.loaded import config_digest, weights_digest
from engine.model.loading import load
from kvtransfer.wire.wire_format import WireDtype
from tests.golden.families import FAMILIES

KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    FAMILIES["llama"].save(tmp_path)
    return tmp_path


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    built: list[Engine] = []
    yield built
    for engine in built:
        engine.pool.close()


def settings(folder: Path, **changes: Any) -> EngineSettings:
    values: dict[str, Any] = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_blocks": 16}
    return EngineSettings(**(values | changes))


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_report_gives_the_tokens_and_sequences_that_fit(folder: Path, engines: list[Engine]) -> None:
    engines.append(build_engine(settings(folder, max_model_len=100)))

    assert engines[0].pool.num_blocks == 16
    assert engines[0].report[0] == "KV: 256 tokens, 2 sequences of max length; float32, 512 bytes a token"


def test_memory_sizes_the_pool(folder: Path, engines: list[Engine]) -> None:
    engines.append(build_engine(settings(folder, num_blocks=0, kv_cache_memory="1MiB")))

    assert engines[0].pool.num_blocks == (1 << 20) // (16 * KV_BYTES_PER_TOKEN)
    assert engines[0].pool.num_blocks * engines[0].pool.block_bytes <= 1 << 20


def test_memory_for_less_than_a_block_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"holds no block.*{16 * KV_BYTES_PER_TOKEN} bytes"):
        build_engine(settings(folder, num_blocks=0, kv_cache_memory="1KiB"))


def test_a_given_length_that_the_pool_cannot_hold_is_refused_with_both_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 100 does not fit the KV pool of 64 tokens"):
        build_engine(settings(folder, num_blocks=4, max_model_len=100))


def test_a_default_length_is_cut_to_the_pool_and_reported(folder: Path, engines: list[Engine]) -> None:
    engines.append(build_engine(settings(folder, num_blocks=4)))

    assert engines[0].model_info.max_model_len == 64
    assert "max length: 64 tokens; the model's 128 do not fit the KV pool" in engines[0].report


def test_a_length_beyond_the_models_positions_is_refused_with_both_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 129 is more than the model's 128 positions"):
        load(settings(folder, max_model_len=129))


@pytest.mark.parametrize("model", ["/nowhere/model", "./model", "examples/no_such_model"])
def test_a_missing_folder_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match=f"--model {model}: there is no such folder; name one that this process sees"):
        load(EngineSettings(model=model))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"holds no config\.json"):
        load(settings(tmp_path))


def test_a_folder_without_weights_is_refused_in_one_line(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="cannot be loaded") as refusal:
        load(settings(folder))
    assert "\n" not in refusal.value.message


def test_a_hub_name_that_cannot_be_downloaded_is_refused_in_one_line() -> None:
    with pytest.raises(ModelRefused, match="configuration cannot be read") as refusal:
        load(EngineSettings(model="nobody/no-such-model", device="cpu"))
    assert "\n" not in refusal.value.message


def test_an_encoder_is_refused(folder: Path) -> None:
    rewrite(folder / "config.json", model_type="t5", architectures=["T5ForConditionalGeneration"])
    with pytest.raises(ModelRefused):
        load(settings(folder))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_missing_gpu_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: .* sees no CUDA device"):
        load(settings(folder, device="cuda"))


@pytest.mark.parametrize("declared", ["float32", "bfloat16", "float16"])
def test_auto_takes_the_checkpoints_dtype_for_weights_and_kv(folder: Path, declared: str) -> None:
    rewrite(folder / "config.json", dtype=declared)
    loaded = load(settings(folder, dtype="auto"))

    assert loaded.info.dtype == loaded.layout.dtype == declared
    assert loaded.model.dtype == getattr(torch, declared)


def test_a_list_of_end_tokens_in_the_generation_config_counts(folder: Path) -> None:
    rewrite(folder / "generation_config.json", eos_token_id=[5, 7])
    assert load(settings(folder)).info.eos_token_ids == frozenset({5, 7})


def test_without_a_generation_config_the_models_end_token_counts(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    rewrite(folder / "config.json", eos_token_id=9)
    assert load(settings(folder)).info.eos_token_ids == frozenset({9})


def test_the_generation_config_gives_default_sampling(folder: Path) -> None:
    assert load(settings(folder)).info.default_sampling == Sampling()
    rewrite(folder / "generation_config.json", do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    assert load(settings(folder)).info.default_sampling == Sampling(temperature=0.6, top_k=20, top_p=0.9)


def test_dummy_weights_need_only_a_config_and_are_equal_in_every_build(folder: Path, engines: list[Engine]) -> None:
    (folder / "model.safetensors").unlink()
    for _ in range(2):
        engines.append(build_engine(settings(folder, load_format="dummy")))

    assert engines[0].fingerprint == engines[1].fingerprint


def test_another_fine_tune_of_the_same_shape_has_another_fingerprint(folder: Path, engines: list[Engine]) -> None:
    engines.append(build_engine(settings(folder)))
    engines.append(build_engine(settings(folder)))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] += 1e-3
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engines.append(build_engine(settings(folder)))

    same, again, tuned = (engine.fingerprint for engine in engines)
    assert same == again
    assert tuned.weights != same.weights
    assert (tuned.model_config, tuned.block_table) == (same.model_config, same.block_table)


def test_another_configuration_over_the_same_weights_has_another_fingerprint(folder: Path) -> None:
    before = load(settings(folder)).model
    rewrite(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    after = load(settings(folder)).model

    assert weights_digest(before) == weights_digest(after)
    assert config_digest(before.config) != config_digest(after.config)


def test_the_path_of_a_model_is_no_part_of_its_fingerprint(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    FAMILIES["llama"].save(elsewhere)
    here, there = load(settings(folder)), load(settings(elsewhere))

    assert config_digest(here.model.config) == config_digest(there.model.config)
    assert weights_digest(here.model) == weights_digest(there.model)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_estimate_from_the_config_equals_the_size_of_the_pools_blocks(tmp_path: Path, name: str) -> None:
    FAMILIES[name].save(tmp_path)
    layout = load(settings(tmp_path)).layout
    config = read_config(str(tmp_path))
    assert estimate(config, "float32").block_bytes(16) == layout.block_bytes
    quantised = lay_out([place.shape for place in layout.layers], 16, "int8")
    assert estimate(config, "float32", "int8").block_bytes(16) == quantised.block_bytes


@pytest.mark.parametrize("wire_dtype", ["native", "int8", "int4"])
def test_memory_holds_the_pool_and_its_wire_copy(folder: Path, engines: list[Engine], wire_dtype: str) -> None:
    wire = WireDtype(wire_dtype)
    engines.append(build_engine(settings(folder, num_blocks=0, kv_cache_memory="1MiB"), wire))

    pool = engines[0].pool
    block_bytes = pool.block_bytes + wire.copy_bytes(pool.layout)
    assert pool.num_blocks == (1 << 20) // block_bytes
    assert wire.format(pool, pool.layout).memory.num_blocks == pool.num_blocks
    assert engines[0].fingerprint.wire_dtype == wire_dtype


def test_memory_for_a_block_but_not_its_wire_copy_is_refused(folder: Path) -> None:
    block_bytes = 16 * KV_BYTES_PER_TOKEN
    with pytest.raises(ConfigError, match="holds no block"):
        build_engine(settings(folder, num_blocks=0, kv_cache_memory=str(block_bytes + 8)), WireDtype("int8"))
