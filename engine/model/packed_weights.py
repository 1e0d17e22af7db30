"""Weights repacked once at load into the layout of this processor's matrix units. CPU and bfloat16 only.

oneDNN repacks a plain weight in every product; for the few rows of a decode step that costs more than the product. A
packed layer is compared with the plain one before it replaces it. Float32 weights stay plain: their last bit may depend
on the layout, and in float32 Tandem promises equal tokens.
"""

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import nn

_ROWS_HINT = 64  # measured: packed for so many rows, products of 1 to 512 rows are as quick as packed for their own
_MIN_FEATURES = 64
_NUM_CHECKED_ROWS = 3
_TOLERANCE = 4 * torch.finfo(torch.bfloat16).eps


class PackedLinear(nn.Module):
    """Replaces an nn.Linear; keeps its bias and, instead of its weight, the packed one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class _Watched(nn.Linear):
    """An nn.Linear that records, during one call of its model, whether other modules read its weight."""

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        self._is_read = True
        return self._plain()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self._plain(), self.bias)

    def _plain(self) -> nn.Parameter:
        weight = self._parameters["weight"]
        assert weight is not None
        return weight


def pack_weights(model: nn.Module, run: Callable[[], object]) -> str:
    """Pack the weights that can be packed, in place; afterwards the model may only be called. `run` calls it once, to
    find layers whose weights the model itself reads; those stay. Returns a line for the worker's report."""
    if next(model.parameters()).device.type != "cpu" or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "weights: plain"
    linears = [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if _can_be_packed(child)
    ]
    read = _read_by_others([linear for _, _, linear in linears], run)
    linears = [found for found in linears if found[2] not in read]
    for done, (owner, name, linear) in enumerate(linears):
        packed = PackedLinear(linear)
        if not _is_equal(packed, linear):
            return f"weights: {done} of {len(linears)} products packed; {name} differs when packed and stays plain"
        setattr(owner, name, packed)
    return f"weights: {len(linears)} products packed for bfloat16"


def _read_by_others(linears: Sequence[nn.Linear], run: Callable[[], object]) -> set[nn.Linear]:
    for linear in linears:
        linear.__class__ = _Watched
    try:
        run()
        return {linear for linear in linears if vars(linear).pop("_is_read", False)}
    finally:
        for linear in linears:
            linear.__class__ = nn.Linear


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear  # a subclass may compute something else
        and "forward" not in vars(module)  # so may one that was wrapped
        and type(module.weight.data) is torch.Tensor  # a quantised one only looks like bfloat16
        and module.weight.dtype == torch.bfloat16
        and min(module.in_features, module.out_features) >= _MIN_FEATURES
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


@torch.inference_mode()
def _is_equal(packed: PackedLinear, linear: nn.Linear) -> bool:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(_NUM_CHECKED_ROWS, linear.in_features, generator=generator).to(torch.bfloat16)
    expected = linear(rows).float()
    return bool((packed(rows).float() - expected).norm() <= _TOLERANCE * expected.norm().clamp(min=1e-20))
