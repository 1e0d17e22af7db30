"""What one core allows: the best matrix rate, the model's bare products at the rows of a decode step, memory bandwidth.

prefill limit: the arithmetic of the prompt at the best matrix rate
decode limit:  every product of one step on packed weights, and the KV of the batch read once
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from benchmarks.engine_shapes import Load, ModelShape

_LARGE_ROWS = 512
_READ_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a load cannot be faster than, on the core that measured it."""

    prefill_s: float
    step_s: float


class Core:
    """Measures on the calling thread, with weights that come from memory as a model's do."""

    def __init__(self, model: ModelShape) -> None:
        self._model = model
        self._layers = [
            [torch.randn(shape).to(torch.bfloat16) for shape in model.products] for _ in range(model.layers)
        ]
        self._packed = [[_pack(weight) for weight in layer] for layer in self._layers]
        self._head = _pack(torch.randn(model.vocab, model.hidden).to(torch.bfloat16))
        self._memory = torch.ones(_READ_BYTES // 8, dtype=torch.int64)

    @torch.inference_mode()
    def limits(self, load: Load) -> Limits:
        model = self._model
        num_tokens = load.sequences * load.tokens_in
        products = 2 * model.layers * model.layer_params * num_tokens + 2 * model.vocab * model.hidden * load.sequences
        attention = 2 * load.sequences * load.tokens_in**2 * model.hidden * model.layers
        mean_context = load.tokens_in + load.tokens_out / 2
        kv_bytes = load.sequences * mean_context * model.kv_bytes_per_token
        read_s = _quickest(lambda: self._memory.sum()) * kv_bytes / _READ_BYTES
        return Limits((products + attention) / self._matrix_rate(), self._products_s(load.sequences) + read_s)

    def _matrix_rate(self) -> float:
        """FLOP/s of the layer's largest product at many rows."""
        weight = max(self._layers[0], key=torch.Tensor.numel)
        rows = torch.randn(_LARGE_ROWS, weight.shape[1]).to(torch.bfloat16)
        return 2 * _LARGE_ROWS * weight.numel() / _quickest(lambda: linear(rows, weight))

    def _products_s(self, num_rows: int) -> float:
        inputs = [torch.randn(num_rows, into).to(torch.bfloat16) for _, into in self._model.products]

        def step() -> None:
            for layer in self._packed:
                for rows, weight in zip(inputs, layer, strict=True):
                    _product(rows, weight)
            _product(inputs[0], self._head)

        return _quickest(step)


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
