"""Records the attention options of every layer of a model in one forward pass. Refuses models that bypass the attention
interface."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cluster.errors import ModelRefused
from engine.attention.interface import KV_KEYWORD, AttentionOptions
from engine.kv.layout import LayerShape


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """The arguments that one layer passed to attention."""

    shape: LayerShape
    dtype: str
    window: bool
    softcap: bool
    sinks: bool


def trace(model: PreTrainedModel) -> tuple[LayerTrace, ...]:
    """Return one LayerTrace per layer, in order. Raises ModelRefused unless every layer calls Tandem's attention
    exactly once."""
    name = type(model).__name__
    recorder = _Recorder()
    positions = torch.arange(2, device=model.device)[None]
    try:
        with torch.inference_mode():
            model(input_ids=positions, position_ids=positions, use_cache=False, **{KV_KEYWORD: recorder})
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise ModelRefused(f"{name} bypasses the attention interface, or fails without a cache: {error}") from error
    num_layers = model.config.get_text_config().num_hidden_layers
    called = sorted(layer for layer, _ in recorder.calls)
    if called != list(range(num_layers)):
        raise ModelRefused(
            f"{name} bypasses the attention interface: of its {num_layers} layers, {len(set(called))} called our "
            f"attention, in {len(called)} calls; each must call it once (state-space and linear layers keep no KV)"
        )
    dtypes = {layer.dtype for _, layer in recorder.calls}
    if len(dtypes) > 1:
        raise ModelRefused(f"{name} keeps KV in more than one dtype: {', '.join(sorted(dtypes))}")
    return tuple(layer for _, layer in sorted(recorder.calls, key=lambda call: call[0]))


class _Recorder:
    """A KvAccess that records each layer's arguments and returns zeros."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, LayerTrace]] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        trace = LayerTrace(
            shape=LayerShape(num_kv_heads=key.shape[1], key_dim=key.shape[2], value_dim=value.shape[2]),
            dtype=str(key.dtype).removeprefix("torch."),
            window=options.sliding_window is not None,
            softcap=options.softcap is not None,
            sinks=options.sinks is not None,
        )
        self.calls.append((layer, trace))
        return query.new_zeros(*query.shape[:2], value.shape[2])
