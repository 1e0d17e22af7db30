"""Records the calls of a model's modules in one forward pass over a few tokens, with arguments and results. Does not
change the model.

NotCompiled is also the error of every step of recognising and compiling a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from cluster.compiled_library import NotCompiled as NotCompiled
from engine.attention.interface import KV_KEYWORD, AttentionOptions

_TOKEN_IDS = (1, 2, 3)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of one module with its positional and keyword arguments."""

    module: nn.Module
    positional: tuple[object, ...]
    keywords: Mapping[str, object]
    output: object

    @property
    def arguments(self) -> tuple[object, ...]:
        return (*self.positional, *self.keywords.values())

    @property
    def input(self) -> torch.Tensor:
        """The first tensor that the module received."""
        return _tensor(next((value for value in self.arguments if isinstance(value, torch.Tensor)), None))

    @property
    def result(self) -> torch.Tensor:
        """The tensor that the module returned, or the first of several."""
        return _tensor(self.output[0] if isinstance(self.output, tuple) else self.output)


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{type(value).__name__} instead of a tensor")
    return value


@dataclass(frozen=True, slots=True)
class AttentionCall:
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    options: AttentionOptions


@dataclass(slots=True)
class TracedCalls:
    """The traced calls in the order in which they ended, and the queries and keys of attention by layer."""

    calls: list[Call] = field(default_factory=list)
    attention: dict[int, AttentionCall] = field(default_factory=dict)
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # queries and keys, by layer
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def only(self, module: nn.Module) -> Call:
        found = [call for call in self.calls if call.module is module]
        if len(found) != 1:
            raise NotCompiled(f"a {type(module).__name__} is called {len(found)} times in a pass")
        return found[0]

    def rotation_of(self, attention: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines that this attention received, `[1, tokens, dim]` each."""
        given = self.only(attention).keywords.get("position_embeddings")
        if not isinstance(given, tuple) or len(given) != 2:
            raise NotCompiled(f"{type(attention).__name__} receives no rotation from its own rotary module")
        return given

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Return each token's own value as its attention output, so that the output is not zero. Implements
        KvAccess."""
        self.states[layer] = query, key
        self.attention[layer] = AttentionCall(query.shape[1], key.shape[1], key.shape[2], value.shape[2], options)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


@torch.inference_mode()
def trace_calls(model: PreTrainedModel) -> TracedCalls:
    """Run one forward pass and return its calls. Raises NotCompiled if a module is wrapped, because a compiled forward
    would leave out what the wrapper does."""
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            raise NotCompiled(f"{name or type(module).__name__} is wrapped")
    traced = TracedCalls()

    def note(module: nn.Module, positional: tuple[object, ...], keywords: dict[str, object], output: object) -> None:
        traced.calls.append(Call(module, positional, keywords, output))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        ids = torch.tensor([_TOKEN_IDS], device=model.device)
        positions = torch.arange(len(_TOKEN_IDS), device=model.device)[None]
        traced.logits = model(input_ids=ids, position_ids=positions, use_cache=False, **{KV_KEYWORD: traced}).logits
    finally:
        for handle in handles:
            handle.remove()
    return traced
