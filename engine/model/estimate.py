"""Estimates KV memory from a model's configuration alone. Pure arithmetic over config.json; loads no model and no
torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError
from cluster.settings.engine_settings import DTYPES
from engine.kv.layout import ITEM_BYTES, SCALE_BYTES, SCALED, LayerShape, lay_out

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_LENGTH = ("max_position_embeddings", "n_positions", "max_sequence_length")


@dataclass(frozen=True, slots=True)
class KvEstimate:
    """The memory that the K and V of one token take over all layers. Every token keeps its KV, with or without sliding
    windows."""

    num_layers: int
    layer: LayerShape
    dtype: str
    max_tokens: int | None  # the model's longest sequence, if its configuration names one

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token's K and V, scales included, without the padding of an 8-bit block."""
        scale_bytes = 2 * self.layer.num_kv_heads * SCALE_BYTES if self.dtype in SCALED else 0
        return self.num_layers * (self.layer.elems_per_token * ITEM_BYTES[self.dtype] + scale_bytes)

    def block_bytes(self, block_size: int) -> int:
        return lay_out([self.layer] * self.num_layers, block_size, self.dtype).block_bytes

    def request_bytes(self, num_tokens: int, block_size: int = 1) -> int:
        """Return the KV bytes of a sequence of `num_tokens`, in whole blocks."""
        return -(-num_tokens // block_size) * self.block_bytes(block_size)

    def num_sequences(self, memory_bytes: int, num_tokens: int, block_size: int = 1) -> int:
        """Return how many sequences of `num_tokens` fit at once."""
        return memory_bytes // self.block_bytes(block_size) // -(-num_tokens // block_size)


def estimate(config: Mapping[str, object], dtype: str = "auto", kv_cache_dtype: str = "auto") -> KvEstimate:
    """Return the estimate. `dtype` auto means the checkpoint's, and `kv_cache_dtype` auto means `dtype`. Raises
    ConfigError with the keys that the configuration lacks."""
    nested = config.get("text_config")
    text: Mapping[str, object] = nested if isinstance(nested, Mapping) else config
    num_heads = _first(text, _HEADS)
    computed = _dtype(config, text, dtype)
    return KvEstimate(
        num_layers=_first(text, _LAYERS),
        layer=_layer(text, num_heads),
        dtype=computed if kv_cache_dtype == "auto" else kv_cache_dtype,
        max_tokens=next((length for key in _LENGTH if isinstance(length := text.get(key), int)), None),
    )


def read_config(model: str) -> dict[str, object]:
    """Return the config.json of a local folder or hub name. Raises ConfigError."""
    path = Path(model) / "config.json"
    if not path.is_file():
        if Path(model).exists():
            raise ConfigError(f"--model {model}: there is no config.json in it")
        if model.startswith((".", "/", "~")):
            raise ConfigError(f"--model {model}: there is no such folder")
        path = _from_hub(model)
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold one JSON object")
    return content


def _layer(text: Mapping[str, object], num_heads: int) -> LayerShape:
    nope, rope, value = (text.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if isinstance(nope, int) and isinstance(rope, int) and isinstance(value, int):
        return LayerShape(num_heads, nope + rope, value)  # latent attention: transformers passes K and V uncompressed
    head_dim = text.get("head_dim") or _first(text, _WIDTH) // num_heads
    assert isinstance(head_dim, int)
    num_kv_heads = 1 if text.get("multi_query") else _first(text, (*_KV_HEADS, *_HEADS))
    return LayerShape(num_kv_heads, head_dim, head_dim)


def _dtype(config: Mapping[str, object], text: Mapping[str, object], wanted: str) -> str:
    declared = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    dtype = str(declared or "float32") if wanted == "auto" else wanted
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype}")
    return dtype


def _first(text: Mapping[str, object], keys: tuple[str, ...]) -> int:
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError(f"the model's configuration has none of {', '.join(keys)}")


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download  # comes with transformers, and without torch
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"--model {model}: no such folder, and the hub has no config.json for it") from error
