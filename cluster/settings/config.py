"""Every setting of every process: frozen and validated once.

Where they come from: cluster/settings/config_sources.py. Pure.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from cluster.settings.engine_settings import EngineSettings, flag_of, require, require_lengths, setting
from cluster.settings.transfer_settings import TransferSettings, require_exact_wire, require_one_quantisation

CLIENT_STALL_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What every process of a cluster needs to find and trust the others."""

    redis: str = setting(
        "",
        "URL of the Redis that holds the registry: redis://host:port/db, or redis+sentinel://, redis+cluster://, unix://;"
        " `tandem up` starts one of its own without it",
    )
    cluster_name: str = setting("tandem", "prefix of every key in Redis; members of one name form one cluster")
    cluster_key_file: str = setting("", "file with the key that signs tickets; made at first start where missing")
    host: str = setting("127.0.0.1", "address to bind to")
    advertise_host: str = setting("", "address under which others reach this process; default: --host")
    member_id: str = setting("", "name of this member; default: role and a random suffix")
    member_lease_s: float = setting(5.0, "a member that does not renew for so long gets no new work")
    drain_grace_s: float = setting(30.0, "how long a drained process may take to finish its work")
    health_port: int = setting(0, "port of health answers that need no event loop and no TLS; 0: a free one")
    loop_timeout_s: float = setting(30.0, "a process whose event loop stands still for so long is not alive")
    stuck_exit_s: float = setting(60.0, "a process that is stuck for so long after that ends, with status 6")
    tls_cert: str = setting("", "PEM file with this process's certificate chain; with --tls-key and --tls-ca: mTLS")
    tls_key: str = setting("", "PEM file with the key of --tls-cert")
    tls_ca: str = setting("", "PEM file with the authorities whose certificates members must have")
    log_level: str = setting("info", "least severe that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "form of a line of the log", choices=("text", "json"))

    def __post_init__(self) -> None:
        require(self.member_lease_s > 0, f"--member-lease-s must be positive, not {self.member_lease_s}")
        require(self.drain_grace_s >= 0, f"--drain-grace-s must not be negative, not {self.drain_grace_s}")
        require(0 <= self.health_port < 1 << 16, f"--health-port must be from 0 to 65535, not {self.health_port}")
        for name in ("loop_timeout_s", "stuck_exit_s"):
            require(getattr(self, name) > 0, f"{flag_of(name)} must be positive, not {getattr(self, name)}")
        require("@" not in self.member_id, f"--member-id must not contain '@': {self.member_id!r}")
        require(bool(self.cluster_name), "--cluster-name must not be empty")
        require(
            len({bool(self.tls_cert), bool(self.tls_key), bool(self.tls_ca)}) == 1,
            "--tls-cert, --tls-key and --tls-ca belong together: give all three or none",
        )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ClusterSettings, EngineSettings, TransferSettings):
    """A prefill or decode worker."""

    port: int = setting(0, "gRPC port; 0: a free one")
    heartbeat_s: float = setting(1.0, "time between two heartbeats to each router")
    canary_interval_s: float = setting(0.0, "an idle worker tries a few tokens of its own after so long; 0: never")
    stream_grace_s: float = setting(2.0, "a router whose stream broke may come back for so long")

    def __post_init__(self) -> None:
        ClusterSettings.__post_init__(self)
        EngineSettings.__post_init__(self)
        TransferSettings.__post_init__(self)
        require_one_quantisation(self.kv_cache_dtype, self.kv_wire_dtype)
        require_exact_wire(self.deterministic, self.kv_wire_dtype)
        require(bool(self.model), "--model is needed: a local folder or a hub name")
        _require_port("port", self.port)
        require(self.canary_interval_s >= 0, f"--canary-interval-s must not be negative, not {self.canary_interval_s}")
        require(
            0 < self.heartbeat_s <= self.member_lease_s / 2,
            f"--heartbeat-s must be positive and at most half of --member-lease-s, {self.member_lease_s:g} s, not"
            f" {self.heartbeat_s:g}: a router that hears nothing for a lease gives a worker up",
        )


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ClusterSettings):
    """A router."""

    model: str = setting("", "local folder or hub name of the model; only its tokenizer and configuration are read")
    served_model_name: str = setting("", "name that clients use; default: last part of --model")
    port: int = setting(8000, "HTTP port; 0: a free one")
    grpc_port: int = setting(50051, "gRPC port; 0: a free one")
    api_key: str = setting("", "clients must send it as a bearer token; empty: none is asked for")
    placement: str = setting(
        "prefix-aware", "how workers are chosen", choices=("prefix-aware", "least-loaded", "round-robin")
    )
    max_model_len: int = setting(0, "most tokens of prompt and continuation; 0: the model's own limit")
    max_input_length: int = setting(0, "most tokens of a prompt; 0: what --max-model-len leaves")
    max_output_length: int = setting(0, "most tokens of a continuation; 0: what --max-model-len leaves")
    max_live_requests: int = setting(1024, "requests served at once; one more is refused")
    max_buffered_tokens: int = setting(
        1_000_000, "tokens kept for clients; past it those that stopped reading are ended"
    )
    client_stall_s: float = setting(CLIENT_STALL_S, "a client that takes nothing of its answer for so long is given up")
    max_message_bytes: int = setting(4 * 1024 * 1024, "largest request taken")
    request_timeout_s: float = setting(600.0, "deadline of a request that brings none")
    max_attempts: int = setting(3, "tries at each leg of a request")
    stream_grace_s: float = setting(2.0, "a worker whose stream broke may come back for so long")
    breaker_failures: int = setting(
        3, "hand-offs in a row that fail until two workers are not paired; 0: always paired"
    )
    breaker_max_pause_s: float = setting(30.0, "longest time until two workers that were not paired are tried again")

    def __post_init__(self) -> None:
        ClusterSettings.__post_init__(self)
        require(bool(self.model), "--model is needed: a local folder or a hub name")
        _require_port("port", self.port)
        _require_port("grpc_port", self.grpc_port)
        for name in ("max_attempts", "max_live_requests", "max_buffered_tokens", "max_message_bytes"):
            require(getattr(self, name) >= 1, f"{flag_of(name)} must be at least 1, not {getattr(self, name)}")
        require_lengths(self.max_model_len, self.max_input_length, self.max_output_length)
        require(self.client_stall_s > 0, f"--client-stall-s must be positive, not {self.client_stall_s}")
        require(self.request_timeout_s > 0, f"--request-timeout-s must be positive, not {self.request_timeout_s}")
        require(self.stream_grace_s >= 0, f"--stream-grace-s must not be negative, not {self.stream_grace_s}")
        require(self.breaker_failures >= 0, f"--breaker-failures must not be negative, not {self.breaker_failures}")
        require(self.breaker_max_pause_s > 0, f"--breaker-max-pause-s must be positive, not {self.breaker_max_pause_s}")

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model.rstrip("/")).name


def echo(config: WorkerConfig | RouterConfig) -> str:
    """One line with every setting that differs from its default; secrets are not shown."""
    shown = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if value != item.default:
            shown.append(f"{item.name}={_shown(item.name, value)}")
    return " ".join(shown)


def _shown(name: str, value: object) -> object:
    if name == "redis":  # user and password before the host, and what may stand behind a question mark
        return re.sub(r"\?.*", "?***", re.sub(r"//.*@", "//***@", str(value)))
    return "***" if name == "api_key" else value


def _require_port(name: str, port: int) -> None:
    require(0 <= port < 1 << 16, f"{flag_of(name)} must be from 0 to 65535, not {port}")
