"""A recognised decoder's weights in the layout that the kernels read.

Owns their memory: one mapping, in huge pages where the system provides them, because every step reads all of it from
one end to the other.
"""

import ctypes
import itertools
import mmap

import torch
from torch import nn

from engine.cpu.library import Layer, Model, Product
from engine.decoders.layer_parts import LayerParts, RmsNorm
from engine.decoders.recognise import Decoder, DecoderLayer
from engine.decoders.traced_calls import NotCompiled
from engine.kv.pool import KvPool

_ALIGNMENT = 64  # bytes, of every packed weight
_ITEM_BYTES = 2


class PackedDecoder:
    """All weights of a decoder except its embedding, copied into the kernels' layout. The decoder itself is not
    changed."""

    def __init__(self, kernels: ctypes.CDLL, decoder: Decoder) -> None:
        self.decoder = decoder
        self._kernels = kernels
        self._floats: list[torch.Tensor] = []  # biases and norms
        self._places = itertools.accumulate(map(self._num_elems, _widths(decoder)), initial=0)
        self._panels = _mapped(sum(map(self._num_elems, _widths(decoder))))
        self._layers = [self._layer(layer) for layer in decoder.layers]
        self._head = self._product((decoder.head,))
        self._final_norm = self._norm(decoder.final_norm)

    def model(self, pool: KvPool) -> Model:
        """Return the C structs of the model over this pool. They point into this object and the pool."""
        decoder = self.decoder
        for layer, (keys, values) in zip(self._layers, pool.layers, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        heads = decoder.heads
        return Model(
            num_layers=len(self._layers),
            hidden=decoder.hidden,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.key_dim,
            intermediate=decoder.intermediate,
            rotary_dim=decoder.rotaries[0].dim,
            activation=decoder.activation,
            norms_whole_rows=decoder.layers[0].parts.norms_whole_rows,
            norm_eps=decoder.final_norm.eps,
            scaling=heads.options.scaling,
            softcap=heads.options.softcap or 0.0,
            block_size=pool.layout.block_size,
            block_elems=pool.layout.block_elems,
            layers=(Layer * len(self._layers))(*self._layers),  # a copy
            final_norm=self._final_norm,
            head=self._head,
        )

    def _layer(self, layer: DecoderLayer) -> Layer:
        parts = layer.parts
        return Layer(
            input_norm=self._norm(parts.input_norm),
            query_norm=self._norm(parts.query_norm),
            key_norm=self._norm(parts.key_norm),
            attention_out_norm=self._norm(parts.attention_out_norm),
            ffn_norm=self._norm(parts.ffn_norm),
            ffn_out_norm=self._norm(parts.ffn_out_norm),
            qkv=self._product(parts.qkv),
            out=self._product((parts.out,)),
            gate_up=self._gate_up(parts),
            down=self._product((parts.down,)),
            window=layer.window,
            rotary=layer.rotary,
        )

    def _product(self, linears: tuple[nn.Linear, ...]) -> Product:
        """Pack one weight, or several with the same input whose outputs follow one another, and return its C struct."""
        weight = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight
        out_features, in_features = weight.shape
        panels = self._next_panels()
        self._kernels.td_pack(weight.data_ptr(), weight.stride(0), out_features, in_features, panels)
        return Product(panels, self._bias(linears), in_features, out_features)

    def _gate_up(self, parts: LayerParts) -> Product:
        linears = parts.gate_up
        gate, up = linears[0].weight.chunk(2) if len(linears) == 1 else (linear.weight for linear in linears)
        intermediate, in_features = gate.shape
        panels = self._next_panels()
        self._kernels.td_pack_gate_up(
            gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), intermediate, in_features, panels
        )
        return Product(panels, self._bias(linears), in_features, 2 * intermediate)

    def _bias(self, linears: tuple[nn.Linear, ...]) -> int | None:
        if all(linear.bias is None for linear in linears):
            return None
        biases = [torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
        return self._kept(torch.cat([bias.float() for bias in biases]))

    def _norm(self, norm: RmsNorm | None) -> int | None:
        return None if norm is None else self._kept(norm.weight)

    def _kept(self, floats: torch.Tensor) -> int:
        self._floats.append(floats)
        return floats.data_ptr()

    def _next_panels(self) -> int:
        return self._panels.data_ptr() + next(self._places) * _ITEM_BYTES

    def _num_elems(self, widths: tuple[int, int]) -> int:
        """Return the elements of a packed weight, padding up to the next one's alignment included."""
        in_features, out_features = widths
        step = _ALIGNMENT // _ITEM_BYTES
        return -(-int(self._kernels.td_packed_elems(out_features, in_features)) // step) * step


def _widths(decoder: Decoder) -> list[tuple[int, int]]:
    """Return the widths in packing order."""
    head = (decoder.head.in_features, decoder.head.out_features)
    return [*(widths for layer in decoder.layers for widths in layer.parts.widths), head]


def _mapped(num_elems: int) -> torch.Tensor:
    try:
        mapping = mmap.mmap(-1, num_elems * _ITEM_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        raise NotCompiled(f"no memory to pack its weights into: {error}") from error
    return torch.frombuffer(mapping, dtype=torch.bfloat16)  # keeps the mapping
