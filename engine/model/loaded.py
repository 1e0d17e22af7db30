"""A model that may be served, its properties for the rest of Tandem, and its fingerprint.

The fingerprint contains digests of all that two workers must share before KV moves between them.

The digest of the weights is kept in their folder between starts, because hashing takes longer than mapping the files. A
kept digest counts only for the very same files: their paths, devices, inodes, sizes, and the times of their last change
of content and of attributes, in nanoseconds; the kernel sets the last one, so a copy, a restored backup or a file
rewritten with its old date all differ. Anything else that the digest depends on is part of the key: the format below,
the dtype and device of the loaded tensors, and the libraries that load them. In doubt the digest is computed.

`pack_weights` repacks weights once into the layout of this processor's matrix units, on a CPU and in bfloat16 only.
oneDNN repacks a plain weight in every product; for the few rows of a decode step that costs more than the product. A
packed layer is compared with the plain one before it replaces it. Float32 weights stay plain: their last bit may depend
on the layout, and in float32 Tandem promises equal tokens.
"""

import hashlib
import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from cluster.messages import LayoutFingerprint, Sampling
from engine.attention.registry import Capability
from engine.kv.layout import BlockLayout
from engine.kv.pool import KvPool
from engine.steps.forward import PlainForward

_FORMAT = 1  # of this file, and of the input of `weights_digest`
_NAME = ".tandem-weights.json"
_MIN_BYTES = 64 << 20  # less is hashed in a moment
# A file changed within the resolution of its dates may change once more without a trace, as in Git's index.
_SETTLED_S = 2.0
_LIBRARIES = ("torch", "transformers", "safetensors")
# Keys about the origin and the name of the model that do not change its results.
_IGNORED_KEYS = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache"})
_HASH_THREADS = 4  # hashing releases the GIL; with threads it takes no longer than reading the weights did
_ROWS_HINT = 64  # measured: weights packed for 64 rows are as fast for 1 to 512 rows as weights packed for that number
_MIN_FEATURES = 64
_NUM_CHECKED_ROWS = 3
_TOLERANCE = 4 * torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a model folder as they were at one moment."""

    folder: Path
    identity: tuple[tuple[str, int, int, int, int, int], ...]  # path, device, inode, size, and both times of change

    @staticmethod
    def of(model: str) -> "WeightFiles | None":
        """Look at the files now. None if `model` is not the folder that has all weights, such as a hub's name."""
        folder = Path(model)
        if not folder.is_dir() or (folder / "adapter_config.json").exists():
            return None
        try:
            found = {
                str(path): path.stat()
                for path in sorted(folder.resolve().iterdir())
                if path.is_file() and not path.name.startswith(_NAME)
            }
        except OSError:
            return None
        identity = (
            (path, seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
            for path, seen in found.items()
        )
        return WeightFiles(folder, tuple(identity))

    def digest(self, compute: Callable[[], str], loaded_as: str, *, now_s: float, min_bytes: int = _MIN_BYTES) -> str:
        """Return the kept digest of the weights, or compute and keep it. Call this after loading: if a file has changed
        since these were looked at, nothing is trusted or kept. `loaded_as`: dtype and device of the loaded tensors.
        `now_s`: seconds since the epoch."""
        if sum(size for _, _, _, size, _, _ in self.identity) < min_bytes or not self._are_unchanged():
            return compute()
        key = self._key(loaded_as)
        for path in self._places():
            kept = _read(path)
            if kept is not None and kept[0] == key:
                return kept[1]
        digest = compute()
        latest_ns = max(max(modified_ns, changed_ns) for *_, modified_ns, changed_ns in self.identity)
        if now_s - latest_ns / 1e9 >= _SETTLED_S and self._are_unchanged():
            self._keep(key, digest)
        return digest

    def _are_unchanged(self) -> bool:
        return WeightFiles.of(str(self.folder)) == self

    def _key(self, loaded_as: str) -> str:
        libraries = [importlib.metadata.version(name) for name in _LIBRARIES]
        text = json.dumps([_FORMAT, loaded_as, libraries, self.identity])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _places(self) -> list[Path]:
        """Return where a digest may be kept: beside the weights, or, if they are read-only, in the user's cache."""
        places = [self.folder / _NAME]
        with suppress(RuntimeError):  # this user has no home
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "weights"
            name = hashlib.blake2b(str(self.folder.resolve()).encode(), digest_size=12).hexdigest()
            places.append(cache / f"{name}.json")
        return places

    def _keep(self, key: str, digest: str) -> None:
        for path in self._places():
            with suppress(OSError):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write(path, json.dumps({"key": key, "digest": digest}))
                return


def _read(path: Path) -> tuple[str, str] | None:
    """Return the key and the digest; None unless the file belongs to this user and no other user may write it."""
    try:
        with path.open() as file:
            seen = os.fstat(file.fileno())
            if seen.st_uid not in (os.getuid(), 0) or seen.st_mode & 0o022:
                return None
            values = json.load(file)
        key, digest = values["key"], values["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (key, digest) if isinstance(key, str) and isinstance(digest, str) else None


def _write(path: Path, text: str) -> None:
    """Replace the file in one step: several workers may write it at the same time."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise


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


class PackedLinear(nn.Module):
    """Replaces an nn.Linear; keeps its bias and, instead of its weight, the packed one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class _Watched(nn.Linear):
    """An nn.Linear that records, during one call of its model, whether other modules read its weight."""

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        self._is_read = True
        return self._plain()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self._plain(), self.bias)

    def _plain(self) -> nn.Parameter:
        weight = self._parameters["weight"]
        assert weight is not None
        return weight


def pack_weights(model: nn.Module, run: Callable[[], object]) -> str:
    """Pack the weights that can be packed, in place; afterwards the model may only be called. `run` calls it once, to
    find layers whose weights the model itself reads; those stay. Returns a line for the worker's report."""
    if next(model.parameters()).device.type != "cpu" or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "weights: plain"
    linears = [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if _can_be_packed(child)
    ]
    read = _read_by_others([linear for _, _, linear in linears], run)
    linears = [found for found in linears if found[2] not in read]
    for done, (owner, name, linear) in enumerate(linears):
        packed = PackedLinear(linear)
        if not _is_equal(packed, linear):
            return f"weights: {done} of {len(linears)} products packed; {name} differs when packed and stays plain"
        setattr(owner, name, packed)
    return f"weights: {len(linears)} products packed for bfloat16"


def _read_by_others(linears: Sequence[nn.Linear], run: Callable[[], object]) -> set[nn.Linear]:
    for linear in linears:
        linear.__class__ = _Watched
    try:
        run()
        return {linear for linear in linears if vars(linear).pop("_is_read", False)}
    finally:
        for linear in linears:
            linear.__class__ = nn.Linear


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear  # a subclass may compute something else
        and "forward" not in vars(module)  # so may one that was wrapped
        and type(module.weight.data) is torch.Tensor  # a quantised one only looks like bfloat16
        and module.weight.dtype == torch.bfloat16
        and min(module.in_features, module.out_features) >= _MIN_FEATURES
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


@torch.inference_mode()
def _is_equal(packed: PackedLinear, linear: nn.Linear) -> bool:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(_NUM_CHECKED_ROWS, linear.in_features, generator=generator).to(torch.bfloat16)
    expected = linear(rows).float()
    return bool((packed(rows).float() - expected).norm() <= _TOLERANCE * expected.norm().clamp(min=1e-20))
