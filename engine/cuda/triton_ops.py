"""Each operation between a layer's products in one Triton launch. `engine/cuda/fused_forward.py` defines what they
compute."""

# ruff: noqa: ANN001, ANN202  (a kernel's arguments have Triton's types, which it finds at the call)

from functools import lru_cache

import torch
import triton
import triton.language as tl

from engine.cuda.fused_forward import Heads, Rotation
from engine.decoders.layer_parts import SILU, RmsNorm

_GATE_TILE = 1024


class TritonOps:
    """The operations of `fused_forward.py`, each in one launch."""

    def norm(
        self, hidden: torch.Tensor, addend: torch.Tensor | None, addend_norm: RmsNorm | None, norm: RmsNorm | None
    ) -> torch.Tensor:
        num_tokens, features = hidden.shape
        output = torch.empty_like(hidden, dtype=torch.bfloat16)
        if num_tokens:
            _norm_rows[(num_tokens,)](
                hidden,
                hidden if addend is None else addend,
                hidden if addend_norm is None else addend_norm.weight,
                hidden if norm is None else norm.weight,
                output,
                0.0 if addend_norm is None else addend_norm.eps,
                0.0 if norm is None else norm.eps,
                FEATURES=features,
                PAD=_padded(features),
                HAS_ADDEND=addend is not None,
                HAS_ADDEND_NORM=addend_norm is not None,
                HAS_NORM=norm is not None,
                num_warps=8 if features >= 2048 else 4,
            )
        return output

    def rotate(self, heads: Heads, rotation: Rotation) -> None:
        num_tokens, num_heads, dim = heads.query.shape
        num_kv_heads = heads.key.shape[1]
        query_norm, key_norm = heads.query_norm, heads.key_norm
        assert heads.query.stride(1) == heads.key.stride(1) == heads.value.stride(1) == dim
        _rotate_heads[(num_tokens, num_heads + num_kv_heads)](
            heads.query,
            heads.key,
            heads.value,
            rotation.cos if query_norm is None else query_norm.weight,
            rotation.cos if key_norm is None else key_norm.weight,
            rotation.cos,
            rotation.sin,
            heads.keys,
            heads.values,
            heads.slot_blocks,
            heads.slot_offsets,
            0.0 if query_norm is None else query_norm.eps,
            heads.query.stride(0),
            *heads.keys.stride()[:3],
            *heads.values.stride()[:3],
            HEADS=num_heads,
            DIM=dim,
            ROTARY=rotation.cos.shape[1],
            PAD=_padded(dim),
            HAS_NORMS=query_norm is not None,
            num_warps=1,
        )

    def gate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        num_tokens, both = gate_up.shape
        output = gate_up.new_empty(num_tokens, both // 2)
        _gate_rows[(num_tokens, -(-both // (2 * _GATE_TILE)))](
            gate_up, output, FEATURES=both // 2, TILE=_GATE_TILE, IS_SILU=activation == SILU
        )
        return output


@lru_cache(maxsize=64)
def _padded(features: int) -> int:
    """Return the next power of two. Triton's function costs a third of a launch."""
    return int(triton.next_power_of_2(features))


@triton.jit  # type: ignore[untyped-decorator]
def _norm_rows(  # type: ignore[no-untyped-def]
    hidden,  # float32 [tokens, FEATURES]
    addend,  # [tokens, FEATURES]
    addend_weight,  # float32 [FEATURES]
    weight,  # float32 [FEATURES]
    output,  # [tokens, FEATURES]
    addend_eps,
    eps,
    FEATURES: tl.constexpr,
    PAD: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_ADDEND_NORM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * FEATURES
    places = tl.arange(0, PAD)
    inside = places < FEATURES
    row = tl.load(hidden + first + places, mask=inside, other=0.0)
    if HAS_ADDEND:
        added = tl.load(addend + first + places, mask=inside, other=0.0).to(tl.float32)
        if HAS_ADDEND_NORM:
            scale = tl.rsqrt(tl.sum(added * added, axis=0) / FEATURES + addend_eps)
            added = added * scale * tl.load(addend_weight + places, mask=inside, other=0.0)
        row = row + added
        tl.store(hidden + first + places, row, mask=inside)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(row * row, axis=0) / FEATURES + eps)
        row = row * scale * tl.load(weight + places, mask=inside, other=0.0)
    tl.store(output + first + places, row.to(output.dtype.element_ty), mask=inside)


# The compiler must not specialise on the alignment of the slots: they follow a step's other numbers at any eight bytes.
@triton.jit(do_not_specialize_on_alignment=("slot_blocks", "slot_offsets"))  # type: ignore[untyped-decorator]
def _rotate_heads(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    query_weight,
    key_weight,
    cos,  # float32 [tokens, ROTARY]
    sin,
    keys,
    values,
    slot_blocks,
    slot_offsets,
    eps,
    token_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PAD: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Rotate one head of one token: a query's, or a key's together with its value."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    places = tl.arange(0, PAD)
    inside = places < DIM
    turning = places < ROTARY
    partners = tl.where(turning, (places + ROTARY // 2) % ROTARY, places)
    if head < HEADS:
        states = query + token * token_stride + head * DIM
        weight = query_weight
    else:
        states = key + token * token_stride + (head - HEADS) * DIM
        weight = key_weight
    own = tl.load(states + places, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(states + partners, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # every partner is read before any is written
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(own * own, axis=0) / DIM + eps)
        own = own * scale * tl.load(weight + places, mask=inside, other=0.0)
        other = other * scale * tl.load(weight + partners, mask=inside, other=0.0)
    cosines = tl.load(cos + token * ROTARY + places, mask=turning, other=1.0)
    sines = tl.load(sin + token * ROTARY + places, mask=turning, other=0.0)
    rotated = own * cosines + tl.where(places < ROTARY // 2, -other, other) * sines
    rotated = rotated.to(query.dtype.element_ty)
    tl.store(states + places, rotated, mask=inside)
    if head >= HEADS:
        kv_head = head - HEADS
        block = tl.load(slot_blocks + token).to(tl.int64)
        offset = tl.load(slot_offsets + token)
        key_place = block * key_block_stride + offset * key_token_stride + kv_head * key_head_stride
        tl.store(keys + key_place + places, rotated, mask=inside)
        carried = tl.load(value + token * token_stride + kv_head * DIM + places, mask=inside, other=0.0)
        value_place = block * value_block_stride + offset * value_token_stride + kv_head * value_head_stride
        tl.store(values + value_place + places, carried, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_rows(  # type: ignore[no-untyped-def]
    gate_up,  # [tokens, 2 * FEATURES]
    output,  # [tokens, FEATURES]
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    IS_SILU: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = places < FEATURES
    gate = tl.load(gate_up + token * 2 * FEATURES + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * FEATURES + FEATURES + places, mask=inside, other=0.0).to(tl.float32)
    if IS_SILU:
        gated = gate * tl.sigmoid(gate)
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi): tanh's form of GELU
        gated = gate * tl.sigmoid(2.0 * inner)
    tl.store(output + token * FEATURES + places, (gated * up).to(output.dtype.element_ty), mask=inside)
