"""Computes the logits of a packed batch with few launches: ten per layer instead of about forty, for decoders that are
recognised.

A decode of one sequence reads each weight once and computes almost nothing. These reads take a few microseconds each,
so the time of every other launch counts. The result is compared with the model's own forward on the load check's
sequences before use.

`TorchOps` defines the operations between a layer's products in torch's own operators, which run where Triton is
missing; `engine/cuda/triton_ops.py` computes each in one launch.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.interface import AttentionOptions, LayerKv
from engine.attention.registry import AttentionBackend
from engine.batch import PackedBatch
from engine.decoders.layer_parts import SILU, LayerParts, NotCompiled, RmsNorm
from engine.decoders.recognise import Decoder, recognise
from engine.kv.pool import KvPool
from engine.model.load_check import deviation
from engine.model.loaded import LoadedModel


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The rotation of a step's tokens, shared by the layers with the same rotary embedding."""

    cos: torch.Tensor  # float32 [tokens, rotary_dim]
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """One layer's queries, keys and values as the matrix product returns them, and the views to which keys and values
    are written."""

    query: torch.Tensor  # [tokens, heads, dim], as all three a part of one tensor
    key: torch.Tensor  # [tokens, kv_heads, dim]
    value: torch.Tensor
    query_norm: RmsNorm | None  # over each head
    key_norm: RmsNorm | None
    keys: torch.Tensor  # the layer's view of the pool
    values: torch.Tensor
    slot_blocks: torch.Tensor  # [tokens]
    slot_offsets: torch.Tensor


class Ops(Protocol):
    def norm(
        self, hidden: torch.Tensor, addend: torch.Tensor | None, addend_norm: RmsNorm | None, norm: RmsNorm | None
    ) -> torch.Tensor:
        """Add to `hidden`, float32 `[tokens, features]`, in place, and return the normed input of the next product in
        bfloat16."""
        ...

    def rotate(self, heads: Heads, rotation: Rotation) -> None:
        """Norm and rotate queries and keys in place, and write keys and values into the pool."""
        ...

    def gate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        """Apply the gated activation: `[tokens, 2 * features]`, gates first -> `[tokens, features]`."""
        ...


class TorchOps:
    def norm(
        self, hidden: torch.Tensor, addend: torch.Tensor | None, addend_norm: RmsNorm | None, norm: RmsNorm | None
    ) -> torch.Tensor:
        if addend is not None:
            hidden += addend.float() if addend_norm is None else _normed(addend, addend_norm)
        return (hidden if norm is None else _normed(hidden, norm)).to(torch.bfloat16)

    def rotate(self, heads: Heads, rotation: Rotation) -> None:
        dim = rotation.cos.shape[-1]
        for states, norm in ((heads.query, heads.query_norm), (heads.key, heads.key_norm)):
            wide = states.float() if norm is None else _normed(states, norm)
            turned = wide[..., :dim]
            halves = torch.cat([-turned[..., dim // 2 :], turned[..., : dim // 2]], dim=-1)
            rotated = turned * rotation.cos[:, None] + halves * rotation.sin[:, None]
            states.copy_(torch.cat([rotated, wide[..., dim:]], dim=-1))
        place = (heads.slot_blocks, heads.slot_offsets)
        heads.keys.index_put_(place, heads.key)
        heads.values.index_put_(place, heads.value)

    def gate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        gated = F.silu(gate) if activation == SILU else F.gelu(gate, approximate="tanh")
        return (gated * up).to(gate_up.dtype)


def _normed(rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    wide = rows.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm.eps) * norm.weight


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
    """A decoder as the fused kernels need it. The model can still be called: its weights are views of the merged
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
        for rotary in decoder.rotaries:  # the whole table, because a graph reads it in place
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


class FusedForward:
    """A Forward over one pool in bfloat16."""

    def __init__(self, fused: FusedDecoder, pool: KvPool, backend: AttentionBackend, ops: Ops) -> None:
        self._fused = fused
        self._pool = pool
        self._backend = backend
        self._ops = ops

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        fused, decoder, ops = self._fused, self._fused.decoder, self._ops
        positions = batch.position_ids[0]
        rotations = [Rotation(*rotary.rows(positions, 0, fused.longest)) for rotary in decoder.rotaries]
        hidden = decoder.embedding(batch.input_ids[0]).float()
        addend, addend_norm = None, None
        for index, layer in enumerate(fused.layers):
            parts = layer.parts
            rows = ops.norm(hidden, addend, addend_norm, parts.input_norm)
            attended = self._attend(index, layer, rows, rotations[layer.rotary], batch)
            rows = ops.norm(hidden, _product(attended, layer.out), parts.attention_out_norm, parts.ffn_norm)
            gated = ops.gate(_product(rows, layer.gate_up), decoder.activation)
            addend, addend_norm = _product(gated, layer.down), parts.ffn_out_norm
        assert addend is not None
        wanted = batch.logit_rows
        logits = _product(ops.norm(hidden[wanted], addend[wanted], addend_norm, fused.final_norm), fused.head)
        softcap = decoder.logit_softcap
        return logits if not softcap else torch.tanh(logits.float() / softcap) * softcap

    def _attend(
        self, index: int, layer: FusedLayer, rows: torch.Tensor, rotation: Rotation, batch: PackedBatch
    ) -> torch.Tensor:
        shape = self._fused.decoder.heads
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        states = _product(rows, layer.qkv).view(len(rows), num_heads + 2 * num_kv_heads, shape.key_dim)
        query, key, value = torch.split(states, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        keys, values = self._pool.layers[index]
        self._ops.rotate(
            Heads(
                query=query,
                key=key,
                value=value,
                query_norm=layer.parts.query_norm,
                key_norm=layer.parts.key_norm,
                keys=keys,
                values=values,
                slot_blocks=batch.slot_blocks,
                slot_offsets=batch.slot_offsets,
            ),
            rotation,
        )
        attended = self._backend.attend(query, LayerKv(key, value, keys, values), batch, layer.options)
        return attended.flatten(1)


def _product(rows: torch.Tensor, product: Product) -> torch.Tensor:
    return F.linear(rows, product.weight, product.bias)


def fused_decoder(loaded: LoadedModel, chunk_tokens: int) -> tuple[FusedDecoder, Ops]:
    """Return the fused decoder, checked against the model on the load check's sequences. Raises NotCompiled; the model
    still works then, though its weights may have moved."""
    if loaded.info.dtype != "bfloat16":
        raise NotCompiled(f"the model computes in {loaded.info.dtype}")
    if loaded.layout.dtype != "bfloat16":
        raise NotCompiled(f"the pool keeps KV in {loaded.layout.dtype}")
    fused = FusedDecoder(recognise(loaded.model), loaded.info.max_model_len)
    ops = _ops(loaded.device)

    def forward(pool: KvPool) -> FusedForward:
        return FusedForward(fused, pool, loaded.attention.build(), ops)

    try:
        fault = deviation(loaded, chunk_tokens, forward).fault
    except Exception as error:  # after any error of a kernel or its compiler the plain forward is used
        reason = str(error).strip().partition("\n")[0]
        raise NotCompiled(f"the fused forward fails: {reason or type(error).__name__}") from error
    if fault is not None:
        raise NotCompiled(f"fused, {fault}")
    return fused, ops


def _ops(device: str) -> Ops:
    if device.startswith("cuda") and importlib.util.find_spec("triton") is not None:
        from engine.cuda.triton_ops import TritonOps

        return TritonOps()
    return TorchOps()
