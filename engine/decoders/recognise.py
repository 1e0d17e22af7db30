"""Recognises the loaded models that the kernels can compute: decoders whose layers consist of RMS norms, rotary
attention and a gated feed-forward.

Decides by the modules of a layer and their traced calls, not by class names. Never decides about numerical accuracy: a
compiled forward is compared with the model's own before it is used. Raises NotCompiled with the name of every feature
that the kernels would leave out.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention.interface import AttentionOptions
from engine.decoders.layer_parts import (
    AttentionCall,
    Call,
    LayerParts,
    NotCompiled,
    RmsNorm,
    TracedCalls,
    activation_of,
    layer_parts,
    linear,
    rms_norm,
    trace_calls,
)

_MAX_HEAD_DIM, _HEAD_DIM_STEP = 256, 16  # of kernels.h
_MAX_ROTARIES = 2
_FIRST_LENGTH = 1024
_TOLERANCE = 0.03  # relative to the vectors' size; one rounding in 16 bits is about a tenth of it


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


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    parts: LayerParts
    window: int  # 0: none
    rotary: int  # which of Decoder.rotaries


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A model as the kernels need it, with its own weights."""

    embedding: nn.Module
    layers: tuple[DecoderLayer, ...]
    rotaries: tuple[Rotary, ...]
    final_norm: RmsNorm
    head: nn.Linear
    heads: AttentionCall  # of every layer alike but for the window
    activation: int
    logit_softcap: float  # 0: none

    @property
    def hidden(self) -> int:
        return self.head.in_features

    @property
    def intermediate(self) -> int:
        return self.layers[0].parts.down.in_features

    def linears(self) -> Iterator[nn.Linear]:
        for layer in self.layers:
            yield from (*layer.parts.qkv, layer.parts.out, *layer.parts.gate_up, layer.parts.down)
        yield self.head


def recognise(model: PreTrainedModel) -> Decoder:
    """Return the model as a Decoder. Raises NotCompiled with the property that the kernels do not support."""
    try:
        return _taken_apart(model)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:  # built as none before
        raise NotCompiled(f"{type(model).__name__} has layers that cannot be read: {error!r}") from error


def _taken_apart(model: PreTrainedModel) -> Decoder:
    stack = model.get_decoder()  # type: ignore[no-untyped-call]
    modules = getattr(stack, "layers", None)
    if not isinstance(modules, nn.ModuleList) or not isinstance(getattr(stack, "norm", None), nn.Module):
        raise NotCompiled(f"{type(stack).__name__} is not a list of layers and a norm")
    head = linear(model.get_output_embeddings(), "the head")  # type: ignore[no-untyped-call]
    embedding = _embedding(model)
    traced = trace_calls(model)
    parts = tuple(layer_parts(module, traced) for module in modules)
    attention = [traced.attention[index] for index in range(len(parts))]
    rotaries = _rotaries(parts, traced)
    for index, part in enumerate(parts):
        _require_rotation(index, part, traced)
    decoder = Decoder(
        embedding=embedding,
        layers=tuple(
            DecoderLayer(part, call.options.sliding_window or 0, rotary)
            for part, call, rotary in zip(parts, attention, rotaries.of_layer, strict=True)
        ),
        rotaries=rotaries.distinct,
        final_norm=rms_norm(stack.norm),
        head=head,
        heads=attention[0],
        activation=activation_of(parts[0].activation),
        logit_softcap=_logit_softcap(model, traced.only(head).result, traced.logits),
    )
    _check_chain([embedding, *modules, stack.norm], head, traced)
    _check_alike(decoder, attention)
    _check_widths(decoder)
    return decoder


def _embedding(model: PreTrainedModel) -> nn.Module:
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.weight.dtype != torch.bfloat16:
        raise NotCompiled(f"its embedding is a {type(embedding).__name__}, not a bfloat16 one")
    return embedding


@dataclass(frozen=True, slots=True)
class _Rotaries:
    distinct: tuple[Rotary, ...]
    of_layer: tuple[int, ...]


def _rotaries(parts: tuple[LayerParts, ...], traced: TracedCalls) -> _Rotaries:
    """Return, for each layer, the rotary call whose cosines and sines it used."""
    found: list[object] = []
    rotaries: list[Rotary] = []
    of_layer = []
    for part in parts:
        given = traced.rotation_of(part.attention)
        call = next((call for call in traced.calls if call.output is given), None)
        if call is None:
            raise NotCompiled(f"{type(part.attention).__name__} receives no rotation from its own rotary module")
        if not any(given is other for other in found):
            found.append(given)
            rotaries.append(Rotary(call))
        of_layer.append(next(index for index, other in enumerate(found) if other is given))
    if len(found) > _MAX_ROTARIES or len({rotary.dim for rotary in rotaries}) > 1:
        raise NotCompiled(f"its layers are rotated in {len(found)} ways")
    return _Rotaries(tuple(rotaries), tuple(of_layer))


def _logit_softcap(model: PreTrainedModel, plain: torch.Tensor, logits: torch.Tensor) -> float:
    if torch.equal(logits, plain):
        return 0.0
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if softcap is None or not torch.equal(logits, torch.tanh(plain / softcap) * softcap):
        raise NotCompiled("its logits are not the output of its head")
    return float(softcap)


def _check_chain(modules: list[nn.Module], head: nn.Linear, traced: TracedCalls) -> None:
    """Check that each layer's input is the output of the layer before it, unchanged. Raises NotCompiled."""
    calls = [traced.only(module) for module in (*modules, head)]
    for before, after in itertools.pairwise(calls):
        if not torch.equal(before.result, after.input):
            raise NotCompiled(f"the output is changed between {_name(before.module)} and {_name(after.module)}")


def _check_alike(decoder: Decoder, attention: list[AttentionCall]) -> None:
    first = attention[0]
    for call in attention:
        options = call.options
        if options.sinks is not None:
            raise NotCompiled("its attention has sinks")
        same = AttentionOptions(options.scaling, first.options.sliding_window, options.softcap)
        if AttentionCall(call.num_heads, call.num_kv_heads, call.key_dim, call.value_dim, same) != first:
            raise NotCompiled("its layers differ in their attention")
    shapes = {
        (tuple(layer.parts.widths), layer.parts.norms_whole_rows, activation_of(layer.parts.activation))
        for layer in decoder.layers
    }
    if len(shapes) > 1:
        raise NotCompiled("its layers differ in their shapes")
    epsilons = {norm.eps for layer in decoder.layers for norm in layer.parts.norms} | {decoder.final_norm.eps}
    if len(epsilons) > 1:
        raise NotCompiled(f"its norms add different epsilons: {sorted(epsilons)}")


def _check_widths(decoder: Decoder) -> None:
    heads, parts, hidden = decoder.heads, decoder.layers[0].parts, decoder.hidden
    if heads.key_dim != heads.value_dim:
        raise NotCompiled(f"its keys have {heads.key_dim} features and its values {heads.value_dim}")
    if heads.key_dim % _HEAD_DIM_STEP or heads.key_dim > _MAX_HEAD_DIM:
        raise NotCompiled(
            f"its heads have {heads.key_dim} features; the kernels support multiples of 16 up to {_MAX_HEAD_DIM}"
        )
    if decoder.rotaries[0].dim % 2 or decoder.rotaries[0].dim > heads.key_dim:
        raise NotCompiled(f"it rotates {decoder.rotaries[0].dim} features of a head")
    query, both = heads.num_heads * heads.key_dim, decoder.intermediate * 2
    expected = ((hidden, query + 2 * heads.num_kv_heads * heads.key_dim), (query, hidden), (hidden, both))
    if parts.widths != (*expected, (decoder.intermediate, hidden)):
        raise NotCompiled(f"the widths of its products do not match its heads: {parts.widths}")
    if any(width % 2 for widths in parts.widths for width in widths):
        raise NotCompiled("the widths of its products are odd")
    whole = parts.norms_whole_rows
    for norm, num_heads in ((parts.query_norm, heads.num_heads), (parts.key_norm, heads.num_kv_heads)):
        if norm is not None and len(norm.weight) != heads.key_dim * (num_heads if whole else 1):
            raise NotCompiled(f"a norm of {len(norm.weight)} features over {num_heads} heads of {heads.key_dim}")


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _require_rotation(layer: int, parts: LayerParts, traced: TracedCalls) -> None:
    """Check that attention received the projections' outputs, normed if the layer has norms, and rotated in halves.
    Raises NotCompiled."""
    cos, sin = (part[0].float() for part in traced.rotation_of(parts.attention))
    for place, reached in enumerate(traced.states[layer]):
        given = _given(place, parts, traced, reached.shape)
        if not any(_is_near(_rotated(states.float(), cos, sin), reached.float()) for states in given):
            raise NotCompiled(f"{type(parts.attention).__name__} has an unsupported rotation")


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
