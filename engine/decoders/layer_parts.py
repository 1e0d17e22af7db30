"""The parts of one decoder layer: the role of each product, norm and activation, determined from traced calls.

`trace_calls` records the calls of a model's modules in one forward pass over a few tokens, with arguments and results,
and does not change the model. NotCompiled is also the error of every step of recognising and compiling a model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from cluster.compiled_library import NotCompiled as NotCompiled
from engine.attention.interface import KV_KEYWORD, AttentionOptions

_TOKEN_IDS = (1, 2, 3)
SILU, GELU_TANH = 0, 1  # activations, as engine/cpu/kernels/kernels.h numbers them
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


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
    would leave out the work of the wrapper."""
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


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """A root-mean-square norm; `weight` is float32 and includes the constant that some models add to it."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """The parts of one layer: `qkv` are three products or one of merged weights, `gate_up` two or one."""

    attention: nn.Module
    activation: nn.Module
    qkv: tuple[nn.Linear, ...]
    out: nn.Linear
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear
    input_norm: RmsNorm | None
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    attention_out_norm: RmsNorm | None
    ffn_norm: RmsNorm | None
    ffn_out_norm: RmsNorm | None

    @property
    def norms(self) -> tuple[RmsNorm, ...]:
        of_heads = (self.query_norm, self.key_norm)
        of_layer = (self.input_norm, self.attention_out_norm, self.ffn_norm, self.ffn_out_norm)
        return tuple(norm for norm in (*of_layer, *of_heads) if norm is not None)

    @property
    def norms_whole_rows(self) -> bool:
        """Return whether the query's norm covers all heads as one row."""
        return self.query_norm is not None and len(self.query_norm.weight) == self.out.in_features

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """The (in, out) features of the four products."""
        products: tuple[Sequence[nn.Linear], ...] = (self.qkv, (self.out,), self.gate_up, (self.down,))
        return tuple((one[0].in_features, sum(linear.out_features for linear in one)) for one in products)


def layer_parts(layer: nn.Module, traced: TracedCalls) -> LayerParts:
    """Return the parts of one layer. Raises NotCompiled with the property of the layer that the kernels do not
    support."""
    _require_no_parameters_of_its_own(layer)
    attention = _child_with(layer, "o_proj")
    ffn = _child_with(layer, "down_proj")
    of_heads = _children(attention, ("q_norm", "k_norm"), ("qkv_proj", "o_proj"), (*_PROJECTIONS, "o_proj"))
    of_ffn = _children(
        ffn, ("act_fn", "activation_fn"), ("gate_up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj")
    )
    norms = _norms(layer, traced.only(attention), traced.only(ffn), traced)
    query_norm, key_norm = (rms_norm(of_heads[name]) if name in of_heads else None for name in ("q_norm", "k_norm"))
    if (query_norm is None) != (key_norm is None):
        raise NotCompiled(f"{type(attention).__name__} has a norm only for queries or only for keys")
    activations = [of_ffn[name] for name in ("act_fn", "activation_fn") if name in of_ffn]
    if len(activations) != 1:
        raise NotCompiled(f"{type(ffn).__name__} has no activation of its own")
    qkv = ("qkv_proj",) if "qkv_proj" in of_heads else _PROJECTIONS
    gate_up = ("gate_up_proj",) if "gate_up_proj" in of_ffn else ("gate_proj", "up_proj")
    return LayerParts(
        attention=attention,
        activation=activations[0],
        qkv=tuple(linear(of_heads[name], name) for name in qkv),
        out=linear(of_heads["o_proj"], "o_proj"),
        gate_up=tuple(linear(of_ffn[name], name) for name in gate_up),
        down=linear(of_ffn["down_proj"], "down_proj"),
        input_norm=norms.input,
        query_norm=query_norm,
        key_norm=key_norm,
        attention_out_norm=norms.attention_out,
        ffn_norm=norms.ffn,
        ffn_out_norm=norms.ffn_out,
    )


def linear(module: object, name: str) -> nn.Linear:
    """Return the weights of a product of plain bfloat16. Subclasses are refused, because they may compute something
    else."""
    if type(module) is not nn.Linear:
        raise NotCompiled(f"{name} is a {type(module).__name__}")
    weight = module.weight.data
    if type(weight) is not torch.Tensor or weight.dtype != torch.bfloat16 or weight.is_meta:
        raise NotCompiled(f"the weight of {name} is not plain bfloat16")
    return module


@torch.inference_mode()
def rms_norm(module: nn.Module) -> RmsNorm:
    """Recognise an RMS norm by its effect on rows of ordinary and of tiny numbers; the latter reveal its epsilon."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = [*module.parameters(), *module.buffers()]
    weight = getattr(module, "weight", None)
    if len(parameters) != 1 or parameters[0] is not weight or weight.dim() != 1 or not isinstance(eps, float):
        raise NotCompiled(f"{type(module).__name__} is not an RMS norm")
    rows = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(1)) * torch.tensor([[1.0], [1e-3]])
    rows = rows.to(weight.device)
    normed = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps)
    said = module(rows)
    for added in (0.0, 1.0):
        effective = weight.detach().float() + added
        if said.shape == rows.shape and torch.allclose(said.float(), normed * effective, rtol=1e-4, atol=1e-6):
            return RmsNorm(effective.contiguous(), eps)
    raise NotCompiled(f"{type(module).__name__} is not an RMS norm")


@torch.inference_mode()
def activation_of(module: nn.Module) -> int:
    """Recognise an activation by its effect on positive and negative numbers."""
    numbers = torch.linspace(-4, 4, 65)
    known: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
        SILU: functional.silu,
        GELU_TANH: lambda rows: functional.gelu(rows, approximate="tanh"),
    }
    for name, function in known.items():
        if torch.allclose(module(numbers), function(numbers), rtol=1e-5, atol=1e-6):
            return name
    raise NotCompiled(f"its activation is a {type(module).__name__}")


@dataclass(frozen=True, slots=True)
class _Norms:
    input: RmsNorm | None
    attention_out: RmsNorm | None
    ffn: RmsNorm | None
    ffn_out: RmsNorm | None


def _norms(layer: nn.Module, attention: Call, ffn: Call, traced: TracedCalls) -> _Norms:
    """Determine the role of each norm from its traced input and from the two residual sums of the layer."""
    whole = traced.only(layer)
    left = [child for child in layer.children() if child not in (attention.module, ffn.module)]
    norms = [traced.only(child) for child in left if not isinstance(child, nn.Dropout)]
    before, after = (_reading(norms, call.result) for call in (attention, ffn))
    first, second = (_writing(norms, call.input) for call in (attention, ffn))
    named = [call for call in (first, before, second, after) if call is not None]
    if len(named) != len(norms) or len({id(call) for call in named}) != len(norms):
        raise NotCompiled(f"{type(layer).__name__} has norms in unsupported places")
    middle = whole.input + (before or attention).result
    wired = (
        torch.equal((first or attention).input, whole.input)
        and torch.equal((second or ffn).input, middle)
        and torch.equal(whole.result, middle + (after or ffn).result)
    )
    if not wired:
        raise NotCompiled(f"{type(layer).__name__} has residual sums of an unsupported form")
    return _Norms(*(None if call is None else rms_norm(call.module) for call in (first, before, second, after)))


def _reading(norms: list[Call], tensor: torch.Tensor) -> Call | None:
    return next((call for call in norms if call.input is tensor), None)


def _writing(norms: list[Call], tensor: torch.Tensor) -> Call | None:
    return next((call for call in norms if call.result is tensor), None)


def _child_with(layer: nn.Module, name: str) -> nn.Module:
    found = [child for child in layer.children() if name in dict(child.named_children())]
    if len(found) != 1:
        held = ", ".join(type(child).__name__ for child in layer.children())
        raise NotCompiled(f"{type(layer).__name__} is made of {held}")
    return found[0]


def _children(module: nn.Module, may: tuple[str, ...], *must: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the children by name: all of exactly one set in `must`, and those of `may` that exist. Raises
    NotCompiled."""
    _require_no_parameters_of_its_own(module)
    children = dict(module.named_children())
    required = set(children) - set(may)
    if not any(required == set(names) for names in must):
        raise NotCompiled(f"{type(module).__name__} is made of {', '.join(children)}")
    return children


def _require_no_parameters_of_its_own(module: nn.Module) -> None:
    own: Iterator[str] = (name for name, _ in module.named_parameters(recurse=False))
    name = next(own, None)
    if name is not None:
        raise NotCompiled(f"{type(module).__name__} overrides {name}")
