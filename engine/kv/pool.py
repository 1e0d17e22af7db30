"""The KV memory of one worker: one allocation. Owns the bytes; never decides who uses which block.

On CPU the pool is a sealed memfd that is mapped shared, so that another process on the host can receive the file
descriptor and read blocks in place, and do nothing else. On CUDA its pages are exported as a file for the same purpose
if the driver supports that; otherwise the pool is an ordinary tensor.

`CudaMemory` uses CUDA's virtual memory management, not `cudaIpcGetMemHandle`: such pages live until the last process
that mapped them has unmapped them or ended, so a reader's mapping stays valid when their owner dies ("The memory
allocation will be freed when all outstanding mappings to the memory are unmapped and when all outstanding references to
the handle (including its shareable counterparts) are also released", driver API).

`quantise` gives each token and KV head one scale for K and one for V. So a step quantises what it writes without
reading what a block already holds, and a block that is filled in one step or in sixteen has the same bytes. A scale is
the largest element's magnitude divided by the largest code, in bfloat16. Its range is float32's, so every vector has a
scale; its rounding error, at most 2^-9, moves the largest element by less than half a step beyond the largest code. A
vector that contains an infinity or NaN is restored without any finite element, so that an error stays visible.
"""

import contextlib
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.errors import ConfigError
from cluster.shared_memory import DriverRefused, allocate_sealed, driver_result, map_pages, unmap_pages
from engine.batch import to_device
from engine.kv.layout import BlockLayout, LayerPlace
from engine.scheduling.step import BlockCopy

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_QUANTISED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_SCALE_DTYPE = torch.bfloat16
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LEAST_SCALE = 2.0**-126  # below it a reciprocal would be infinite


class NotExportable(Exception):
    """This device, driver or installation cannot export memory."""


class CudaMemory:
    """One zeroed allocation. Its creator closes `file`, the exported handle; `tensor` stays mapped while any reference
    to it exists."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate the memory on the current device. Raises NotExportable."""
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # creates the device's context
            torch.cuda.empty_cache()  # the driver cannot reclaim torch's cached memory
            self.file, self.num_bytes, address = _allocate(num_bytes, index)
            try:
                region = _Region(address, self.num_bytes, index)
                self.tensor = _tensor_over(region, torch.device("cuda", index))[:num_bytes]
            except BaseException:
                os.close(self.file)
                raise
            self.tensor.zero_()
            torch.cuda.current_stream().synchronize()


def _tensor_over(region: "_Region", device: torch.device) -> torch.Tensor:
    try:
        tensor: torch.Tensor = torch.as_tensor(region, device=device)
    except (RuntimeError, TypeError) as error:
        raise NotExportable(f"torch cannot use this memory ({error})") from error
    if tensor.data_ptr() != region.address:
        raise NotExportable("torch made a copy of the memory instead of a view")
    return tensor


class _Region:
    """A mapped address range of a GPU. The tensor over it refers to it, and it is unmapped when that reference ends."""

    def __init__(self, address: int, num_bytes: int, index: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        weakref.finalize(self, _unmap_when_idle, address, num_bytes, index).atexit = False


def _unmap_when_idle(address: int, num_bytes: int, index: int) -> None:
    """Unmap pages after the launched work of the device. Steps are launched ahead, and the driver does not wait: work
    that still used the pages would fail with an illegal access, and no later work of the process would succeed."""
    with contextlib.suppress(RuntimeError):  # a device that has failed runs nothing
        torch.cuda.synchronize(index)
    unmap_pages(address, num_bytes)


def _allocate(num_bytes: int, index: int) -> tuple[int, int, int]:
    """Allocate and map memory; return (file, bytes, address). Raises NotExportable."""
    try:
        from cuda.bindings import driver

        driver_result(driver.cuInit(0))
    except (ImportError, RuntimeError, DriverRefused) as error:  # the second is raised if there is no driver
        raise NotExportable(f"cuda-bindings cannot be used ({error})") from error
    try:
        return _exported(driver, num_bytes, index)
    except DriverRefused as error:
        raise NotExportable(str(error)) from error


def _exported(driver: Any, num_bytes: int, index: int) -> tuple[int, int, int]:
    """Allocate like `_allocate`, and raise DriverRefused too."""
    properties = _properties(driver, index)
    granularity = driver_result(
        driver.cuMemGetAllocationGranularity(
            properties, driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        )
    )
    size = -(-num_bytes // granularity) * granularity
    handle = _created(driver, size, properties)
    try:
        file = int(driver_result(driver.cuMemExportToShareableHandle(handle, properties.requestedHandleTypes, 0)))
        try:
            for_both = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            return file, size, map_pages(driver, handle, size, index, for_both)
        except DriverRefused:
            os.close(file)
            raise
    finally:
        driver.cuMemRelease(handle)  # the mapping and the file keep the pages


def _created(driver: Any, size: int, properties: Any) -> Any:
    if properties.allocFlags.gpuDirectRDMACapable:
        with contextlib.suppress(DriverRefused):
            return driver_result(driver.cuMemCreate(size, properties, 0))
        # On a virtual machine, the device may not support what it reports.
        properties.allocFlags.gpuDirectRDMACapable = 0
    return driver_result(driver.cuMemCreate(size, properties, 0))


def _properties(driver: Any, index: int) -> Any:
    device = driver_result(driver.cuDeviceGet(index))
    attributes = driver.CUdevice_attribute
    exports = attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    if not driver_result(driver.cuDeviceGetAttribute(exports, device)):
        raise NotExportable("this device does not export memory as a file")
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    rdma = attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    if driver_result(driver.cuDeviceGetAttribute(rdma, device)):
        properties.allocFlags.gpuDirectRDMACapable = 1  # NCCL and UCX read and write the pool over the network
    return properties


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
        """End this process's use of the memory. It is freed when the last tensor on it, in any process, is
        gone; a GPU's memory only after the work that was launched on it."""
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


def quantise(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise floats `[..., dim]` to codes of the same shape and bfloat16 scales `[...]`. Zeros give zeros."""
    largest = _LARGEST[dtype]
    wide = states.float()
    scales = wide.abs().amax(dim=-1).mul_(1 / largest).bfloat16()
    steps = wide * scales.float().clamp_(min=_LEAST_SCALE).reciprocal_().unsqueeze(-1)
    if dtype == torch.int8:
        steps.round_()  # half to even, as the conversion to fp8 does
    return steps.to(dtype), scales


def restore(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Restore codes `[..., dim]` with their scales `[...]` as `dtype`: the exact product, rounded once."""
    wide = torch.float32 if dtype == torch.float16 else dtype  # half's range is less than a scale's
    elements = codes.to(wide) if codes.dtype == torch.int8 else _from_fp8(codes, wide)
    return elements.mul_(scales.to(wide).unsqueeze(-1)).to(dtype)


def _from_fp8(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if codes.device.type != "cpu":
        return codes.to(dtype)
    # The bits moved to their places in a bfloat16, whose exponent's bias is larger by 120: ten times as fast on a CPU
    # as its own conversion. The code for 480 is e4m3's NaN, and its scale is NaN too.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x7810)
    return bits.view(torch.bfloat16).mul_(2.0**120).to(dtype)
