"""Choose the Llama shape and the KV that fit a GPU. Pure: the memory is an argument."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import LlamaConfig

from benchmarks.gpu.shapes import Work, llama_1b, llama_3b, llama_8b

SHAPES: dict[str, Callable[[], LlamaConfig]] = {"8B": llama_8b, "3B": llama_3b, "1B": llama_1b}  # largest first
_SHARE = 0.94  # of a GPU; the rest is the driver's, and what lies between pieces
_STEP_BYTES = 3 << 30  # of a process beside weights and KV: context, a step's activations, graphs, workspaces


class NoRoom(Exception):
    """Raised when not even the smallest shape fits; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for each process. `why_smaller`: empty, or why the shape is not the 8B."""

    shape: str
    config: LlamaConfig
    kv_bytes: int
    why_smaller: str = ""

    @property
    def kv_tokens(self) -> int:
        return self.kv_bytes // Work.of(self.config).kv_bytes_per_token


def room(free_bytes: int, *, num_processes: int, least_kv_tokens: int, most_kv_bytes: int = 1 << 62) -> Room:
    """Return the largest shape that the given number of processes can load at once with the given KV each. Raises
    NoRoom."""
    each = int(_SHARE * free_bytes) // num_processes
    passed_over: list[str] = []
    for name, config_of in SHAPES.items():
        config = config_of()
        work = Work.of(config)
        kv_bytes = each - work.weight_bytes - _STEP_BYTES
        if kv_bytes >= least_kv_tokens * work.kv_bytes_per_token:
            return Room(name, config, min(kv_bytes, most_kv_bytes), "; ".join(passed_over))
        needed = work.weight_bytes + _STEP_BYTES + least_kv_tokens * work.kv_bytes_per_token
        times = f"{num_processes} x " if num_processes > 1 else ""
        passed_over.append(f"{name} takes {times}{needed / 1e9:.1f} GB of {free_bytes / 1e9:.1f} GB free")
    raise NoRoom("; ".join(passed_over))


def that_fit(sizes: Sequence[int], tokens_each: int, kv_tokens: int) -> tuple[int, ...]:
    """Return the batches whose contexts fit into KV of the given number of tokens."""
    return tuple(size for size in sizes if size * tokens_each <= kv_tokens)
