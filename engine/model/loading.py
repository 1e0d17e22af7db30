"""Loads the model that `--model` names and checks it. Owns its source, dtype, device and limits.

A model that cannot be loaded, or whose results would be silently wrong, is refused with ModelRefused before anything
starts. One forward pass records the attention options of every layer; models that bypass the attention interface are
refused.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from cluster.errors import ConfigError, ModelRefused
from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.attention import registry
from engine.attention.interface import ATTENTION_NAME, KV_KEYWORD, AttentionOptions, register
from engine.kv import capacity
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import TORCH_DTYPES
from engine.model.load_check import check_equal
from engine.model.loaded import LoadedModel, ModelInfo

# A prime, so that the rows of no matrix repeat with the tile.
_TILE_ELEMS = 1_000_003
_SEED = 20_240_611


def load(
    settings: EngineSettings,
    wire: capacity.WireSpace = capacity.NATIVE,
    ended: Callable[[str], None] = lambda phase: None,
) -> LoadedModel:
    """Load the configured model and check it; `ended` receives the name of each phase at its end. Raises ConfigError,
    or ModelRefused if the model cannot be served."""
    loaded = load_unchecked(settings, wire, ended)
    check_equal(loaded, chunk_tokens=settings.max_prefill_tokens)
    ended("load_check")
    return loaded


def load_unchecked(
    settings: EngineSettings,
    wire: capacity.WireSpace = capacity.NATIVE,
    ended: Callable[[str], None] = lambda phase: None,
) -> LoadedModel:
    """Load the configured model like `load`, without the load check, which must follow before the model serves."""
    register()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a worker's log is no terminal
    device = _device(settings)
    settings = capacity.with_pool_memory(settings, device)
    config = _read_config(settings)
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None:
        capacity.check_length(settings.max_model_len, limit)  # costs nothing yet
    model = _build(settings, config, device)
    ended("weights")
    generation = model.generation_config or GenerationConfig.from_model_config(config)
    traces = trace(model)
    shapes, dtype = [layer.shape for layer in traces], traces[0].dtype
    kv_dtype = dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    layout = lay_out(shapes, settings.block_size, kv_dtype)
    needs = registry.Needs(
        device=device.partition(":")[0],
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dims=frozenset(dim for layer in traces for dim in (layer.shape.key_dim, layer.shape.value_dim)),
        block_size=settings.block_size,
        window=any(layer.window for layer in traces),
        softcap=any(layer.softcap for layer in traces),
        sinks=any(layer.sinks for layer in traces),
    )
    info = ModelInfo(
        name=settings.model_name,
        architecture=type(model).__name__,
        vocab_size=config.get_text_config().vocab_size,
        max_model_len=capacity.max_model_len(settings, layout, limit, wire),
        eos_token_ids=_eos_token_ids(generation, config),
        dtype=dtype,
        default_sampling=_default_sampling(generation),
    )
    attention = registry.choose(settings.attention_backend, needs)
    ended("trace")
    return LoadedModel(model=model, info=info, layout=layout, attention=attention, device=device)


def _device(settings: EngineSettings) -> str:
    wanted = settings.device
    has_cuda = torch.cuda.is_available()
    device = ("cuda" if has_cuda else "cpu") if wanted == "auto" else wanted
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, not {wanted!r}")
    if kind == "cuda" and not has_cuda:
        raise ConfigError(f"--device {wanted}: torch {torch.__version__} sees no CUDA device here")
    if kind == "cpu":
        return device
    device = device_for(device, settings.local_rank, settings.local_world_size, torch.cuda.device_count())
    if ":" in device:
        torch.cuda.set_device(device)  # this thread launches our own kernels, in the check and for graphs
    return device


def _read_config(settings: EngineSettings) -> PreTrainedConfig:
    """Return the model's configuration. Raises ConfigError if the folder does not exist, ModelRefused if it has no
    model, or one with code of its own that --trust-remote-code does not allow."""
    model = settings.model
    folder = Path(model)
    beside_others = "/" in model and folder.parent.is_dir()  # otherwise a name with one slash may be a hub name
    names_a_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or folder.exists() or beside_others
    if names_a_path and not folder.is_dir():
        raise ConfigError(f"--model {model}: there is no such folder; name one that this process sees")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelRefused(f"--model {model}: the folder holds no config.json; name one that holds a model")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model, **_source(settings))
    except (OSError, ValueError, KeyError) as error:
        place, advice = "its configuration", ""
        if not folder.is_dir():
            place, advice = "there is no such folder, and the hub's configuration", "; correct the name"
        if "trust_remote_code" in str(error):
            raise ModelRefused(
                f"--model {model} brings Python code of its own; give --trust-remote-code to run it, where you trust it"
            ) from error
        raise ModelRefused(f"--model {model}: {place} cannot be read: {_first_line(error)}{advice}") from error
    return config


def _build(settings: EngineSettings, config: PreTrainedConfig, device: str) -> PreTrainedModel:
    dtype = _dtype(settings.dtype, config)
    try:
        if settings.load_format == "dummy":
            model = dummy_model(config, dtype, ATTENTION_NAME, torch.device(device))
        else:
            placed = {"device_map": device} if device != "cpu" and importlib.util.find_spec("accelerate") else {}
            model = AutoModelForCausalLM.from_pretrained(
                settings.model,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,  # the other format is a pickle, which runs code
                **_source(settings),
                **placed,
            )
        if model.device != torch.device(device) and not getattr(model, "is_quantized", False):
            model.to(torch.device(device))  # type: ignore[arg-type]  # its decorator hides the signature
    except KeyError as error:
        if error.args == (ATTENTION_NAME,):  # it keeps a table of attention classes of its own
            raise ModelRefused(
                f"{'/'.join(config.architectures or [config.model_type])} bypasses the attention interface"
            ) from error
        raise ModelRefused(f"--model {settings.model} cannot be loaded: {_first_line(error)}") from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelRefused(f"--model {settings.model} cannot be loaded: {_first_line(error)}") from error
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    return model


def _source(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments by which transformers finds the model."""
    return {"revision": settings.revision or "main", "trust_remote_code": settings.trust_remote_code == "on"}


def _dtype(wanted: str, config: PreTrainedConfig) -> torch.dtype:
    if wanted != "auto":
        return TORCH_DTYPES[wanted]
    declared = getattr(config.get_text_config(), "dtype", None) or config.dtype
    return TORCH_DTYPES.get(str(declared).removeprefix("torch."), torch.float32)


def _eos_token_ids(generation: GenerationConfig, config: PreTrainedConfig) -> frozenset[int]:
    declared = generation.eos_token_id
    if declared is None:
        declared = getattr(config.get_text_config(), "eos_token_id", None)
    if declared is None:
        return frozenset()
    return frozenset([declared] if isinstance(declared, int) else declared)


def _default_sampling(generation: GenerationConfig) -> Sampling:
    """Return the sampling of generation_config.json; greedy unless it enables sampling, as in `generate`."""
    if not generation.do_sample:
        return Sampling()
    return Sampling(
        temperature=_or(generation.temperature, 1.0),
        top_k=int(_or(generation.top_k, 0)),
        top_p=_or(generation.top_p, 1.0),
        min_p=_or(generation.min_p, 0.0),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def dummy_model(
    config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str, device: torch.device
) -> PreTrainedModel:
    """Return a model with random weights, made on its device. Two calls give equal weights, so that dummy workers may
    exchange KV.

    Matrices are copied from one tile of normally distributed numbers, because drawing billions of elements is slow.
    Vectors are initialised by the model itself, which draws some of them (gpt-oss: sinks and the router's bias) from
    torch's global generator; it is seeded here and restored afterwards.
    """
    with no_init_weights(), device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    std = getattr(config.get_text_config(), "initializer_range", 0.02)
    tile = (torch.randn(_TILE_ELEMS, generator=torch.Generator().manual_seed(_SEED)) * std).to(device, dtype)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() >= 2:
                _fill(parameter, tile, begin=index * 7919 % _TILE_ELEMS)
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # the model's own pass skips it
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model.init_weights()  # type: ignore[no-untyped-call]
    return model


def _fill(parameter: torch.Tensor, tile: torch.Tensor, begin: int) -> None:
    flat = parameter.view(-1)
    done = 0
    while done < len(flat):
        part = tile[begin : begin + len(flat) - done]
        flat[done : done + len(part)] = part
        done, begin = done + len(part), 0


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


def device_for(wanted: str, local_rank: int, local_world_size: int, num_gpus: int) -> str:
    """Return the device of this worker. `wanted` is `cuda` or `cuda:N`; a worker alone uses torch's default device.

    Workers that one command starts on a host are numbered, as `torchrun` numbers processes, and are assigned to its
    GPUs in turn. A device that was named with its index is used by every such worker."""
    if ":" in wanted or local_world_size == 1:
        return wanted
    return f"cuda:{local_rank % num_gpus}"


def num_sharing(wanted: str, local_rank: int, local_world_size: int, num_gpus: int) -> int:
    """Return the number of workers on this worker's GPU, itself included. Ranks at or above the world's size joined
    later."""
    world_size = max(local_world_size, local_rank + 1)
    return world_size if ":" in wanted else len(range(local_rank % num_gpus, world_size, num_gpus))
