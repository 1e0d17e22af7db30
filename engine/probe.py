"""The probe at load: decides whether a model run our way says what the model itself says. Refuses it otherwise.

Two things are held. Every layer calls our attention function exactly once in a forward pass. And the logits of two
sequences, packed, chunked and paged through the real runner, equal those of the model's own eager forward on each
sequence alone; the second sequence is longer than every window, chunk and rotary threshold that `max_model_len` allows,
so that what depends on length or on the rest of the batch shows.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cluster.errors import ModelRefused
from engine.attention.interface import KV_KEYWORD, AttentionOptions
from engine.layout import LayerShape


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """What one layer handed to attention."""

    shape: LayerShape
    dtype: str
    window: bool
    softcap: bool
    sinks: bool


class _Recorder:
    """KvAccess that notes what each layer brings and answers zeros."""

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


def trace(model: PreTrainedModel) -> tuple[LayerTrace, ...]:
    """What every layer asks of attention, by one forward pass over two tokens. Raises ModelRefused."""
    name = type(model).__name__
    recorder = _Recorder()
    positions = torch.arange(2, device=model.device)[None]
    try:
        with torch.inference_mode():
            model(input_ids=positions, position_ids=positions, use_cache=False, **{KV_KEYWORD: recorder})
    except TypeError as error:
        raise ModelRefused(f"{name} bypasses the attention interface, it hands no {KV_KEYWORD} on: {error}") from error
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
