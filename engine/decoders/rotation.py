"""Whether what reached attention is what the projections gave, normed if they are, and rotated in halves. Layers
without rotation, and those that rotate pairs of neighbours, look the same from outside."""

from collections.abc import Iterator

import torch

from engine.decoders.layer_parts import LayerParts
from engine.decoders.not_compiled import NotCompiled
from engine.decoders.traced_calls import Call, TracedCalls

_FIRST_LENGTH = 1024
_TOLERANCE = 0.03  # of the vectors' size; each of a few roundings in 16 bits is a tenth of it


class Rotary:
    """The cosines and sines of one kind of layer, computed by the model's own rotary module. `call` is one traced call
    of it."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.dim = call.result.shape[-1]
        self._cos = self._sin = torch.empty(0, self.dim)

    def rows(self, positions: torch.Tensor, end: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, float32 `[tokens, dim]` each, of `positions`, which are all below `end`. No
        position reaches `longest`."""
        if end > len(self._cos):
            self._cos, self._sin = self._table(min(max(2 * len(self._cos), end, _FIRST_LENGTH), longest))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the table. The module is called with a float32 state because it returns the state's dtype."""
        device = self._call.result.device
        positions = torch.arange(length, device=device)[None]
        state = torch.empty(1, 1, dtype=torch.float32, device=device)

        def replaced(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            return state if value.is_floating_point() else positions

        keywords = {name: replaced(value) for name, value in self._call.keywords.items()}
        cos, sin = self._call.module(*map(replaced, self._call.positional), **keywords)
        return cos[0].float().contiguous(), sin[0].float().contiguous()


def require_rotation(layer: int, parts: LayerParts, traced: TracedCalls) -> None:
    """Check that attention received the projections' outputs, normed if the layer has norms, and rotated in halves.
    Raises NotCompiled."""
    cos, sin = (part[0].float() for part in traced.rotation_of(parts.attention))
    for place, reached in enumerate(traced.states[layer]):
        given = _given(place, parts, traced, reached.shape)
        if not any(_is_near(_rotated(states.float(), cos, sin), reached.float()) for states in given):
            raise NotCompiled(f"{type(parts.attention).__name__} rotates its heads in a way of its own")


def _given(place: int, parts: LayerParts, traced: TracedCalls, shape: torch.Size) -> Iterator[torch.Tensor]:
    """Yield candidates for the unrotated queries (place 0) or keys (1), `[tokens, heads, dim]`: a norm may have seen
    heads before tokens, so both readings are yielded."""
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
    """Rotate `[tokens, heads, dim]` by cosines and sines `[tokens, rotated]`."""
    width = cos.shape[-1]
    turned, kept = states[..., :width], states[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    return torch.cat((turned, kept), dim=-1)


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= _TOLERANCE * other.norm())
