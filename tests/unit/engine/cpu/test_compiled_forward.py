"""Tests which models the compiled kernels run, the reasons for refusing others, and that an engine serves in both
cases."""

import dataclasses
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from cluster.errors import ModelRefused
from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.attention.interface import ATTENTION_NAME, register
from engine.build import Engine, build_engine
from engine.cpu.compiled_forward import CompiledForward, PackedDecoder, _populate, compiled_forward, panels_for
from engine.cpu.library import load_kernels
from engine.decoders.layer_parts import GELU_TANH, NotCompiled
from engine.decoders.recognise import Decoder, recognise
from engine.kv.pool import KvPool
from engine.model.load_check import Deviation, check_equal, deviation, replaces_load_check
from engine.model.loaded import LoadedModel
from engine.model.loading import dummy_model, load, load_unchecked
from engine.scheduling.step import Chunk, Sample, StepPlan
from tests.golden.families import BLOCK_SIZE, FAMILIES

SHAPE = {**FAMILIES["llama"].settings, "hidden_size": 64}
STEP = StepPlan((Chunk(1, (5, 6, 7), 0, (2,), (Sample(seed=0, position=3, sampling=Sampling()),)),))


def _why_no_kernels() -> str:
    try:
        load_kernels()
    except NotCompiled as why:
        return str(why)
    return ""


WHY_NOT = _why_no_kernels()
needs_kernels = pytest.mark.skipif("no compiler" in WHY_NOT or "no AVX2" in WHY_NOT, reason=WHY_NOT or "they are here")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("llama"))


def compiled_line() -> str:
    return f"forward: compiled for {load_kernels().instructions} (llama, 2 layers)"


def saved(name: str, folder: Path) -> Path:
    family = FAMILIES[name]
    dataclasses.replace(family, settings={**family.settings, "hidden_size": 64}).save(folder)
    return folder


def settings(folder: Path, **others: object) -> EngineSettings:
    values: dict[str, object] = {"dtype": "bfloat16", "device": "cpu", "block_size": BLOCK_SIZE, "num_blocks": 16}
    return EngineSettings(model=str(folder), **(values | {"cpu_kernels": "on"} | others))  # type: ignore[arg-type]


def forward_line(engine: Engine) -> str:
    """Return the line of the engine's report on its forward; the engine has computed a step and is closed."""
    assert 0 <= engine.runner.run(STEP).tokens[0][0].token_id < 128
    engine.pool.close()
    (line,) = [line for line in engine.report if line.startswith("forward: ")]
    return line


@pytest.mark.parametrize("kernels", [pytest.param("on", marks=needs_kernels), "off"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_kv_is_complete_once_the_runner_says_so_and_before_the_step_has_ended(
    folder: Path, kernels: str, kv_dtype: str
) -> None:
    engine = build_engine(settings(folder, cpu_kernels=kernels, kv_cache_dtype=kv_dtype))
    found: list[torch.Tensor] = []
    engine.runner.on_written = lambda: found.append(engine.pool.raw.clone())

    engine.runner.run(STEP)
    assert not found, "the plan does not ask for it"
    engine.pool.raw.zero_()
    engine.runner.run(dataclasses.replace(STEP, announces=True))

    (written,) = found
    assert bool(written[2].any()) and torch.equal(written, engine.pool.raw)
    engine.pool.close()


@needs_kernels
def test_a_compiled_engine_reports_its_forward(folder: Path) -> None:
    assert forward_line(build_engine(settings(folder))) == compiled_line()


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"cpu_kernels": "off"}, "--cpu-kernels off"),
        ({"dtype": "float32"}, "the model computes in float32"),
        ({"num_threads": 2}, "the kernels run in one thread, not in 2; --num-threads 1 enables them"),
        ({"kv_cache_dtype": "int8"}, "the pool keeps KV in int8"),
    ],
)
def test_a_plain_engine_reports_the_reason(folder: Path, others: dict[str, object], why: str) -> None:
    assert forward_line(build_engine(settings(folder, **others))) == f"forward: plain ({why})"


def test_an_engine_serves_without_a_compiler(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert forward_line(build_engine(settings(folder))) == "forward: plain (no compiler found)"


@needs_kernels
def test_on_a_processor_with_amx_the_kernels_run_only_if_set_to_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert "AMX" in forward_line(build_engine(settings(folder, cpu_kernels="auto")))
    assert "compiled" in forward_line(build_engine(settings(folder, cpu_kernels="on")))


@needs_kernels
def test_weights_are_in_memory_once(folder: Path) -> None:
    loaded = load(settings(folder))
    pool = KvPool(loaded.layout, 16)
    compiled_forward(settings(folder), loaded, pool)
    pool.close()

    left = [module.weight.numel() for module in loaded.model.modules() if isinstance(module, nn.Linear)]
    assert left == [0] * len(left)
    (embedding,) = [module for module in loaded.model.modules() if isinstance(module, nn.Embedding)]
    assert embedding.weight.numel() == 128 * 64


@needs_kernels
def test_a_head_that_is_the_embedding_is_packed_and_the_embedding_stays(tmp_path: Path) -> None:
    tied = dataclasses.replace(FAMILIES["llama"], settings={**SHAPE, "tie_word_embeddings": True})
    tied.save(tmp_path)
    assert forward_line(build_engine(settings(tmp_path))) == compiled_line()


def widened(decoder: Decoder) -> Decoder:
    options = dataclasses.replace(decoder.heads.options, scaling=1.5 * decoder.heads.options.scaling)
    return dataclasses.replace(decoder, heads=dataclasses.replace(decoder.heads, options=options))


def without_windows(decoder: Decoder) -> Decoder:
    return dataclasses.replace(decoder, layers=tuple(dataclasses.replace(layer, window=0) for layer in decoder.layers))


def without_key_norms(decoder: Decoder) -> Decoder:
    layers = tuple(
        dataclasses.replace(layer, parts=dataclasses.replace(layer.parts, query_norm=None, key_norm=None))
        for layer in decoder.layers
    )
    return dataclasses.replace(decoder, layers=layers)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama", lambda decoder: dataclasses.replace(decoder, activation=GELU_TANH)),
        ("llama", widened),
        ("mistral", without_windows),
        ("gemma2", without_windows),
        ("qwen3", without_key_norms),
    ],
)
def test_a_model_recognised_as_another_architecture_computes_other_logits(
    name: str, changed: Callable[[Decoder], Decoder], tmp_path_factory: pytest.TempPathFactory
) -> None:
    loaded = load(settings(saved(name, tmp_path_factory.mktemp(name)), num_blocks=64))
    kernels, decoder = load_kernels(), recognise(loaded.model)

    def said(decoder: Decoder) -> str | None:
        packed = PackedDecoder(kernels, decoder, panels_for(kernels, decoder))

        def forward(pool: KvPool) -> CompiledForward:
            return CompiledForward(kernels, packed, pool, loaded.info.max_model_len)

        return deviation(loaded, 512, forward).fault

    assert said(decoder) is None
    assert "its logits differ" in (said(changed(decoder)) or "")


def built(config_type: Callable[..., PreTrainedConfig] = transformers.LlamaConfig, **others: object) -> PreTrainedModel:
    register()
    model = dummy_model(config_type(**(SHAPE | others)), torch.bfloat16, ATTENTION_NAME, torch.device("cpu"))
    return model.eval().requires_grad_(False)  # type: ignore[no-untyped-call,no-any-return]


def hooked(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def wrapped(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp
    layer.forward = layer.forward


class Adapted(nn.Linear):
    pass


def adapted(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.v_proj = Adapted(64, 32, bias=False, dtype=torch.bfloat16)


def quantised(model: PreTrainedModel) -> None:
    class Quantised(torch.Tensor):
        pass

    projection = model.model.layers[0].mlp.down_proj
    projection.weight = nn.Parameter(projection.weight.data.as_subclass(Quantised), requires_grad=False)


def extended(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.gate = nn.Linear(64, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (hooked, r"model\.layers\.1\.mlp is wrapped"),
        (wrapped, r"model\.layers\.0\.mlp is wrapped"),
        (adapted, "v_proj is a Adapted"),
        (quantised, "the weight of down_proj is not plain bfloat16"),
        (extended, "LlamaAttention is made of q_proj, k_proj, v_proj, o_proj, gate"),
    ],
)
def test_a_changed_model_is_refused_with_the_change(change: Callable[[PreTrainedModel], None], why: str) -> None:
    model = built()
    recognise(model)
    change(model)
    with pytest.raises(NotCompiled, match=why):
        recognise(model)


@pytest.mark.parametrize(
    ("config_type", "others", "why"),
    [
        (transformers.LlamaConfig, {"head_dim": 12}, "its heads have 12 features"),
        (transformers.LlamaConfig, {"hidden_act": "gelu"}, "its activation is a GELUActivation"),
        (
            transformers.GraniteConfig,
            {"embedding_multiplier": 2.0},
            "the output is changed between Embedding and Granite",
        ),
        (transformers.GraniteConfig, {"residual_multiplier": 0.5}, "has residual sums of an unsupported form"),
        (transformers.GraniteConfig, {"logits_scaling": 2.0}, "its logits are not the output of its head"),
        (
            transformers.SmolLM3Config,
            {"no_rope_layers": [1, 0]},
            "SmolLM3Attention has an unsupported rotation",
        ),
        (transformers.GlmConfig, {"partial_rotary_factor": 1.0}, "GlmAttention has an unsupported rotation"),
        (transformers.CohereConfig, {}, "CohereDecoderLayer has norms in unsupported places|is not an RMS norm"),
    ],
)
def test_a_model_that_computes_more_is_refused_by_name(
    config_type: Callable[..., PreTrainedConfig], others: dict[str, object], why: str
) -> None:
    with pytest.raises(NotCompiled, match=why):
        recognise(built(config_type, **others))


def test_an_unknown_architecture_is_refused_by_name() -> None:
    model = built()
    del model.model.norm
    with pytest.raises(NotCompiled, match="LlamaModel is not a list of layers and a norm"):
        recognise(model)
    vars(model)["get_decoder"] = 3
    with pytest.raises(NotCompiled, match="LlamaForCausalLM has layers that cannot be read: TypeError"):
        recognise(model)


@needs_kernels
def test_too_little_memory_to_pack_weights_falls_back_to_plain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cpu.compiled_forward._available_bytes", lambda: 1000)
    assert "packing takes 0 MiB temporarily" in forward_line(build_engine(settings(folder)))


@needs_kernels
@pytest.mark.parametrize(("name", "num_checks"), [("llama", 0), ("mistral", 1)])
def test_only_kernels_without_a_threshold_replace_the_check_of_the_plain_forward(
    name: str, num_checks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistral has a sliding window, which only the check in float32 examines closely."""
    checked: list[LoadedModel] = []

    def check(loaded: LoadedModel, chunk_tokens: int) -> None:
        checked.append(loaded)
        check_equal(loaded, chunk_tokens)

    monkeypatch.setattr("engine.cpu.compiled_forward.check_equal", check)
    assert "compiled" in forward_line(build_engine(settings(saved(name, tmp_path))))
    assert len(checked) == num_checks


@pytest.mark.parametrize(
    ("found", "is_enough"),
    [
        (Deviation(typical=0.9, worst=5.9, allowed=1.0), True),
        (Deviation(typical=1.1, worst=1.1, allowed=1.0), False),
        (Deviation(typical=0.9, worst=6.1, allowed=1.0), False),
        (Deviation(typical=float("nan"), worst=float("nan"), allowed=1.0), False),
    ],
)
def test_kernels_replace_the_load_check_only_within_its_own_limit(
    folder: Path, found: Deviation, is_enough: bool
) -> None:
    assert replaces_load_check(load_unchecked(settings(folder)), found) is is_enough


@pytest.mark.parametrize("cpu_kernels", ["on", "off"])
def test_a_model_whose_window_attention_ignores_is_refused_with_and_without_kernels(
    cpu_kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    registered = transformers.AttentionInterface._global_mapping
    ours = registered[ATTENTION_NAME]

    def forgetful(*states: object, **keywords: object) -> object:
        return ours(*states, **(keywords | {"sliding_window": None}))

    monkeypatch.setattr("engine.attention.interface.attend", forgetful)
    try:
        with pytest.raises(ModelRefused, match="would be silently wrong"):
            build_engine(settings(saved("mistral", tmp_path), cpu_kernels=cpu_kernels))
    finally:
        registered[ATTENTION_NAME] = ours


@needs_kernels
def test_pages_for_packed_weights_are_allocated_before_packing() -> None:
    register()
    panels = panels_for(load_kernels(), recognise(built(hidden_size=256, intermediate_size=2048)))
    pages = range(panels.data_ptr() // mmap.PAGESIZE, (panels.data_ptr() + panels.nbytes - 1) // mmap.PAGESIZE + 1)

    def is_present(page: int) -> bool:
        with open("/proc/self/pagemap", "rb") as entries:
            entries.seek(8 * page)
            return bool(entries.read(8)[7] & 0x80)

    assert not is_present(pages[-1])
    _populate(panels, threading.Event())
    assert all(map(is_present, pages))
    assert not panels.any()
