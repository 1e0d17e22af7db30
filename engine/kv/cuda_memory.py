"""GPU memory that another process on the host can map: its physical pages are exported as a file.

It uses CUDA's virtual memory management, not `cudaIpcGetMemHandle`: such pages live until the last process that mapped
them has unmapped them or ended, so a reader's mapping stays valid when their owner dies ("The memory allocation will be
freed when all outstanding mappings to the memory are unmapped and when all outstanding references to the handle
(including its shareable counterparts) are also released", driver API).
"""

import contextlib
import os
import weakref
from typing import Any

import torch

from cluster.shared_memory import DriverRefused, driver_result, map_pages, unmap_pages


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
                self.tensor = _tensor_over(_Region(address, self.num_bytes), torch.device("cuda", index))[:num_bytes]
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
    """A mapped address range. The tensor over it refers to it, and it is unmapped when that reference ends."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        weakref.finalize(self, unmap_pages, address, num_bytes).atexit = False


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
