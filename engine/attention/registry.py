"""Lists the attention back ends with their capabilities, and chooses the back end of a model."""

import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.errors import ConfigError
from engine.attention.gather import GatherBackend, SdpaBackend
from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import PackedBatch
from engine.kv.layout import SCALED

NATIVE_DTYPES = frozenset({"float32", "bfloat16", "float16"})
ALL_DTYPES = NATIVE_DTYPES | SCALED


class AttentionBackend(Protocol):
    """Computes attention of one layer over the pool."""

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        """Attend: query `[tokens, heads, dim]` -> `[tokens, heads, value_dim]`."""
        ...


@dataclass(frozen=True, slots=True)
class Needs:
    """The attention features that one model on one device needs."""

    device: str  # cpu, cuda
    dtype: str
    kv_dtype: str  # of the pool
    head_dims: frozenset[int]  # of K and of V
    block_size: int
    window: bool
    softcap: bool
    sinks: bool


@dataclass(frozen=True, slots=True)
class Capability:
    """The features that one back end supports; `build` is called only if it is chosen."""

    name: str
    build: Callable[[], AttentionBackend]
    devices: frozenset[str]
    dtypes: frozenset[str] = NATIVE_DTYPES
    kv_dtypes: frozenset[str] = NATIVE_DTYPES
    max_head_dim: int | None = None
    head_dims: frozenset[int] | None = None  # K and V both have one of these sizes; None: any size
    block_multiple: int = 1
    window: bool = True
    softcap: bool = True
    sinks: bool = True
    lacks_here: Callable[[], str] = str  # the reason why it is not installed, or an empty string
    captures: bool = False  # it has a `prepare`, and its `attend` can be captured in a CUDA graph
    keeps_plans: bool = False  # a step's plan is in host memory that the next one overwrites

    def lacks(self, needs: Needs) -> list[str]:
        """Return the unmet needs as text, or an empty list."""
        reasons = []
        if needs.device not in self.devices:
            reasons.append(f"runs on {'/'.join(sorted(self.devices))}, not {needs.device}")
        if needs.dtype not in self.dtypes:
            reasons.append(f"does not support {needs.dtype}")
        if needs.kv_dtype not in self.kv_dtypes:
            reasons.append(f"does not support {needs.kv_dtype} KV")
        if self.max_head_dim is not None and max(needs.head_dims) > self.max_head_dim:
            reasons.append(f"supports heads up to {self.max_head_dim}, not {max(needs.head_dims)}")
        if self.head_dims is not None and not (len(needs.head_dims) == 1 and needs.head_dims <= self.head_dims):
            reasons.append(f"needs K and V of one size among {sorted(self.head_dims)}, not {sorted(needs.head_dims)}")
        if needs.block_size % self.block_multiple:
            reasons.append(
                f"needs a block size that is a multiple of {self.block_multiple} tokens, not {needs.block_size}"
            )
        for option in ("window", "softcap", "sinks"):
            if getattr(needs, option) and not getattr(self, option):
                reasons.append(f"does not support {option}")
        if why := self.lacks_here():
            reasons.append(why)
        return reasons


def _triton() -> AttentionBackend:
    from engine.attention.triton_paged import TritonBackend  # Triton comes with torch's CUDA wheels only

    return TritonBackend()


def _flashinfer() -> AttentionBackend:
    from engine.attention.flashinfer import FlashInferBackend  # an optional package

    return FlashInferBackend()


def _varlen() -> AttentionBackend:
    from engine.attention.varlen import VarlenBackend

    return VarlenBackend()


def _no_triton() -> str:
    """Return why Triton is not usable, or an empty string. Each process compiles small libraries with a C compiler at
    its first launch."""
    if not importlib.util.find_spec("triton"):
        return "needs the package triton, which is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler (gcc, clang, or one named in CC), which is not installed"
    return ""


def _no_flashinfer() -> str:
    return "" if importlib.util.find_spec("flashinfer") else "needs the package flashinfer, which is not installed"


def _no_paged_varlen() -> str:
    """Return why `varlen_attn` is not usable, or an empty string. In torch 2.11 it takes no block tables."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" in inspect.signature(varlen_attn).parameters:
        return ""
    return f"needs a torch whose varlen_attn reads blocks, which is not installed (this one is {torch.__version__})"


# In order of preference. Until they are measured on a GPU, the two libraries come after our own kernel, which supports
# everything that they do; --attention-backend selects them by name.
CAPABILITIES = (
    Capability(
        "triton",
        _triton,
        devices=frozenset({"cuda"}),
        kv_dtypes=ALL_DTYPES,
        max_head_dim=256,
        lacks_here=_no_triton,
        captures=True,
    ),
    Capability(
        "flashinfer",
        _flashinfer,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=frozenset({64, 128, 256}),
        sinks=False,
        lacks_here=_no_flashinfer,
        captures=True,
        keeps_plans=True,
    ),
    Capability(
        "varlen",
        _varlen,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=frozenset(range(8, 257, 8)),
        block_multiple=256,
        softcap=False,
        sinks=False,
        lacks_here=_no_paged_varlen,
        captures=True,
    ),
    Capability("sdpa", SdpaBackend, devices=frozenset({"cpu"}), kv_dtypes=ALL_DTYPES),
    Capability("gather", GatherBackend, devices=frozenset({"cpu", "cuda"}), kv_dtypes=ALL_DTYPES),
)


def choose(wanted: str, needs: Needs, table: Sequence[Capability] = CAPABILITIES) -> Capability:
    """Return the best back end that meets the needs, or the one named `wanted`. Raises ConfigError with the unmet
    needs."""
    refusals = []
    for capability in table:
        if wanted in ("auto", capability.name):
            reasons = capability.lacks(needs)
            if not reasons:
                return capability
            refusals.append(f"{capability.name} {', '.join(reasons)}")
    raise ConfigError(f"--attention-backend {wanted}: {'; '.join(refusals) or 'no such back end'}")
