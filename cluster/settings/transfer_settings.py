"""The settings of KV transfer between workers, of the prefix cache and of its tiers. Pure."""

from dataclasses import dataclass

from cluster.settings.engine_settings import flag_of, parse_bytes, require, setting

MIN_LEASE_S = 0.02  # importers renew three times per lease; a shorter lease would mean renewals only
TRANSPORTS = ("cuda_ipc", "nccl", "nixl", "shm", "tcp")  # best first
READ_STALL_TIMEOUT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """KV transfer between workers, the prefix cache and its tiers."""

    kv_transports: str = setting(
        "auto", "allowed transports, best first, comma-separated; auto: all that work on this host"
    )
    kv_verify: str = setting(
        "all",
        "which blocks of a hand-off are compared with their digests; keyed: all of them, so that forgeries are found",
        choices=("all", "keyed", "sample", "off"),
    )
    kv_wire_dtype: str = setting(
        "native",
        "dtype of KV on the wire; equal for all workers of a cluster",
        choices=("native", "int8", "fp8", "int4"),
    )
    prefix_caching: str = setting("on", "reuse KV for prompts with an equal prefix", choices=("on", "off"))
    prefix_eviction: str = setting(
        "value",
        "order of eviction: lowest estimated value first, or least recently used first",
        choices=("value", "lru"),
    )
    prefix_host_memory: str = setting(
        "", "host memory in which a prefill worker keeps blocks that its pool evicts, such as 4GiB; empty: none"
    )
    prefix_disk: str = setting("", "folder for blocks that --prefix-host-memory has no room for; empty: none")
    prefix_disk_space: str = setting("16GiB", "maximum size of the files in --prefix-disk")
    lease_s: float = setting(5.0, "seconds for which an exporter keeps a ticket's blocks after a renewal")
    max_lease_s: float = setting(120.0, "maximum duration of a lease in seconds, renewals included")
    attach_timeout_s: float = setting(60.0, "seconds after its first block until a ticket without an importer expires")
    read_timeout_s: float = setting(30.0, "timeout of a single read of an importer, in seconds")
    read_stall_timeout_s: float = setting(
        READ_STALL_TIMEOUT_S, "seconds without data after which a read over TCP fails"
    )
    quarantine_s: float = setting(10.0, "seconds until the channel of a timed-out read that has not ended is destroyed")
    watermark: float = setting(0.05, "share of a decode pool that imports leave free for running sequences")

    def __post_init__(self) -> None:
        unknown = sorted(set(self.forced_transports) - set(TRANSPORTS))
        require(
            self.kv_transports.strip(" ,") != "", f"--kv-transports must not be empty; known: {', '.join(TRANSPORTS)}"
        )
        require(not unknown, f"--kv-transports: unknown {', '.join(unknown)}; known: {', '.join(TRANSPORTS)}")
        require(
            MIN_LEASE_S <= self.lease_s <= self.max_lease_s,
            f"--lease-s must be at least {MIN_LEASE_S} and at most --max-lease-s ({self.max_lease_s:g}),"
            f" not {self.lease_s:g}",
        )
        require(
            not self.prefix_disk or bool(self.prefix_host_memory),
            "--prefix-disk needs --prefix-host-memory: blocks reach the disk through it",
        )
        parse_bytes(self.prefix_disk_space, "--prefix-disk-space")
        _ = self.prefix_host_bytes
        for name in ("attach_timeout_s", "read_timeout_s", "read_stall_timeout_s", "quarantine_s"):
            require(getattr(self, name) > 0, f"{flag_of(name)} must be positive, not {getattr(self, name)}")
        require(0 <= self.watermark < 1, f"--watermark must be in [0, 1), not {self.watermark}")

    @property
    def prefix_host_bytes(self) -> int:
        if not self.prefix_host_memory:
            return 0
        return parse_bytes(self.prefix_host_memory, "--prefix-host-memory", otherwise="empty for none")

    @property
    def forced_transports(self) -> tuple[str, ...]:
        """The transports named by --kv-transports. Empty with auto: all that work on this host are used."""
        if self.kv_transports.strip() == "auto":
            return ()
        return tuple(name.strip() for name in self.kv_transports.split(",") if name.strip())


def require_one_quantisation(kv_cache_dtype: str, kv_wire_dtype: str) -> None:
    """Refuse 8-bit KV in the pool together with quantised KV on the wire. Raises ConfigError."""
    require(
        kv_cache_dtype == "auto" or kv_wire_dtype == "native",
        f"--kv-wire-dtype {kv_wire_dtype} cannot go with --kv-cache-dtype {kv_cache_dtype}: 8-bit KV is sent"
        " unchanged; use --kv-wire-dtype native",
    )


def require_exact_wire(deterministic: str, kv_wire_dtype: str) -> None:
    """Refuse quantised KV on the wire in deterministic mode. Raises ConfigError."""
    require(
        deterministic == "off" or kv_wire_dtype == "native",
        f"--deterministic on cannot go with --kv-wire-dtype {kv_wire_dtype}: KV would change on the wire",
    )
