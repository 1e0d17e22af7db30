"""The operations between the products of a decoder layer, in torch's own operators.

They are the definition of these operations, and they run where Triton is missing; `engine/cuda/triton_ops.py` computes
each in one launch.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.decoders.layer_parts import SILU, RmsNorm


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The rotation of a step's tokens, shared by the layers with the same rotary embedding."""

    cos: torch.Tensor  # float32 [tokens, rotary_dim]
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """One layer's queries, keys and values as the matrix product returns them, and where keys and values are
    written."""

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
