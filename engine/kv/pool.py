"""The KV memory of one worker: one allocation. Owns the bytes; never decides who uses which block.

On CPU the pool is a sealed memfd that is mapped shared, so that another process on the host can receive the file
descriptor and read blocks in place, and do nothing else. On CUDA its pages are exported as a file for the same purpose
if the driver supports that; otherwise the pool is an ordinary tensor.
"""

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from cluster.errors import ConfigError
from cluster.shared_memory import allocate_sealed
from engine.kv.cuda_memory import CudaMemory, NotExportable
from engine.kv.layout import BlockLayout, LayerPlace
from engine.scheduling.step import BlockCopy
from engine.staging import to_device

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_QUANTISED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_SCALE_DTYPE = torch.bfloat16
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class KvPool:
    """The KV memory. `tensor` is `[num_blocks, block_elems]` in the KV dtype, and `raw` the same bytes as `[num_blocks,
    block_bytes]`; in a pool of 8 bits `tensor` holds these bytes as well.

    The pool is zero at the start. It is not thread-safe: the step thread writes to it, and an importer writes to the
    blocks that were reserved for it. `num_spare` more blocks follow the last one, for steps to write data that is never
    read: only `layers` and `scales` reach them.
    """

    def __init__(
        self, layout: BlockLayout, num_blocks: int, device: torch.device | str = "cpu", *, num_spare: int = 0
    ) -> None:
        assert num_blocks >= 1
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.device = torch.device(device)
        self.memfd: int | None = None
        self.cuda_file: int | None = None
        self._closers: list[weakref.finalize[[int], KvPool]] = []  # closes its files once, in `close` or when collected
        self.cuda_file_bytes = 0
        self.why_no_cuda_file = "the pool is not on a GPU"
        self._num_spare = num_spare
        num_bytes = (num_blocks + num_spare) * layout.block_bytes
        if self.device.type == "cpu":
            self.memfd, mapping = allocate_sealed("tandem-kv", num_bytes)
            flat = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
            self._closers.append(weakref.finalize(self, os.close, self.memfd))
        else:
            flat = self._cuda_memory(num_bytes)
        self.raw = flat.view(-1, layout.block_bytes)[:num_blocks]
        self.tensor = self.raw.view(TORCH_DTYPES.get(layout.dtype, torch.int8))
        self.layers = tuple(self._views(place) for place in layout.layers)  # (K, V) of each layer
        # The scales of each layer's K and V, [num_blocks, block_size, num_kv_heads], in a pool of 8 bits.
        self.scales = tuple(self._scale_views(place) for place in layout.layers) if layout.has_scales else ()

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.layout.block_size

    @property
    def spare_block(self) -> int:
        assert self._num_spare, "this pool was made without a spare block"
        return self.num_blocks

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks. Every source is read before any target is written."""
        sources, targets = to_device(torch.tensor([(copy.source, copy.target) for copy in copies]).T, self.device)
        self.tensor[targets] = self.tensor[sources]

    def zero_positions(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> None:
        """Zero these positions in all layers; both arguments are `[positions]`."""
        for view in (view for layer in (*self.layers, *self.scales) for view in layer):
            # The zero is created on the device: a number from the host would cause a wait per view.
            view.index_put_((block_ids, offsets), view.new_zeros(()))

    def close(self) -> None:
        """End this process's use of the memory. It is freed when the last tensor on it, in any process, is gone."""
        self.layers = self.scales = ()
        self.tensor = self.raw = torch.empty(0, 0, dtype=torch.uint8)
        for close in self._closers:
            close()
        self.memfd = self.cuda_file = None

    def _cuda_memory(self, num_bytes: int) -> torch.Tensor:
        try:
            memory = CudaMemory(num_bytes, self.device)
        except NotExportable as error:
            self.why_no_cuda_file = str(error)
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self.cuda_file, self.cuda_file_bytes, self.why_no_cuda_file = memory.file, memory.num_bytes, ""
        self._closers.append(weakref.finalize(self, os.close, memory.file))
        return memory.tensor

    def _views(self, place: LayerPlace) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer over all blocks: strided `[num_blocks, block_size, num_kv_heads, head_dim]`."""
        dtype = _QUANTISED_DTYPES.get(self.layout.dtype, self.tensor.dtype)
        heads, shape = place.shape.num_kv_heads, place.shape
        keys = self._strided(dtype, place.key_offset, heads, shape.key_dim)
        return keys, self._strided(dtype, place.value_offset, heads, shape.value_dim)

    def _scale_views(self, place: LayerPlace) -> tuple[torch.Tensor, torch.Tensor]:
        heads = place.shape.num_kv_heads
        keys = self._strided(_SCALE_DTYPE, place.key_scale_offset, heads, 1)
        return keys[..., 0], self._strided(_SCALE_DTYPE, place.value_scale_offset, heads, 1)[..., 0]

    def _strided(self, dtype: torch.dtype, offset: int, heads: int, dim: int) -> torch.Tensor:
        whole = self.raw.view(dtype)
        return whole.as_strided(
            (self.num_blocks + self._num_spare, self.layout.block_size, heads, dim),
            (whole.stride(0), heads * dim, dim, 1),
            offset,
        )


def allocate_pool(layout: BlockLayout, num_blocks: int, device: str, *, num_spare: int = 0) -> KvPool:
    """Allocate the pool. Raises ConfigError with the needed and the available bytes."""
    num_bytes = (num_blocks + num_spare) * layout.block_bytes
    if device == "cpu" and num_bytes > (most := host_bytes()):
        # Pages are allocated when they are written: without this check the system would kill the process later.
        raise _too_large(num_blocks, num_bytes, f"this host has {most / (1 << 30):.2f} GiB")
    try:
        return KvPool(layout, num_blocks, device, num_spare=num_spare)
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise _too_large(num_blocks, num_bytes, f"the GPU has {free / (1 << 30):.2f} GiB free") from error


def host_bytes() -> int:
    """Return the memory of the machine, or the limit of this process's control group if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _too_large(num_blocks: int, num_bytes: int, there_is: str) -> ConfigError:
    return ConfigError(
        f"a KV pool of {num_blocks} blocks takes {num_bytes / (1 << 30):.2f} GiB, and {there_is}: set a smaller "
        "--kv-cache-memory or --num-blocks, or --kv-cache-dtype int8"
    )
