"""Products whose rows do not depend on how many there are: every product sees one of a few numbers of rows.

A library picks its kernel, and with it the order of a sum, by the shape of the product. So rows are cut into pieces of
`ROW_COUNTS`, the rest filled with zeros, and a number is used only where it gives the bits of the least of them, for
this very product, at every place in the piece, whatever the other rows are: that is tried at load.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from cluster.errors import ModelRefused
from engine.model.packed_weights import PackedLinear

ROW_COUNTS = (8, 32, 128)
_SEED = 11
_ALIGNMENT = 64  # bytes: as torch allocates; a kernel may treat other addresses differently

Product = Callable[[torch.Tensor], torch.Tensor]
KINDS = (nn.Linear, PackedLinear, Conv1D)


class FixedRows:
    """Replaces a module's `forward` with one that computes fixed numbers of rows; `counts` ascend from
    ROW_COUNTS[0]."""

    def __init__(self, product: Product, counts: Sequence[int]) -> None:
        self._product = product
        self._counts = tuple(counts)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        rows = states.reshape(-1, states.shape[-1])
        if not len(rows):
            return self._product(states)
        pieces = [self._computed(rows[begin : begin + count], count) for begin, count in cut(len(rows), self._counts)]
        output = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return output[: len(rows)].view(*states.shape[:-1], -1)

    def _computed(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        if len(rows) < count:
            filled = rows.new_zeros(count, rows.shape[1])
            filled[: len(rows)] = rows
            rows = filled
        elif rows.data_ptr() % _ALIGNMENT or not rows.is_contiguous():
            rows = rows.clone(memory_format=torch.contiguous_format)
        return self._product(rows)


def cut(num_rows: int, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, count) of the pieces that cover `num_rows` rows, largest first; only the last may exceed them."""
    pieces, begin = [], 0
    for count in reversed(counts):
        while num_rows - begin >= count:
            pieces.append((begin, count))
            begin += count
    if begin < num_rows:
        pieces.append((begin, counts[0]))
    return pieces


def fix_rows(model: nn.Module) -> tuple[int, ...]:
    """Replace every product of the model by FixedRows, in place. Returns the row counts that all of them can use.

    Raises ModelRefused if the rows of a product depend on their position or neighbours at any count.
    """
    products = [(name, module) for name, module in model.named_modules() if isinstance(module, KINDS)]
    tried: dict[tuple[object, ...], tuple[int, ...]] = {}
    for name, module in products:
        shape, example = _shape_of(module)
        if shape not in tried:
            tried[shape] = agreeing_counts(module.forward, example, name)
        module.forward = FixedRows(module.forward, tried[shape])  # type: ignore[method-assign]
    everywhere = set(ROW_COUNTS).intersection(*tried.values())
    return tuple(sorted(everywhere))


def _shape_of(module: nn.Module) -> tuple[tuple[object, ...], torch.Tensor]:
    """Return the properties that select a product's kernel, and random rows for it."""
    assert isinstance(module, KINDS)
    weight: torch.Tensor = module._packed if isinstance(module, PackedLinear) else module.weight
    if isinstance(module, Conv1D):
        num_in, num_out = module.weight.shape
    else:
        num_in, num_out = module.in_features, module.out_features
    kind = (type(module).__name__, num_in, num_out, weight.dtype, module.bias is not None)
    return kind, random_rows(num_in, weight)


def random_rows(width: int, like: torch.Tensor) -> torch.Tensor:
    """Return random rows, as many as the largest of ROW_COUNTS."""
    rows = torch.randn(ROW_COUNTS[-1], width, generator=torch.Generator().manual_seed(_SEED)).to(like.device)
    return rows.to(like.dtype if like.dtype.is_floating_point else torch.bfloat16)


@torch.inference_mode()
def agreeing_counts(product: Product, rows: torch.Tensor, name: str) -> tuple[int, ...]:
    """Return those of ROW_COUNTS at which `rows` have equal bits at every position. Raises ModelRefused if not even the
    least does."""
    least = ROW_COUNTS[0]
    base = _in_pieces(product, rows, least)
    for shift in range(1, least):  # every row at every place of the least piece, with other rows, and with none
        alone = rows[:least].clone()
        alone[:shift] = 0
        turned = _in_pieces(product, rows.roll(shift, 0), least)
        if not torch.equal(turned, base.roll(shift, 0)) or not torch.equal(product(alone)[shift:], base[shift:least]):
            raise ModelRefused(
                f"--deterministic on: a row of {name} depends on its place among {least} on this machine"
            )
    return tuple(count for count in ROW_COUNTS if _agrees(product, rows, base, count))


def _agrees(product: Product, rows: torch.Tensor, base: torch.Tensor, count: int) -> bool:
    shifts = (0, count // 2 + 1)
    return all(torch.equal(_in_pieces(product, rows.roll(by, 0), count), base.roll(by, 0)) for by in shifts)


def _in_pieces(product: Product, rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([product(piece.clone()) for piece in torch.split(rows, count)])
