"""Whether what reached attention is what the projections gave, normed if they are, and rotated in halves. Layers
without rotation, and those that rotate pairs of neighbours, look the same from outside."""

from collections.abc import Iterator

import torch

from engine.decoders.layer_parts import LayerParts
from engine.decoders.not_compiled import NotCompiled
from engine.decoders.traced_calls import TracedCalls

_TOLERANCE = 0.03  # of the vectors' size; each of a few roundings in 16 bits is a tenth of it


def require_rotation(layer: int, parts: LayerParts, traced: TracedCalls) -> None:
    """Raises NotCompiled."""
    cos, sin = (part[0].float() for part in traced.rotation_of(parts.attention))
    for place, reached in enumerate(traced.states[layer]):
        given = _given(place, parts, traced, reached.shape)
        if not any(_is_near(_rotated(states.float(), cos, sin), reached.float()) for states in given):
            raise NotCompiled(f"{type(parts.attention).__name__} rotates its heads in a way of its own")


def _given(place: int, parts: LayerParts, traced: TracedCalls, shape: torch.Size) -> Iterator[torch.Tensor]:
    """Of queries (place 0) or keys (1), as `[tokens, heads, dim]`; of a norm that may have seen heads before tokens,
    both readings."""
    norm = getattr(parts.attention, ("q_norm", "k_norm")[place], None)
    if norm is not None:
        states = traced.only(norm).result
    elif len(parts.qkv) == 1:
        width, queries = shape[1] * shape[2], parts.out.in_features
        states = traced.only(parts.qkv[0]).result.narrow(-1, place * queries, width)
    else:
        states = traced.only(parts.qkv[place]).result
    if states.dim() == 4 and states[0].transpose(0, 1).shape == shape:
        yield states[0].transpose(0, 1)
    yield states.reshape(shape)


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`[tokens, heads, dim]` by `[tokens, rotated]`."""
    width = cos.shape[-1]
    turned, kept = states[..., :width], states[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    return torch.cat((turned, kept), dim=-1)


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= _TOLERANCE * other.norm())
