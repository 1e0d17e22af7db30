"""Measure the roofline of one core.

No step is faster than its arithmetic at the best matrix rate, nor than one read of its weights and KV at the best read
rate. Both rates are measured on the core, in the same run. The bare matrix products of a step, packed by oneDNN, are
measured beside them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.engine.shapes import Load, ModelShape

_LARGE_ROWS = 512
_READ_BYTES = 512 << 20
_BFLOAT16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Lower bounds for the time of a load, in seconds, on the core that measured them."""

    prefill_s: float
    step_s: float
    products_s: float  # of one decode step, by oneDNN


@dataclass(frozen=True, slots=True)
class Rates:
    flops_per_s: float  # bfloat16 products, the best of the model's shapes
    bytes_per_s: float  # reads from memory


def roofline(model: ModelShape, load: Load, rates: Rates) -> tuple[float, float]:
    """Return the lower bounds in seconds of the prompt, and of one decode step in the middle of the output."""
    head_flops = 2 * model.vocab * model.hidden * load.sequences
    tokens = load.sequences * load.tokens_in
    # A causal triangle: half of the products of every query with every key, and of the weights with every value.
    prompt_flops = tokens * (2 * model.layers * model.layer_params + 2 * model.attention_width * load.tokens_in)
    context = load.tokens_in + load.tokens_out / 2
    step_flops = load.sequences * (2 * model.layers * model.layer_params + 4 * model.attention_width * context)
    kv_bytes = load.sequences * context * model.kv_bytes_per_token
    weight_bytes = _BFLOAT16_BYTES * (model.layers * model.layer_params + model.vocab * model.hidden)
    return (
        max((prompt_flops + head_flops) / rates.flops_per_s, weight_bytes / rates.bytes_per_s),
        max((step_flops + head_flops) / rates.flops_per_s, (weight_bytes + kv_bytes) / rates.bytes_per_s),
    )


class Core:
    """Measures on the calling thread, with weights that come from memory as a model's do."""

    def __init__(self, model: ModelShape) -> None:
        self._model = model
        self._layers = [
            [_pack(torch.randn(shape).to(torch.bfloat16)) for shape in model.products] for _ in range(model.layers)
        ]
        self._head = _pack(torch.randn(model.vocab, model.hidden).to(torch.bfloat16))
        self._memory = torch.ones(_READ_BYTES // 8, dtype=torch.int64)

    @torch.inference_mode()
    def limits(self, load: Load, rates: Rates) -> Limits:
        prefill_s, step_s = roofline(self._model, load, rates)
        return Limits(prefill_s, step_s, self._products_s(load.sequences))

    @torch.inference_mode()
    def rates(self) -> Rates:
        shapes = self._model.products
        rates = [
            2 * _LARGE_ROWS * out * into / _product_s(self._layers[0][index], into)
            for index, (out, into) in enumerate(shapes)
        ]
        return Rates(max(rates), _READ_BYTES / _quickest(lambda: self._memory.sum()))

    def _products_s(self, num_rows: int) -> float:
        inputs = [torch.randn(num_rows, into).to(torch.bfloat16) for _, into in self._model.products]

        def step() -> None:
            for layer in self._layers:
                for rows, weight in zip(inputs, layer, strict=True):
                    _product(rows, weight)
            _product(inputs[0], self._head)

        return _quickest(step)


def _product_s(weight: torch.Tensor, into: int) -> float:
    rows = torch.randn(_LARGE_ROWS, into).to(torch.bfloat16)
    return _quickest(lambda: _product(rows, weight))


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    return packed


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return output


def _quickest(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    samples = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        samples.append(time.perf_counter() - began_s)
    return min(samples)
