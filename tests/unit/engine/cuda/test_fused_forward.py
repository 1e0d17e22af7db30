"""The fused forward computes the model's logits, refuses models it does not support, and keeps the weights in one
place. On the CPU its operations are torch's own; the kernels are compared with those.
"""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cluster.settings.worker_settings import EngineSettings
from engine.build import forwards, gpu_forward
from engine.cuda.fused_forward import FusedForward, Heads, Ops, Rotation, TorchOps, fused_decoder
from engine.cuda.graph_forward import captured
from engine.decoders.layer_parts import GELU_TANH, SILU, NotCompiled, RmsNorm
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.model.loading import load
from engine.scheduling.step import StepPlan
from engine.steps.runner import ModelRunner
from tests.golden.families import BLOCK_SIZE, FAMILIES
from tests.unit.engine.cuda.test_decode_graphs import NUM_BLOCKS, TABLE, play, random_decodes
from tests.unit.engine.rigs.interpreted_triton import kernel_device


def loaded(name: str, folder: Path, **changes: object) -> LoadedModel:
    family = FAMILIES[name]
    if "hidden_size" in family.settings:  # heads of a width that the kernels take
        family = dataclasses.replace(family, settings={**family.settings, "hidden_size": 64})
    family.save(folder)
    given = {"model": str(folder), "dtype": "bfloat16", "device": "cpu", "block_size": BLOCK_SIZE, "max_model_len": 64}
    return load(EngineSettings(**given | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3"])
def test_a_fused_family_keeps_its_logits_and_merges_its_weights(name: str, tmp_path: Path) -> None:
    model = loaded(name, tmp_path)
    fused, _ = fused_decoder(model, chunk_tokens=20)  # which compares the two
    first = next(layer for layer in fused.layers)
    for linear in (*first.parts.qkv, *first.parts.gate_up):
        merged = first.qkv if linear in first.parts.qkv else first.gate_up
        assert linear.weight.untyped_storage().data_ptr() == merged.weight.untyped_storage().data_ptr()


class _ForgetfulOps(TorchOps):
    def gate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        return super().gate(gate_up, GELU_TANH if activation == SILU else SILU)


def test_a_fused_forward_with_other_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.fused_forward._ops", lambda device: _ForgetfulOps())
    with pytest.raises(NotCompiled, match="fused, its logits differ from the model's own"):
        fused_decoder(loaded("llama", tmp_path), chunk_tokens=20)


# Two roundings of equal size: medians over 130 rows whose errors scatter by half of their size differ by a tenth. What
# serves keeps the residual in float32 and errs by 0.69 to 0.85 of what the model in bfloat16 does (32 draws of weights
# of three families), a wrong operation by more than fifty times.
_SPREAD = 1.25


def typical_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the median row's distance from the exact logits `[rows, vocabulary]`, relative to their size."""
    return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).median())


def own_logits(model: LoadedModel, plans: Sequence[StepPlan]) -> torch.Tensor:
    """Return the plain forward's logits `[rows, vocabulary]`, over a separate pool."""
    pool = KvPool(model.layout, NUM_BLOCKS)
    logits = torch.cat([ModelRunner(model.forward(pool), pool).logits(plan).float() for plan in plans])
    pool.close()
    return logits


@pytest.mark.parametrize(
    ("dtype", "others", "lines"),
    [
        ("bfloat16", {}, ("forward: fused, 2 layers", "cuda graphs: off (--cuda-graphs off)")),
        ("float32", {}, ("forward: plain (the model computes in float32)", "cuda graphs: off (--cuda-graphs off)")),
        (
            "bfloat16",
            {"cuda_graphs": "auto"},
            ("forward: fused, 2 layers", "cuda graphs: off, as attention by sdpa cannot be captured"),
        ),
        (
            "bfloat16",
            {"cuda_graphs": "auto", "deterministic": "on"},
            (
                "forward: plain (--deterministic uses fixed shapes)",
                "cuda graphs: off, as --deterministic uses fixed shapes",
            ),
        ),
    ],
)
def test_the_report_names_the_forward_that_serves_and_its_logits_are_as_exact_as_the_models_own(
    dtype: str, others: dict[str, object], lines: tuple[str, ...], tmp_path: Path
) -> None:
    exact = loaded("llama", tmp_path, dtype="float32")
    model = loaded("llama", tmp_path, dtype=dtype)
    exact.model.load_state_dict(model.model.state_dict())
    dice = random.Random(1)
    plans = [random_decodes(dice, 8) for _ in range(20)]
    expected, own = (own_logits(one, plans) for one in (exact, model))
    given = {"model": str(tmp_path), "dtype": dtype, "device": "cpu", "cuda_graphs": "off"}
    pool = KvPool(model.layout, NUM_BLOCKS, num_spare=1)
    settings = EngineSettings(**given | others)  # type: ignore[arg-type]
    forward, report = gpu_forward(settings, model, pool, forwards(settings, model))

    assert report == lines
    ours = torch.cat([ModelRunner(forward, pool).logits(plan).float() for plan in plans])
    pool.close()
    assert typical_error(ours, expected) <= _SPREAD * typical_error(own, expected)


class _BrokenOps(TorchOps):
    def gate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        raise ArithmeticError("out of resources\nmore")


def test_a_kernel_that_fails_leaves_the_plain_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.fused_forward._ops", lambda device: _BrokenOps())
    with pytest.raises(NotCompiled, match=r"the fused forward fails: .*out of resources$"):
        fused_decoder(loaded("llama", tmp_path), chunk_tokens=20)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("llama", {"dtype": "float32"}, "computes in float32"),
        ("llama", {"kv_cache_dtype": "int8"}, "keeps KV in int8"),
        ("olmo2", {}, "over all heads"),
        ("gpt2", {}, "is not a list of layers and a norm"),
    ],
)
def test_an_unsupported_model_is_refused_with_the_reason(
    name: str, changes: dict[str, object], why: str, tmp_path: Path
) -> None:
    with pytest.raises(NotCompiled, match=why):
        fused_decoder(loaded(name, tmp_path, **changes), chunk_tokens=20)


def test_graphs_of_the_fused_forward_give_its_logits(tmp_path: Path) -> None:
    model = dataclasses.replace(loaded("llama", tmp_path), attention=TABLE)
    fused, ops = fused_decoder(loaded("llama", tmp_path), chunk_tokens=20)
    pools = KvPool(model.layout, NUM_BLOCKS), KvPool(model.layout, NUM_BLOCKS, num_spare=1)
    graphs, why = captured(5, model, pools[1], lambda backend: FusedForward(fused, pools[1], backend, ops), play)
    assert why == ""
    plain = ModelRunner(FusedForward(fused, pools[0], TABLE.build(), ops), pools[0])
    graphed = ModelRunner(graphs, pools[1])
    dice = random.Random(3)
    for _ in range(6):
        plan = random_decodes(dice, dice.randint(1, 5))
        assert torch.allclose(graphed.logits(plan).float(), plain.logits(plan).float(), atol=2e-2)
    for pool in pools:
        pool.close()


def ops_on(device: str) -> Ops:
    from engine.cuda.triton_ops import TritonOps

    return TritonOps()


def random_norm(features: int, generator: torch.Generator, device: str) -> RmsNorm:
    return RmsNorm(torch.randn(features, generator=generator).to(device), 1e-3)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def are_near(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether two results differ by at most two roundings of one sum: a last place in bfloat16, the order of the
    sum in float32."""
    return torch.allclose(ours.float(), expected.float(), rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.cuda
@DTYPES
@pytest.mark.parametrize("features", [40, 3000])
@pytest.mark.parametrize("has_addend", [False, True])
@pytest.mark.parametrize(("has_addend_norm", "has_norm"), [(True, True), (False, True), (False, False)])
def test_the_norm_kernel_is_its_definition(
    has_addend: bool, has_addend_norm: bool, has_norm: bool, features: int, dtype: torch.dtype
) -> None:
    device = kernel_device()
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, features, generator=generator).to(device)
    addend = torch.randn(3, features, generator=generator).to(device, dtype) if has_addend else None
    norms = [random_norm(features, generator, device) if wanted else None for wanted in (has_addend_norm, has_norm)]
    ours, plain = hidden.clone(), hidden.clone()

    rows = ops_on(device).norm(ours, addend, norms[0] if has_addend else None, norms[1])
    expected = TorchOps().norm(plain, addend, norms[0] if has_addend else None, norms[1])

    assert rows.dtype == torch.bfloat16
    assert are_near(ours, plain, torch.float32)
    assert are_near(rows, expected, torch.bfloat16)


@pytest.mark.cuda
@DTYPES
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(24, 16), (24, 24), (128, 128), (80, 32)])
def test_the_rotating_kernel_is_its_definition(has_norms: bool, dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    device = kernel_device()
    generator = torch.Generator().manual_seed(2)
    tokens, num_heads, num_kv_heads = 3, 4, 2
    states = torch.randn(tokens, num_heads + 2 * num_kv_heads, dim, generator=generator).to(device, dtype)
    rotation = Rotation(*torch.randn(2, tokens, rotary_dim, generator=generator).to(device))
    norms = [random_norm(dim, generator, device) if has_norms else None for _ in range(2)]
    results = []
    for ops in (ops_on(device), TorchOps()):
        ours = states.clone()
        pool = torch.full((2, 5, 4, num_kv_heads, dim), 100.0, device=device, dtype=dtype)
        query, key, value = torch.split(ours, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        blocks, offsets = torch.tensor([4, 0, 4], device=device), torch.tensor([1, 3, 2], device=device)
        ops.rotate(Heads(query, key, value, norms[0], norms[1], pool[0], pool[1], blocks, offsets), rotation)
        results.append((ours, pool))
    for ours, expected in zip(*results, strict=True):
        assert are_near(ours, expected, dtype)


@pytest.mark.cuda
@DTYPES
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_the_gating_kernel_is_its_definition(activation: int, dtype: torch.dtype) -> None:
    device = kernel_device()
    gate_up = 3 * torch.randn(2, 2 * 1100, generator=torch.Generator().manual_seed(2)).to(device, dtype)

    ours, expected = (ops.gate(gate_up, activation) for ops in (ops_on(device), TorchOps()))
    assert ours.dtype == dtype
    assert are_near(ours, expected, dtype)
