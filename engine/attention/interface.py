"""The one attention function that every model of Tandem calls, registered with `transformers`.

Owns the options that a model may pass to attention; never computes attention. The function finds the step's KV in the
keyword argument `tandem_kv`, which models pass on to their layers. It refuses every keyword that it does not support,
because ignoring one would give wrong results.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import AttentionInterface

from cluster.errors import ModelRefused

ATTENTION_NAME = "tandem_paged"
KV_KEYWORD = "tandem_kv"

# Models pass these for other implementations; they do not change the result of attention.
_HARMLESS = frozenset({"position_ids", "cache_position", "layer_idx", "use_cache"})


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The attention options of one layer. With `sliding_window`, a token sees that many tokens, itself included."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads], one more logit per head that takes weight and gives no value


@dataclass(frozen=True, slots=True, eq=False)
class LayerKv:
    """The KV of one layer in one step: K and V of the step's own tokens, and the layer's strided view of the pool,
    where they have already been written."""

    new_keys: torch.Tensor  # [tokens, kv_heads, dim]
    new_values: torch.Tensor
    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, dim]
    values: torch.Tensor
    # Scales of int8 or float8 K and V, [num_blocks, block_size, kv_heads]; None if they are in the query's dtype.
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class KvAccess(Protocol):
    """The KV of one step, as the layers see it."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Attend: query `[tokens, heads, dim]`, key and value `[tokens, kv_heads, dim]` -> `[tokens, heads,
        value_dim]`."""
        ...


def register() -> None:
    """Register Tandem's attention with transformers as ATTENTION_NAME. It has no mask function, so models build no
    mask."""
    AttentionInterface.register(ATTENTION_NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    *,
    tandem_kv: KvAccess | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention as transformers calls it. Raises ModelRefused if the layer needs an option that
    Tandem does not support."""
    name = type(module).__name__
    if tandem_kv is None:
        raise ModelRefused(f"{name} does not pass {KV_KEYWORD} on to its attention")
    if attention_mask is not None:
        raise ModelRefused(f"{name} builds an attention mask of its own; Tandem's attention takes none")
    if is_causal is False or (is_causal is None and not getattr(module, "is_causal", True)):
        raise ModelRefused(f"{name} asks for attention that is not causal")
    if dropout:
        raise ModelRefused(f"{name} asks for dropout {dropout} at inference")
    if sliding_window is not None and sliding_window < 1:
        raise ModelRefused(f"{name} asks for a sliding window of {sliding_window}")
    for keyword, asked in others.items():
        if keyword not in _HARMLESS and asked is not None and asked is not False:
            raise ModelRefused(f"{name} passes the keyword {keyword!r} to attention, which Tandem does not support")
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    output = tandem_kv.attend(_layer_of(module), _rows(query), _rows(key), _rows(value), options)
    return output[None], None


def _rows(states: torch.Tensor) -> torch.Tensor:
    assert states.shape[0] == 1, states.shape
    return states[0].transpose(0, 1)  # [tokens, heads, dim]


def _layer_of(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelRefused(f"{type(module).__name__} does not say which layer it is (layer_idx)")
    return layer
