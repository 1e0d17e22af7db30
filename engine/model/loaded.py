"""A model that may be served, what the rest of Tandem needs to know of it, and its fingerprint.

The fingerprint contains digests of what two workers must have in common before KV moves between them."""

import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cluster.messages import LayoutFingerprint, Sampling
from engine.attention.registry import Capability
from engine.kv.layout import BlockLayout
from engine.kv.pool import KvPool
from engine.model.kept_digest import WeightFiles
from engine.steps.forward import PlainForward

# Keys that say where the model came from or how it was called, not what it computes.
_IGNORED_KEYS = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache"})
_HASH_THREADS = 4  # hashing releases the GIL; with threads it takes no longer than reading the weights did


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a model that workers and routers need. `default_sampling` comes from its
    generation_config.json."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and continuation together
    eos_token_ids: frozenset[int]
    dtype: str
    default_sampling: Sampling


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that may be served. `model` uses Tandem's attention; only the runner calls it. `own_logits`: what the
    model itself computes for the load check's sequences, by their tokens and chunks."""

    model: PreTrainedModel
    info: ModelInfo
    layout: BlockLayout
    attention: Capability
    device: str
    own_logits: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = field(default_factory=dict)

    def forward(self, pool: KvPool) -> PlainForward:
        """Return a forward that runs the model's own modules over this pool, with a new attention back end."""
        return PlainForward(self.model, pool, self.attention.build())


def fingerprint(loaded: LoadedModel, wire_dtype: str = "native", files: WeightFiles | None = None) -> LayoutFingerprint:
    """Return the fingerprint. `files`: those that the model was loaded from, looked at before it was; their digest is
    kept."""

    def digest() -> str:
        return weights_digest(loaded.model)

    loaded_as = f"{loaded.info.dtype} on {loaded.device.partition(':')[0]}"
    return LayoutFingerprint(
        weights=digest() if files is None else files.digest(digest, loaded_as, now_s=time.time()),
        model_config=config_digest(loaded.model.config),
        dtype=_dtype(loaded),
        block_table=loaded.layout.digest(),
        wire_dtype=wire_dtype,
    )


def _dtype(loaded: LoadedModel) -> str:
    """Return the compute dtype and the KV dtype as text, for the message with which workers refuse each other."""
    computed, kept = loaded.info.dtype, loaded.layout.dtype
    return computed if computed == kept else f"{computed} with {kept} KV"


def weights_digest(model: PreTrainedModel) -> str:
    """Return a digest of every byte of every tensor, by name, so that another fine-tune of the same shape differs."""
    tensors = [(name, part) for name, tensor in sorted(model.state_dict().items()) for part in _plain(tensor)]
    seen: set[tuple[int, int]] = set()
    distinct = []
    for name, tensor in tensors:  # tied weights once
        place = (tensor.data_ptr(), tensor.numel())
        if place not in seen:
            seen.add(place)
            distinct.append((name, tensor))
    total = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        for digest in threads.map(_tensor_digest, distinct):
            total.update(digest)
    return total.hexdigest()


def config_digest(config: PreTrainedConfig) -> str:
    """Return a digest of the effective configuration, defaults included."""
    text = json.dumps(_effective(config.to_dict()), sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _tensor_digest(named: tuple[str, torch.Tensor]) -> bytes:
    name, tensor = named
    digest = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    data = tensor.detach().contiguous().cpu().view(-1)
    if data.numel():
        digest.update(data.view(torch.uint8).numpy().data)
    return digest.digest()


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a quantised tensor consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _effective(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _effective(item) for key, item in value.items() if key not in _IGNORED_KEYS}
    return value
