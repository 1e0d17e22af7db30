"""Packed weights compute the same as plain ones, and layers that cannot be packed stay plain."""

import pytest
import torch
from torch import nn

from cluster.settings.worker_settings import EngineSettings
from engine.build import build_engine
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel, PackedLinear, pack_weights
from engine.model.loading import load
from engine.steps.runner import ModelRunner
from tests.golden.families import BLOCK_SIZE, FAMILIES
from tests.golden.forced import make_sequences, num_blocks, run_step, staggered

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products"
)


@needs_bfloat16
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_computes_the_same_logits_with_packed_weights(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.loaded._MIN_FEATURES", 1)  # these models are small
    folder = tmp_path_factory.mktemp(name)
    FAMILIES[name].save(folder)
    settings = EngineSettings(model=str(folder), dtype="bfloat16", device="cpu", block_size=BLOCK_SIZE)
    loaded = load(settings)
    plain = _logits(loaded)
    pack_weights(loaded.model, lambda: None)
    has_packed = any(isinstance(module, PackedLinear) for module in loaded.model.modules())
    assert has_packed or name == "gpt2"  # whose products are no nn.Linear
    packed = _logits(loaded)

    errors = [
        float((one - other).norm() / (other - other.mean()).norm()) for one, other in zip(packed, plain, strict=True)
    ]
    allowed = 2 * torch.finfo(torch.bfloat16).eps * len(loaded.layout.layers) ** 0.5  # as the load check allows
    assert sorted(errors)[len(errors) // 2] <= allowed  # the median: a mixture's near-tie may fall otherwise in one row


@needs_bfloat16
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 65, 512])
def test_a_packed_layer_equals_the_plain_one_for_any_number_of_rows(num_rows: int, bias: bool) -> None:
    linear = nn.Linear(320, 192, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    rows = torch.randn(1, num_rows, 320, dtype=torch.bfloat16)
    output = PackedLinear(linear)(rows)
    assert output.shape == (1, num_rows, 192)
    torch.testing.assert_close(output, linear(rows))


def test_float32_layers_and_subclasses_of_linear_are_not_packed() -> None:
    class Scaled(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)

    model = nn.Sequential(nn.Linear(128, 128), Scaled(128, 128).to(torch.bfloat16))
    pack_weights(model, lambda: None)
    assert [type(module) for module in model] == [nn.Linear, Scaled]


class _Borrowing(nn.Module):
    """A module that calls one layer and reads the weight of the other, as some mixtures' routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = (nn.Linear(128, 128, bias=False, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.called(rows), self.read.weight)


@needs_bfloat16
def test_a_weight_that_the_model_reads_itself_is_not_packed() -> None:
    model = _Borrowing().requires_grad_(False)
    rows = torch.randn(2, 128, dtype=torch.bfloat16)
    plain = model(rows)
    pack_weights(model, lambda: model(rows))
    assert isinstance(model.called, PackedLinear)
    assert type(model.read) is nn.Linear
    torch.testing.assert_close(model(rows), plain)


def test_a_weight_that_only_looks_like_bfloat16_is_not_packed() -> None:
    class Quantised(torch.Tensor):
        pass

    linear = nn.Linear(128, 128, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(Quantised), requires_grad=False)
    model = nn.Sequential(linear)
    pack_weights(model, lambda: None)
    assert model[0] is linear


@needs_bfloat16
def test_a_layer_that_computes_otherwise_when_packed_is_not_packed_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = nn.Linear(128, 128, dtype=torch.bfloat16).requires_grad_(False)
    model = nn.Sequential(linear)
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: torch.zeros(len(rows), 128, dtype=torch.bfloat16))
    assert "differs when packed" in pack_weights(model, lambda: None)
    assert model[0] is linear


@needs_bfloat16
def test_an_engine_reports_its_packed_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("llama")
    FAMILIES["llama"].save(folder)

    def report(pack: str) -> str:
        settings = EngineSettings(
            model=str(folder), dtype="bfloat16", device="cpu", num_blocks=4, pack_weights=pack, cpu_kernels="off"
        )
        engine = build_engine(settings)
        engine.pool.close()
        return engine.report[-1]

    assert "packed for bfloat16" in report("auto")
    assert report("off") == "weights: plain (--pack-weights off)"


def _logits(loaded: LoadedModel) -> list[torch.Tensor]:
    """Return the logits of every sampled row of a staggered run, in order."""
    pool = KvPool(loaded.layout, num_blocks())
    runner = ModelRunner(loaded.forward(pool), pool)
    sequences = make_sequences(seed=1, vocab_size=loaded.info.vocab_size)
    for members in staggered(sequences):
        run_step(runner, members)
    pool.close()
    return [sequence.observed[place][0] for sequence in sequences for place in sorted(sequence.observed)]
