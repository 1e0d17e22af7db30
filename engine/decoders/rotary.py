"""The rotation of one kind of layer, by the model's own module: cosines and sines of positions, as a table that grows.

A position's rotation depends on the position alone: the probe at load refuses models for which it does not, up to the
longest sequence that is served.
"""

import torch

from engine.decoders.traced_calls import Call

_FIRST_LENGTH = 1024


class Rotary:
    """`call`: one call of the module as the model itself makes it."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.dim = call.result.shape[-1]
        self._cos = self._sin = torch.empty(0, self.dim)

    def rows(self, positions: torch.Tensor, end: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 `[tokens, dim]` each, of `positions`, all below `end`. No position reaches `longest`."""
        if end > len(self._cos):
            self._cos, self._sin = self._table(min(max(2 * len(self._cos), end, _FIRST_LENGTH), longest))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Asked with a float32 state: the module answers in its dtype."""
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
