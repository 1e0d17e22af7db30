"""KV of 8 bits: every element is restored with a small error at any magnitude; a block means the same in every pool."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError
from cluster.messages import Sampling
from cluster.settings.config import WorkerConfig
from cluster.settings.config_sources import load_config
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import quantise, restore
from engine.scheduling.step import Chunk, Sample, StepPlan
from kvtransfer.wire.wire_format import WireDtype
from tests.golden.families import FAMILIES

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# The error as a share of a vector's largest element. int8: half a step, and bfloat16's rounding of the step; fp8: half
# of e4m3's last bit.
MOST_ERROR = {"int8": 0.5 / 127 * (1 + 2**-8), "fp8": 2**-4 * (1 + 2**-8)}
BLOCK_SIZE = 8


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e4, 1e30])
def test_a_restored_element_has_a_small_error(name: str, size: float) -> None:
    states = torch.randn(512, 3, 32, generator=torch.Generator().manual_seed(1)) * size
    codes, scales = quantise(states, CODES[name])
    back = restore(codes, scales, torch.float32)

    largest = states.abs().amax(-1, keepdim=True)
    assert float(((back - states).abs() / largest).max()) <= MOST_ERROR[name]
    if name == "fp8":  # what is small is rounded by its own size, down to the least of e4m3
        error, least = (back - states).abs(), largest / 448 * 2**-9
        assert bool((error <= torch.maximum(states.abs() * 2**-4, least) * (1 + 2**-7)).all())


@pytest.mark.parametrize("name", CODES)
def test_the_largest_element_is_never_cut_off_by_the_rounding_of_its_scale(name: str) -> None:
    states = torch.linspace(1.0, 2.0, 4097)[:, None]  # every way in which a scale can be rounded
    codes, scales = quantise(states, CODES[name])
    assert float(codes.float().min()) == {"int8": 127.0, "fp8": 448.0}[name]
    assert float((restore(codes, scales, torch.float32) / states - 1).abs().max()) <= 2**-8


@pytest.mark.parametrize("name", CODES)
def test_a_vector_of_zeros_has_zero_bytes(name: str) -> None:
    codes, scales = quantise(torch.zeros(4, 8), CODES[name])
    assert not codes.view(torch.uint8).any()
    assert not scales.view(torch.int16).any()


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_vector_with_a_value_that_is_not_finite_is_restored_as_not_finite(name: str, bad: float) -> None:
    states = torch.ones(3, 8)
    states[1, 5] = bad
    back = restore(*quantise(states, CODES[name]), torch.float32)
    assert not back[1].isfinite().any()
    assert back[[0, 2]].eq(1.0).logical_or((back[[0, 2]] - 1).abs() < 2**-8).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_fp8_code_is_restored_as_torch_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes.float().isfinite()
    restored = restore(codes[:, None], torch.ones(256, dtype=torch.bfloat16), dtype)[:, 0]
    assert torch.equal(restored[finite], codes.to(dtype)[finite])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    FAMILIES["llama"].save(folder)
    return folder


@pytest.fixture(scope="module", params=CODES)
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    engine = build(folder, request.param)
    yield engine
    engine.pool.close()


def build(folder: Path, kv_cache_dtype: str) -> Engine:
    return build_engine(
        EngineSettings(
            model=str(folder),
            dtype="float32",
            device="cpu",
            kv_cache_dtype=kv_cache_dtype,
            block_size=BLOCK_SIZE,
            num_blocks=16,
            max_model_len=64,
        )
    )


def prefill(engine: Engine, block_ids: tuple[int, ...], cuts: tuple[int, ...]) -> torch.Tensor:
    """Return the logits of the last token of a prompt that is computed in these chunks."""
    token_ids = tuple(range(5, 5 + cuts[-1]))
    for start, end in itertools.pairwise((0, *cuts)):
        samples = (Sample(seed=0, position=end, sampling=Sampling()),)
        logits = engine.runner.logits(StepPlan((Chunk(0, token_ids[start:end], start, block_ids, samples),)))
    return logits[0]


def test_chunks_of_a_prompt_do_not_change_its_logits(engine: Engine) -> None:
    engine.pool.raw.fill_(7)
    whole = prefill(engine, (3, 9, 1), (20,))
    cut = prefill(engine, (12, 2, 5), (1, 7, 8, 19, 20))
    assert float((whole - cut).abs().max()) < 1e-4


def test_positions_after_the_last_token_are_zero_scales_included(engine: Engine) -> None:
    engine.pool.raw.fill_(7)
    prefill(engine, (3, 9, 1), (20,))
    for keys, values in (*engine.pool.layers, *engine.pool.scales):
        for view in (keys, values):
            assert not view[1, 4:].float().any()
            assert view[1, :4].float().any()


def test_a_block_means_the_same_in_another_pool(engine: Engine, folder: Path) -> None:
    other = build(folder, engine.pool.layout.dtype)
    prefill(engine, (3, 9, 1), (20,))
    prefill(other, (3, 9, 1), (16, 20))
    next_token = StepPlan((Chunk(0, (7,), 20, (3, 9, 1), (Sample(seed=0, position=21, sampling=Sampling()),)),))
    other.pool.raw[[3, 9, 1]] = engine.pool.raw[[3, 9, 1]]
    assert torch.equal(other.runner.logits(next_token), engine.runner.logits(next_token))
    other.pool.close()


def test_workers_with_different_kv_dtypes_refuse_each_other(folder: Path) -> None:
    engines = [build(folder, kv_cache_dtype) for kv_cache_dtype in ("auto", "int8", "fp8")]
    native, int8, fp8 = (engine.fingerprint for engine in engines)
    assert (native.dtype, int8.dtype, fp8.dtype) == ("float32", "float32 with int8 KV", "float32 with fp8 KV")
    assert len({native.block_table, int8.block_table, fp8.block_table}) == 3
    assert len({native.weights, int8.weights, fp8.weights}) == 1
    for engine in engines:
        engine.pool.close()


@pytest.mark.parametrize("kv_cache_dtype", CODES)
def test_quantised_pool_refuses_a_quantised_wire(kv_cache_dtype: str) -> None:
    wire = WireDtype("int8")
    with pytest.raises(ConfigError, match=f"--kv-wire-dtype must be native: .*{kv_cache_dtype}"):
        wire.copy_bytes(lay_out([LayerShape(2, 32, 32)], 16, kv_cache_dtype))
    with pytest.raises(ConfigError, match=f"--kv-wire-dtype int8 cannot go with --kv-cache-dtype {kv_cache_dtype}"):
        load_config(WorkerConfig, {"model": "m", "kv_wire_dtype": "int8", "kv_cache_dtype": kv_cache_dtype}, {})
