"""The settings of workers: the model, its memory and its steps, KV transfer, the prefix cache and its tiers. Also the
functions that all groups of settings use. Pure.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
GPU_MEMORY_UTILIZATION = 0.9
# Of engine/scheduling/policies.py.
PRIORITY_POLICY = "priority"  # the only one that reads a request's priority
SCHEDULING_POLICIES = ("fcfs", "shortest", "mlfq", "deadline", PRIORITY_POLICY)
MIN_LEASE_S = 0.02  # importers renew three times per lease; a shorter lease would mean renewals only
TRANSPORTS = ("cuda_ipc", "nccl", "nixl", "shm", "tcp")  # best first
READ_STALL_TIMEOUT_S = 3.0


def setting(default: Any, text: str, *, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The model, its memory and its steps."""

    model: str = setting("", "local folder or hub name of the model")
    revision: str = setting("", "commit, branch or tag of a hub name; pin a commit, because its files never change")
    trust_remote_code: str = setting(
        "off",
        "run Python code that comes with the model; otherwise such a model is refused",
        choices=("on", "off"),
    )
    served_model_name: str = setting("", "name that clients use; default: last part of --model")
    load_format: str = setting(
        "auto", "auto: read the weights; dummy: random weights, from the configuration alone", choices=("auto", "dummy")
    )
    dtype: str = setting("auto", "dtype of the computation; auto: the checkpoint's", choices=DTYPES)
    kv_cache_dtype: str = setting(
        "auto", "dtype of the KV in the pool; auto: --dtype; fp8: e4m3", choices=KV_CACHE_DTYPES
    )
    device: str = setting("auto", "cpu, cuda, cuda:N; auto: cuda if there is a GPU")
    block_size: int = setting(16, "tokens per KV block")
    num_blocks: int = setting(0, "blocks in the pool; 0: from --kv-cache-memory")
    kv_cache_memory: str = setting(
        "auto",
        "memory of the pool and its wire copy: bytes, or KiB, MiB, GiB; auto: 256MiB on a CPU, measured on a GPU",
    )
    gpu_memory_utilization: float = setting(
        GPU_MEMORY_UTILIZATION,
        "share of the GPU's memory that its workers may use together, in equal parts; the pool gets what the model "
        "leaves",
    )
    local_rank: int = setting(
        0,
        "with --device auto or cuda: index among this host's workers, which share its GPUs; set by tandem up",
    )
    local_world_size: int = setting(1, "number of this host's workers, which share its GPUs; set by tandem up")
    max_model_len: int = setting(0, "maximum tokens of prompt plus output; 0: the model's limit")
    max_input_length: int = setting(0, "maximum tokens of a prompt; 0: only --max-model-len applies")
    max_output_length: int = setting(0, "maximum output tokens; 0: only --max-model-len applies")
    swap_space: str = setting("1GiB", "host memory for KV of preempted sequences: bytes, or KiB, MiB, GiB; 0: none")
    max_num_seqs: int = setting(64, "maximum sequences in one step")
    max_prefill_tokens: int = setting(512, "maximum prompt tokens in one step: the size of a chunk")
    max_queue: int = setting(256, "maximum requests waiting in a worker; further ones are refused")
    scheduling_policy: str = setting(
        "fcfs", "order in which a worker serves waiting requests", choices=SCHEDULING_POLICIES
    )
    attention_backend: str = setting(
        "auto",
        "attention back end",
        choices=("auto", "sdpa", "triton", "flashinfer", "varlen", "gather"),
    )
    pack_weights: str = setting(
        "auto", "at load, rearrange bfloat16 weights for this CPU's matrix units", choices=("auto", "off")
    )
    cpu_kernels: str = setting(
        "auto",
        "compiled kernels for bfloat16 on CPUs; on: also where auto does not select them",
        choices=("auto", "on", "off"),
    )
    cuda_graphs: str = setting(
        "auto", "replay decode steps from CUDA graphs if the model can be captured", choices=("auto", "off")
    )
    async_scheduling: str = setting(
        "on", "on a GPU, plan and launch the next step while one runs", choices=("on", "off")
    )
    num_threads: int = setting(0, "threads of the model's computation; 0: one on CPU")
    speculation: str = setting(
        "off", "draft tokens: from the sequence itself, or from a draft model", choices=("off", "prompt", "draft")
    )
    draft_model: str = setting("", "local folder or hub name of the draft model, with --speculation draft")
    num_draft_tokens: int = setting(4, "maximum draft tokens per sequence and step; fewer if few are accepted")
    step_timeout_s: float = setting(
        60.0, "seconds after which a step makes its worker unhealthy; five times for the first"
    )
    deterministic: str = setting(
        "off", "tokens do not depend on batch, chunking or worker; slower", choices=("off", "on")
    )

    def __post_init__(self) -> None:
        require(self.block_size >= 1, f"--block-size must be at least 1, not {self.block_size}")
        require(self.num_blocks >= 0, f"--num-blocks must not be negative, not {self.num_blocks}")
        require(self.max_num_seqs >= 1, f"--max-num-seqs must be at least 1, not {self.max_num_seqs}")
        require(self.max_prefill_tokens >= 1, f"--max-prefill-tokens must be at least 1, not {self.max_prefill_tokens}")
        require(self.max_queue >= 1, f"--max-queue must be at least 1, not {self.max_queue}")
        require_lengths(self.max_model_len, self.max_input_length, self.max_output_length)
        require(self.num_threads >= 0, f"--num-threads must not be negative, not {self.num_threads}")
        require(
            0 < self.gpu_memory_utilization <= 1,
            f"--gpu-memory-utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}",
        )
        require(
            self.local_rank >= 0 and self.local_world_size >= 1,
            f"--local-rank must be at least 0 and --local-world-size at least 1, not {self.local_rank} and"
            f" {self.local_world_size}",
        )
        if self.kv_cache_memory != "auto":
            parse_bytes(self.kv_cache_memory, "--kv-cache-memory", otherwise="auto")
        _ = self.swap_bytes  # raises ConfigError
        require(self.step_timeout_s > 0, f"--step-timeout-s must be positive, not {self.step_timeout_s}")
        require(self.num_draft_tokens >= 1, f"--num-draft-tokens must be at least 1, not {self.num_draft_tokens}")
        drafts = self.speculation == "draft"
        require(
            bool(self.draft_model) == drafts,
            "--speculation draft needs --draft-model, and --draft-model needs --speculation draft",
        )

    @property
    def swap_bytes(self) -> int:
        is_off = self.swap_space.strip() == "0"
        return 0 if is_off else parse_bytes(self.swap_space, "--swap-space", otherwise="0 for none")

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model.rstrip("/")).name


def parse_bytes(text: str, flag: str = "a size", *, otherwise: str = "") -> int:
    """Convert '1048576', '512KiB', '256MiB' or '2GiB' to bytes, at least 1. `flag` begins the message of an error,
    which also names `otherwise`, what the setting may be instead of a size. Raises ConfigError."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        num_bytes = int(float(text.removesuffix(unit)) * units.get(unit, 1))
    except (ValueError, OverflowError):
        num_bytes = 0
    wanted = "a positive number of bytes, or of KiB, MiB or GiB" + (f", or {otherwise}" if otherwise else "")
    require(num_bytes > 0, f"{flag} must be {wanted}, not {text!r}")
    return num_bytes


def require_lengths(max_model_len: int, max_input_length: int, max_output_length: int) -> None:
    """Check the length limits; 0 means no limit. Raises ConfigError."""
    lengths = {
        "--max-model-len": max_model_len,
        "--max-input-length": max_input_length,
        "--max-output-length": max_output_length,
    }
    for flag, length in lengths.items():
        require(length >= 0, f"{flag} must not be negative, not {length}")
        require(
            not max_model_len or length <= max_model_len,
            f"{flag} {length} is more than the {max_model_len} tokens of --max-model-len",
        )


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


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
