"""Attention written out as two products and a softmax: the part that every option of a layer can be put into."""

import torch

from engine.attention.interface import AttentionOptions


def attend_dense(
    query: torch.Tensor,  # [..., kv_heads, queries, dim]; the heads of one group and its tokens may share `queries`
    keys: torch.Tensor,  # [..., kv_heads, context, dim]
    values: torch.Tensor,  # [..., kv_heads, context, value_dim]
    visible: torch.Tensor,  # bool, broadcasts to [..., kv_heads, queries, context]
    sinks: torch.Tensor | None,  # broadcasts to [..., kv_heads, queries, 1]
    options: AttentionOptions,
) -> torch.Tensor:
    """-> `[..., kv_heads, queries, value_dim]`. The softmax is taken in float32, as models' own eager attention is."""
    scores = torch.matmul(query * options.scaling, keys.transpose(-1, -2)).float()
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


def visibility(start: int, num_queries: int, first: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Which keys, at positions first, first + 1, ..., the queries at start, start + 1, ... see: `[queries, keys]`."""
    positions = torch.arange(start, start + num_queries)[:, None]
    key_positions = torch.arange(first, first + num_keys)[None, :]
    visible = key_positions <= positions
    if window is not None:
        visible &= key_positions > positions - window
    return visible
