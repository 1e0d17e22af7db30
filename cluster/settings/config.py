"""Every setting of every process: frozen and validated once.

cluster/settings/config_sources.py reads them from flags, environment and file. Pure.
"""

import dataclasses
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from cluster.settings.worker_settings import (
    EngineSettings,
    TransferSettings,
    flag_of,
    require,
    require_exact_wire,
    require_lengths,
    require_one_quantisation,
    setting,
)

CLIENT_STALL_S = 60.0
_LOOPBACK = "127.0.0.1"
SECRETS = frozenset({"api_key", "admin_key"})  # names of settings that are shown nowhere


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The settings with which every process of a cluster finds and authenticates the others."""

    redis: str = setting(
        "",
        "URL of the Redis that holds the registry: redis://host:port/db, or redis+sentinel://, redis+cluster://, unix://;"
        " without it, `tandem up` starts its own",
    )
    cluster_name: str = setting("tandem", "prefix of every key in Redis; members with the same name form one cluster")
    cluster_key_file: str = setting("", "file with the cluster's secret; created at the first start if it is missing")
    host: str = setting("127.0.0.1", "address to bind to")
    advertise_host: str = setting("", "address at which other members reach this process; default: --host")
    member_id: str = setting("", "name of this member; default: role and a random suffix")
    registration_ttl_s: float = setting(5.0, "seconds without a renewal after which a member gets no new work")
    drain_grace_s: float = setting(30.0, "seconds in which a draining process may finish its work")
    health_port: int = setting(0, "port of the health check that needs no event loop and no TLS; 0: a free port")
    metrics_port: int = setting(0, "HTTP port of /metrics, for Prometheus; 0: a free port")
    metrics_key_file: str = setting(
        "", "file with a bearer token that allows /metrics; without any key its port is bound to 127.0.0.1"
    )
    otlp_endpoint: str = setting(
        "",
        "URL of an OpenTelemetry receiver (OTLP over HTTP) for spans: http://host:4318; empty: none. Routers send those"
        " of requests, decode workers those of the steps of sampled requests",
    )
    audit_file: str = setting(
        "", "file to which a line of JSON is added for each call of an operator and refused members; empty: the log"
    )
    insecure: str = setting("off", "start even if other hosts reach a port without a key", choices=("on", "off"))
    loop_timeout_s: float = setting(30.0, "seconds until a process with a blocked event loop fails its health check")
    stuck_exit_s: float = setting(60.0, "seconds after that until a stuck process exits with status 6")
    tls_cert: str = setting(
        "", "PEM file with this process's certificate chain; with --tls-key and --tls-ca it turns on mTLS"
    )
    tls_key: str = setting("", "PEM file with the private key of --tls-cert")
    tls_ca: str = setting("", "PEM file with the certificate authorities that sign members' certificates")
    tls_server_name: str = setting(
        "", "DNS name that every member's certificate has; callers verify it instead of the address that they dial"
    )
    log_level: str = setting("info", "least severe level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "format of log lines", choices=("text", "json"))

    def __post_init__(self) -> None:
        require(self.registration_ttl_s > 0, f"--registration-ttl-s must be positive, not {self.registration_ttl_s}")
        require(self.drain_grace_s >= 0, f"--drain-grace-s must not be negative, not {self.drain_grace_s}")
        _require_port("health_port", self.health_port)
        _require_port("metrics_port", self.metrics_port)
        for name in ("loop_timeout_s", "stuck_exit_s"):
            require(getattr(self, name) > 0, f"{flag_of(name)} must be positive, not {getattr(self, name)}")
        require(
            not self.otlp_endpoint or self.otlp_endpoint.startswith(("http://", "https://")),
            f"--otlp-endpoint must begin with http:// or https://, not {self.otlp_endpoint!r}",
        )
        require("@" not in self.member_id, f"--member-id must not contain '@': {self.member_id!r}")
        require(bool(self.cluster_name), "--cluster-name must not be empty")
        require(
            len({bool(self.tls_cert), bool(self.tls_key), bool(self.tls_ca)}) == 1,
            "--tls-cert, --tls-key and --tls-ca belong together: give all three or none",
        )
        require(bool(self.tls_cert) or not self.tls_server_name, "--tls-server-name needs --tls-cert")

    @property
    def is_open(self) -> bool:
        """Return whether a port that is bound to `host` would serve clients or scrapes of other hosts without a key."""
        return not (is_loopback(self.host) or self.metrics_key_file)

    @property
    def is_insecure(self) -> bool:
        """Return whether other hosts reach a port without a key, as --insecure allows."""
        return self.is_open and self.insecure == "on"

    @property
    def metrics_host(self) -> str:
        """The address to which the metrics port is bound."""
        return _LOOPBACK if self.is_open and not self.is_insecure else self.host


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ClusterSettings, EngineSettings, TransferSettings):
    """The settings of a worker of either role."""

    port: int = setting(0, "gRPC port; 0: a free port")
    slo_tpot_ms: float = setting(
        0.0,
        "target in milliseconds for a step with running sequences, to which prompts beside them are limited; 0: 1.5"
        " times the same step without prompts",
    )
    heartbeat_s: float = setting(1.0, "seconds between two heartbeats to each router")
    metric_aliases: str = setting(
        "none", "publish some metrics under the names of another server too", choices=("none", "vllm")
    )
    canary_interval_s: float = setting(0.0, "seconds until an idle worker runs a test generation; 0: never")
    stream_grace_s: float = setting(2.0, "seconds in which a router whose stream broke may reconnect")

    def __post_init__(self) -> None:
        ClusterSettings.__post_init__(self)
        EngineSettings.__post_init__(self)
        TransferSettings.__post_init__(self)
        require_one_quantisation(self.kv_cache_dtype, self.kv_wire_dtype)
        require_exact_wire(self.deterministic, self.kv_wire_dtype)
        require(bool(self.model), "--model is needed: a local folder or a hub name")
        _require_port("port", self.port)
        require(
            not self.metrics_port or self.is_insecure or not self.is_open,
            f"other hosts reach --metrics-port {self.metrics_port} of --host {self.host} without a key: give"
            " --metrics-key-file, or leave out --metrics-port, and a free port of 127.0.0.1 serves metrics"
            " (--insecure on starts it nevertheless)",
        )
        require(self.canary_interval_s >= 0, f"--canary-interval-s must not be negative, not {self.canary_interval_s}")
        require(self.stream_grace_s >= 0, f"--stream-grace-s must not be negative, not {self.stream_grace_s}")
        _require_no_negative(self, "slo_tpot_ms")
        require(
            0 < self.heartbeat_s <= self.registration_ttl_s / 2,
            f"--heartbeat-s must be positive and at most half of --registration-ttl-s ({self.registration_ttl_s:g} s),"
            f" not {self.heartbeat_s:g}: a router treats a worker without a heartbeat for one TTL as lost",
        )


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ClusterSettings):
    """The settings of a router."""

    model: str = setting("", "local folder or hub name of the model; only its tokenizer and configuration are read")
    revision: str = setting("", "commit, branch or tag of a hub name; pin a commit, because its files never change")
    served_model_name: str = setting("", "name that clients use; default: last part of --model")
    port: int = setting(8000, "HTTP port; 0: a free port")
    share_port: str = setting(
        "off",
        "several routers on this machine may serve --port; the kernel distributes connections",
        choices=("on", "off"),
    )
    grpc_port: int = setting(50051, "gRPC port; 0: a free port")
    api_key: str = setting("", "bearer token that allows inference; better given in the environment or in a file")
    api_key_file: str = setting("", "file with the token of --api-key")
    admin_key: str = setting(
        "", "bearer token that allows everything, such as the commands of operators; better given in the environment"
    )
    admin_key_file: str = setting("", "file with the token of --admin-key")
    keys: str = setting("", "where API keys of tenants are kept: redis, or a file; empty: there are none")
    allowed_origins: str = setting(
        "", "origins, separated by commas, whose pages may use the HTTP API from browsers (CORS); *: all"
    )
    tool_call_parser: str = setting("", "format of the model's tool calls, such as hermes; empty: no tools")
    reasoning_parser: str = setting("", "format of the model's reasoning, such as qwen3; empty: it is content")
    trust_request_chat_template: str = setting(
        "off", "requests may bring their own chat_template", choices=("on", "off")
    )
    placement: str = setting(
        "prefix-aware",
        "policy that chooses workers; auto chooses by predicted latencies",
        choices=("auto", "prefix-aware", "least-loaded", "round-robin"),
    )
    slo_ttft_ms: float = setting(
        0.0, "target for the time to first token in milliseconds, for --placement auto; 0: none"
    )
    slo_tpot_ms: float = setting(
        0.0, "target for the mean time per later token in milliseconds, for --placement auto; 0: none"
    )
    explore: float = setting(
        0.0,
        "share of requests, at most 0.5, that --placement auto sends to the second-best candidate, to measure"
        " whether disaggregation is worth it; never where a latency target would be missed",
    )
    trace_sample_ratio: float = setting(
        0.01, "share of ordinary requests whose spans are sent; failed, retried and slow ones always are"
    )
    trace_slow_s: float = setting(
        10.0, "time to first token in seconds above which a request counts as slow, as one that misses a target does"
    )
    max_model_len: int = setting(0, "maximum tokens of prompt plus output; 0: the model's limit")
    max_input_length: int = setting(0, "maximum tokens of a prompt; 0: only --max-model-len applies")
    max_output_length: int = setting(0, "maximum output tokens; 0: only --max-model-len applies")
    max_live_requests: int = setting(1024, "maximum requests at once; further ones are refused")
    max_buffered_tokens: int = setting(
        1_000_000,
        "maximum tokens buffered for clients; above it the router cancels the requests of the slowest readers",
    )
    client_stall_s: float = setting(
        CLIENT_STALL_S, "seconds until a client that reads nothing of its response is disconnected"
    )
    max_connection_age_s: float = setting(
        1800.0,
        "seconds until a client's gRPC connection takes no further call, so that clients find new routers behind a load"
        " balancer; calls in progress go on; 0: unlimited",
    )
    max_message_bytes: int = setting(4 * 1024 * 1024, "maximum size of a request in bytes")
    request_timeout_s: float = setting(600.0, "timeout in seconds of a request that sets none")
    max_attempts: int = setting(3, "maximum attempts at each leg of a request")
    stream_grace_s: float = setting(2.0, "seconds in which a worker whose stream broke may reconnect")
    breaker_failures: int = setting(3, "consecutive failed hand-offs that open a pair's circuit breaker; 0: no breaker")
    breaker_max_pause_s: float = setting(30.0, "maximum seconds until an open breaker lets a trial hand-off through")

    def __post_init__(self) -> None:
        ClusterSettings.__post_init__(self)
        require(bool(self.model), "--model is needed: a local folder or a hub name")
        _require_port("port", self.port)
        _require_port("grpc_port", self.grpc_port)
        for name in ("max_attempts", "max_live_requests", "max_buffered_tokens", "max_message_bytes"):
            require(getattr(self, name) >= 1, f"{flag_of(name)} must be at least 1, not {getattr(self, name)}")
        require(
            self.is_insecure or not self.is_open,
            f"clients of other hosts reach --host {self.host} without a key: give --api-key-file or --keys, or bind to"
            f" {_LOOPBACK} (--insecure on starts it nevertheless)",
        )
        require_lengths(self.max_model_len, self.max_input_length, self.max_output_length)
        _require_no_negative(self, "slo_ttft_ms", "slo_tpot_ms", "max_connection_age_s", "trace_slow_s")
        require(
            0 <= self.trace_sample_ratio <= 1, f"--trace-sample-ratio must be from 0 to 1: {self.trace_sample_ratio:g}"
        )
        require(0 <= self.explore <= 0.5, f"--explore must be from 0 to 0.5, not {self.explore:g}")
        require(
            not self.explore or self.placement == "auto",
            f"--explore needs --placement auto, not {self.placement}: only predictions name a second-best candidate",
        )
        require(self.client_stall_s > 0, f"--client-stall-s must be positive, not {self.client_stall_s}")
        require(self.request_timeout_s > 0, f"--request-timeout-s must be positive, not {self.request_timeout_s}")
        require(self.stream_grace_s >= 0, f"--stream-grace-s must not be negative, not {self.stream_grace_s}")
        require(self.breaker_failures >= 0, f"--breaker-failures must not be negative, not {self.breaker_failures}")
        require(self.breaker_max_pause_s > 0, f"--breaker-max-pause-s must be positive, not {self.breaker_max_pause_s}")

    @property
    def is_open(self) -> bool:
        """Return whether clients of other hosts would be served without a key."""
        return not (is_loopback(self.host) or self.api_key or self.api_key_file or self.keys)

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model.rstrip("/")).name


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ports that are bound to `host`. A name counts as reachable."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def echo(config: WorkerConfig | RouterConfig) -> str:
    """Return one line with every setting that differs from its default; secrets are not shown."""
    shown = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if value != item.default:
            shown.append(f"{item.name}={_shown(item.name, value)}")
    return " ".join(shown)


def _shown(name: str, value: object) -> object:
    if name == "redis":  # hide the user and password before the host, and the options after a question mark
        return re.sub(r"\?.*", "?***", re.sub(r"//.*@", "//***@", str(value)))
    return "***" if name in SECRETS else value


def _require_no_negative(config: WorkerConfig | RouterConfig, *names: str) -> None:
    for name in names:
        require(getattr(config, name) >= 0, f"{flag_of(name)} must not be negative, not {getattr(config, name):g}")


def _require_port(name: str, port: int) -> None:
    require(0 <= port < 1 << 16, f"{flag_of(name)} must be from 0 to 65535, not {port}")
