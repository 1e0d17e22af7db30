"""A recognised decoder for a GPU: products over the same input merged, their weights still the model's own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.attention.interface import AttentionOptions
from engine.decoders.layer_parts import LayerParts, RmsNorm
from engine.decoders.not_compiled import NotCompiled
from engine.decoders.recognise import Decoder


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    parts: LayerParts  # for its norms
    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    options: AttentionOptions
    rotary: int


class FusedDecoder:
    """A decoder in the fused kernels' terms. The model can still be called: its weights are views of the merged
    ones."""

    @torch.no_grad()
    def __init__(self, decoder: Decoder, longest: int) -> None:
        """`longest` is larger than any position. Raises NotCompiled."""
        if decoder.layers[0].parts.norms_whole_rows:
            raise NotCompiled("its norms of queries and keys are over all heads")
        self.decoder = decoder
        self.longest = longest
        self.layers = tuple(
            FusedLayer(
                parts=layer.parts,
                qkv=_merged(layer.parts.qkv),
                out=_merged((layer.parts.out,)),
                gate_up=_merged(layer.parts.gate_up),
                down=_merged((layer.parts.down,)),
                options=AttentionOptions(
                    decoder.heads.options.scaling, layer.window or None, decoder.heads.options.softcap
                ),
                rotary=layer.rotary,
            )
            for layer in decoder.layers
        )
        self.head = _merged((decoder.head,))
        self.final_norm: RmsNorm = decoder.final_norm
        for rotary in decoder.rotaries:  # whole, for a graph reads it where it lies
            rotary.rows(torch.zeros(1, dtype=torch.int64, device=self.head.weight.device), longest, longest)


def _merged(linears: Sequence[nn.Linear]) -> Product:
    """Merge the linears' weights into one tensor of which they become views, so that no weight is stored twice."""
    if len(linears) == 1:
        return Product(linears[0].weight, linears[0].bias)
    weight = torch.cat([linear.weight.data for linear in linears])
    biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    if biases and len(biases) < len(linears):
        raise NotCompiled("only some of the products that share an input have a bias")
    sizes = [linear.out_features for linear in linears]
    for linear, part in zip(linears, torch.split(weight, sizes), strict=True):
        linear.weight.data = part
    if weight.is_cuda:
        torch.cuda.empty_cache()  # no other allocation uses pieces of this size, and another process may share the GPU
    return Product(weight, torch.cat(biases) if biases else None)
