"""Every setting of every process: frozen, validated once, the same name as flag, environment variable and file key.

A field `max_model_len` is the flag `--max-model-len`, the variable `TANDEM_MAX_MODEL_LEN` and the key `max_model_len` of
the YAML file given by `--config`. Flags win over variables, variables over the file, the file over the default; an
unknown key is an error.
"""

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cluster.errors import ConfigError

_ENVIRONMENT_PREFIX = "TANDEM_"
_DTYPES = ("auto", "float32", "bfloat16", "float16")
TRANSPORTS = ("shm", "tcp")


def _setting(default: Any, text: str, *, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What every process of a cluster needs to find and trust the others."""

    redis: str = _setting("", "URL of the Redis that holds the registry, redis://host:port/db")
    cluster_name: str = _setting("tandem", "prefix of every key in Redis; members of one name form one cluster")
    cluster_key_file: str = _setting("", "file with the key that signs tickets; made at first start where missing")
    host: str = _setting("127.0.0.1", "address to bind to")
    advertise_host: str = _setting("", "address under which others reach this process; default: --host")
    member_id: str = _setting("", "name of this member; default: role and a random suffix")
    member_lease_s: float = _setting(5.0, "a member that does not renew for so long gets no new work")
    drain_grace_s: float = _setting(30.0, "how long a drained process may take to finish its work")
    log_level: str = _setting("info", "debug, info, warning or error", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        _require(self.member_lease_s > 0, f"--member-lease-s must be positive, not {self.member_lease_s}")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The model, and the memory and the steps it runs in."""

    model: str = _setting("", "local folder or hub name of the model")
    served_model_name: str = _setting("", "name that clients use; default: last part of --model")
    load_format: str = _setting("auto", "auto reads the weights; dummy makes random ones from the config alone", choices=("auto", "dummy"))
    dtype: str = _setting("auto", "computation and KV dtype; auto: the checkpoint's", choices=_DTYPES)
    device: str = _setting("auto", "cpu, cuda, cuda:N; auto: cuda where there is one")
    block_size: int = _setting(16, "tokens per KV block")
    num_blocks: int = _setting(0, "blocks in the pool; 0: from --kv-cache-memory")
    kv_cache_memory: str = _setting("256MiB", "memory of the pool: bytes, or with KiB, MiB, GiB")
    max_model_len: int = _setting(0, "most tokens of prompt and continuation; 0: the model's own limit")
    max_num_seqs: int = _setting(64, "most sequences in one step")
    max_prefill_tokens: int = _setting(512, "most prompt tokens in one step: the size of a chunk")
    max_queue: int = _setting(256, "most requests waiting in a worker; one more is refused")
    attention_backend: str = _setting("auto", "auto, or the name of one back end", choices=("auto", "sdpa", "triton", "gather"))
    num_threads: int = _setting(0, "threads of the model's computation; 0: one on CPU")

    def __post_init__(self) -> None:
        _require(self.block_size >= 1, f"--block-size must be at least 1, not {self.block_size}")
        _require(self.num_blocks >= 0, f"--num-blocks must not be negative, not {self.num_blocks}")
        _require(self.max_num_seqs >= 1, f"--max-num-seqs must be at least 1, not {self.max_num_seqs}")
        _require(self.max_prefill_tokens >= 1, f"--max-prefill-tokens must be at least 1, not {self.max_prefill_tokens}")
        _require(self.max_queue >= 1, f"--max-queue must be at least 1, not {self.max_queue}")
        parse_bytes(self.kv_cache_memory)

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model.rstrip("/")).name


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """How KV moves between workers."""

    kv_transports: str = _setting("shm,tcp", "transports that may be used, best first, comma-separated")
    lease_s: float = _setting(5.0, "an exporter keeps a ticket's blocks so long after the importer's last renewal")
    max_lease_s: float = _setting(120.0, "no renewal extends a lease beyond this")
    attach_timeout_s: float = _setting(60.0, "a ticket nobody attached to is dropped after this, counted from its first block")
    read_timeout_s: float = _setting(30.0, "an importer gives up a single read after this")
    quarantine_s: float = _setting(10.0, "a dead read's channel is destroyed after this, if the read has not ended by itself")
    watermark: float = _setting(0.05, "share of a decode pool that imports leave free for running sequences")

    def __post_init__(self) -> None:
        unknown = sorted(set(self.transports) - set(TRANSPORTS))
        _require(not unknown and bool(self.transports), f"--kv-transports: unknown {unknown}; known: {', '.join(TRANSPORTS)}")
        _require(0 < self.lease_s <= self.max_lease_s, "--lease-s must be positive and at most --max-lease-s")
        _require(0 <= self.watermark < 1, f"--watermark must be in [0, 1), not {self.watermark}")

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.kv_transports.split(",") if name.strip())


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ClusterSettings, EngineSettings, TransferSettings):
    """A prefill or decode worker."""

    port: int = _setting(0, "gRPC port; 0: a free one")

    def __post_init__(self) -> None:
        ClusterSettings.__post_init__(self)
        EngineSettings.__post_init__(self)
        TransferSettings.__post_init__(self)
        _require(bool(self.model), "--model is needed: a local folder or a hub name")


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ClusterSettings):
    """A router."""

    model: str = _setting("", "local folder or hub name of the model; only its tokenizer and configuration are read")
    served_model_name: str = _setting("", "name that clients use; default: last part of --model")
    port: int = _setting(8000, "HTTP port; 0: a free one")
    grpc_port: int = _setting(50051, "gRPC port; 0: a free one")
    api_key: str = _setting("", "clients must send it as a bearer token; empty: none is asked for")
    placement: str = _setting("least-loaded", "how workers are chosen", choices=("least-loaded", "round-robin"))
    max_model_len: int = _setting(0, "most tokens of prompt and continuation; 0: the model's own limit")
    max_live_requests: int = _setting(1024, "requests served at once; one more is refused")
    max_buffered_tokens: int = _setting(1_000_000, "tokens waiting for slow clients; past it the slowest are cancelled")
    max_message_bytes: int = _setting(4 * 1024 * 1024, "largest request taken")
    request_timeout_s: float = _setting(600.0, "deadline of a request that brings none")
    max_attempts: int = _setting(3, "tries at each leg of a request")
    stream_grace_s: float = _setting(2.0, "a worker whose stream broke may come back for so long")

    def __post_init__(self) -> None:
        ClusterSettings.__post_init__(self)
        _require(bool(self.model), "--model is needed: a local folder or a hub name")
        _require(self.max_attempts >= 1, f"--max-attempts must be at least 1, not {self.max_attempts}")

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model.rstrip("/")).name


Config = TypeVar("Config", WorkerConfig, RouterConfig)


def add_flags(parser: argparse.ArgumentParser, config_type: type[Config]) -> None:
    """Adds `--config` and one flag per field; a flag that was not given leaves no attribute."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same keys", default=argparse.SUPPRESS)
    for item in dataclasses.fields(config_type):
        parser.add_argument(
            "--" + item.name.replace("_", "-"),
            default=argparse.SUPPRESS,
            choices=item.metadata["choices"] or None,
            type=_field_type(config_type, item.name),
            help=f"{item.metadata['help']} (default: {item.default!r})",
        )


def load_config(
    config_type: type[Config], flags: Mapping[str, object], environment: Mapping[str, str] = os.environ
) -> Config:
    """Merges file, environment and flags, each over the one before. Raises ConfigError."""
    names = {item.name for item in dataclasses.fields(config_type)}
    values: dict[str, Any] = {}
    config_file = flags.get("config") or environment.get(_ENVIRONMENT_PREFIX + "CONFIG")
    if config_file:
        values.update(_read_file(Path(str(config_file)), names))
    for name in names:
        text = environment.get(_ENVIRONMENT_PREFIX + name.upper())
        if text is not None:
            values[name] = _convert(config_type, name, text, f"variable {_ENVIRONMENT_PREFIX}{name.upper()}")
    values.update({name: value for name, value in flags.items() if name in names})
    for item in dataclasses.fields(config_type):
        choices = item.metadata["choices"]
        if choices and values.get(item.name, item.default) not in choices:
            raise ConfigError(f"{item.name} must be one of {', '.join(choices)}, not {values[item.name]!r}")
    return config_type(**values)


def parse_arguments(config_type: type[Config], prog: str, arguments: Sequence[str]) -> Config:
    """The configuration of a process started as `python -m prog ...`."""
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    add_flags(parser, config_type)
    return load_config(config_type, vars(parser.parse_args(arguments)))


def echo(config: WorkerConfig | RouterConfig) -> str:
    """One line with every setting that differs from its default; secrets are not shown."""
    shown = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if value != item.default:
            shown.append(f"{item.name}={'***' if item.name == 'api_key' else value}")
    return " ".join(shown)


def parse_bytes(text: str) -> int:
    """'1048576', '512KiB', '256MiB', '2GiB' -> bytes. Raises ConfigError."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}
    for unit, factor in units.items():
        if text.endswith(unit):
            number = text.removesuffix(unit)
            break
    else:
        number, factor = text, 1
    try:
        num_bytes = int(float(number) * factor)
    except ValueError:
        raise ConfigError(f"not a size: {text!r}; write bytes, or a number with KiB, MiB or GiB") from None
    _require(num_bytes > 0, f"a size must be positive, not {text!r}")
    return num_bytes


def _read_file(path: Path, names: set[str]) -> dict[str, Any]:
    import yaml  # only here: everything else of this module is standard library

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold keys and values")
    unknown = sorted(set(content) - names)
    if unknown:
        raise ConfigError(f"--config {path}: unknown {', '.join(map(str, unknown))}; known: {', '.join(sorted(names))}")
    return content


def _field_type(config_type: type[Config], name: str) -> type[int] | type[float] | type[str]:
    hint = typing.get_type_hints(config_type)[name]
    assert not isinstance(hint, types.UnionType) and hint in (int, float, str)
    return typing.cast("type[int] | type[float] | type[str]", hint)


def _convert(config_type: type[Config], name: str, text: str, origin: str) -> object:
    kind = _field_type(config_type, name)
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{origin}: {text!r} is not {'a number' if kind is float else 'a whole number'}") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
