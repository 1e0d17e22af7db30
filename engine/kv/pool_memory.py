"""Takes the pool's memory, or says why there is not enough: at the start, not when the first block is written."""

import os
from pathlib import Path

import torch

from cluster.errors import ConfigError
from engine.kv.layout import BlockLayout
from engine.kv.pool import KvPool

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def take_pool(layout: BlockLayout, num_blocks: int, device: str, *, num_spare: int = 0) -> KvPool:
    """Raises ConfigError with both numbers."""
    num_bytes = (num_blocks + num_spare) * layout.block_bytes
    if device == "cpu" and num_bytes > (most := host_bytes()):
        # Its pages are taken as they are written: the system would end the process in the middle of its work.
        raise _too_large(num_blocks, num_bytes, f"this host has {most / (1 << 30):.2f} GiB")
    try:
        return KvPool(layout, num_blocks, device, num_spare=num_spare)
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise _too_large(num_blocks, num_bytes, f"the GPU has {free / (1 << 30):.2f} GiB free") from error


def host_bytes() -> int:
    """All that this process could ever have: of the machine, or what its control group allows."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _too_large(num_blocks: int, num_bytes: int, there_is: str) -> ConfigError:
    return ConfigError(
        f"a KV pool of {num_blocks} blocks takes {num_bytes / (1 << 30):.2f} GiB, and {there_is}: give less by "
        "--kv-cache-memory or --num-blocks, or --kv-cache-dtype int8"
    )
