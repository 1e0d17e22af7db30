"""Products that a module computes of weights of its own, with no nn.Linear between: routers and experts, above all."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from cluster.errors import ModelRefused
from engine.deterministic.fixed_rows import KINDS, FixedRows, agreeing_counts, random_rows

_LINEAR = (nn.functional.linear,)
_MATMUL = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
_SHAPED_BY_ROWS = frozenset(
    {"bmm", "baddbmm", "addmm", "addbmm", "einsum", "grouped_mm", "_grouped_mm", "_scaled_mm", "conv1d", "conv2d"}
)


def fix_own_products(model: nn.Module) -> None:
    """Fix the products of mixtures, in place: experts are computed one after another, each on the rows routed to it."""
    owners = [module for module in model.modules() if _has_weights_of_its_own(module)]
    if owners and isinstance(model, PreTrainedModel):
        model.set_experts_implementation("eager")
    for module in owners:
        module.forward = _Fixed(module.forward, _FixedProducts(type(module).__name__))


def _has_weights_of_its_own(module: nn.Module) -> bool:
    known = isinstance(module, (*KINDS, nn.Embedding))
    return not known and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


class _Fixed:
    """Replaces a module's `forward`."""

    def __init__(self, forward: Callable[..., object], products: "_FixedProducts") -> None:
        self._forward = forward
        self._products = products

    def __call__(self, *args: object, **kwargs: object) -> object:
        with self._products:
            return self._forward(*args, **kwargs)


class _FixedProducts(TorchFunctionMode):
    """Turns products of rows with a matrix into FixedRows. Raises ModelRefused for those of another kind."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._counts: dict[tuple[object, ...], tuple[int, ...]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LINEAR:
            return self._product(func, *args, **kwargs)
        if func in _MATMUL:
            return self._product(func, *args)
        if getattr(func, "__name__", "") in _SHAPED_BY_ROWS:
            raise ModelRefused(f"--deterministic on: {self._name} computes {func.__name__}, whose rows cannot be fixed")
        return func(*args, **kwargs)

    def _product(
        self, func: Callable[..., torch.Tensor], rows: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor | None
    ) -> torch.Tensor:
        if weight.dim() != 2 or rows.dim() < 2:
            raise ModelRefused(f"--deterministic on: {self._name} computes a product of more than rows and a matrix")
        product = functools.partial(_apply, func, weight, bias)
        shape = (func, weight.shape, weight.stride(), weight.dtype, len(bias))
        if shape not in self._counts:
            self._counts[shape] = agreeing_counts(product, random_rows(rows.shape[-1], rows), self._name)
        return FixedRows(product, self._counts[shape])(rows)


def _apply(
    func: Callable[..., torch.Tensor], weight: torch.Tensor, bias: tuple[torch.Tensor | None, ...], rows: torch.Tensor
) -> torch.Tensor:
    return func(rows, weight, *bias)
