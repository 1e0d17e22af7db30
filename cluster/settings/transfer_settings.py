"""The settings of how KV moves between workers, and of what is kept of it for prompts that begin alike. Pure."""

from dataclasses import dataclass

from cluster.settings.engine_settings import flag_of, parse_bytes, require, setting

MIN_LEASE_S = 0.02  # importers renew three times per lease: a shorter one would keep both sides busy with that alone
TRANSPORTS = ("cuda_ipc", "nccl", "nixl", "shm", "tcp")  # best first
READ_STALL_TIMEOUT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """How KV moves between workers."""

    kv_transports: str = setting(
        "auto", "transports that may be used, best first, comma-separated; auto: all that work here"
    )
    kv_verify: str = setting(
        "all", "blocks whose digest is verified after a hand-off", choices=("all", "sample", "off")
    )
    kv_wire_dtype: str = setting(
        "native", "what KV travels as; every worker's the same", choices=("native", "int8", "fp8", "int4")
    )
    prefix_caching: str = setting("on", "keep KV for prompts that begin alike", choices=("on", "off"))
    prefix_eviction: str = setting(
        "value", "which kept blocks go first: by value learnt from requests, or by last use", choices=("value", "lru")
    )
    prefix_host_memory: str = setting(
        "", "host memory of a prefill worker for prefixes that the pool has no room for, as 4GiB; empty: none"
    )
    prefix_disk: str = setting("", "folder for prefixes that host memory has no room for; empty: none")
    prefix_disk_space: str = setting("16GiB", "most that they may take in --prefix-disk")
    lease_s: float = setting(5.0, "an exporter keeps a ticket's blocks so long after the importer's last renewal")
    max_lease_s: float = setting(120.0, "no renewal extends a lease beyond this")
    attach_timeout_s: float = setting(
        60.0, "a ticket nobody attached to is dropped after this, counted from its first block"
    )
    read_timeout_s: float = setting(30.0, "an importer gives up a single read after this")
    read_stall_timeout_s: float = setting(
        READ_STALL_TIMEOUT_S, "a read over TCP that has received nothing for this long fails"
    )
    quarantine_s: float = setting(
        10.0, "a dead read's channel is destroyed after this, if the read has not ended by itself"
    )
    watermark: float = setting(0.05, "share of a decode pool that imports leave free for running sequences")

    def __post_init__(self) -> None:
        unknown = sorted(set(self.forced_transports) - set(TRANSPORTS))
        require(self.kv_transports.strip(" ,") != "", f"--kv-transports names none; known: {', '.join(TRANSPORTS)}")
        require(not unknown, f"--kv-transports: unknown {', '.join(unknown)}; known: {', '.join(TRANSPORTS)}")
        require(
            MIN_LEASE_S <= self.lease_s <= self.max_lease_s,
            f"--lease-s must be at least {MIN_LEASE_S} and at most --max-lease-s",
        )
        require(
            not self.prefix_disk or bool(self.prefix_host_memory),
            "--prefix-disk needs --prefix-host-memory: blocks come to disk through it",
        )
        parse_bytes(self.prefix_disk_space)
        _ = self.prefix_host_bytes
        for name in ("attach_timeout_s", "read_timeout_s", "read_stall_timeout_s", "quarantine_s"):
            require(getattr(self, name) > 0, f"{flag_of(name)} must be positive, not {getattr(self, name)}")
        require(0 <= self.watermark < 1, f"--watermark must be in [0, 1), not {self.watermark}")

    @property
    def prefix_host_bytes(self) -> int:
        return parse_bytes(self.prefix_host_memory) if self.prefix_host_memory else 0

    @property
    def forced_transports(self) -> tuple[str, ...]:
        """As they were named; none: whatever works here (kvtransfer.transports.available)."""
        if self.kv_transports.strip() == "auto":
            return ()
        return tuple(name.strip() for name in self.kv_transports.split(",") if name.strip())


def require_one_quantisation(kv_cache_dtype: str, kv_wire_dtype: str) -> None:
    """Raises ConfigError."""
    require(
        kv_cache_dtype == "auto" or kv_wire_dtype == "native",
        f"--kv-wire-dtype {kv_wire_dtype} cannot go with --kv-cache-dtype {kv_cache_dtype}: KV of 8 bits travels as it"
        " is; leave --kv-wire-dtype native",
    )


def require_exact_wire(deterministic: str, kv_wire_dtype: str) -> None:
    """Raises ConfigError."""
    require(
        deterministic == "off" or kv_wire_dtype == "native",
        f"--deterministic on cannot go with --kv-wire-dtype {kv_wire_dtype}: KV would change on its way",
    )
