"""A pool in GPU pages that are exported as a file: no allocation is left behind when the driver refuses a step, and on
a GPU the pool behaves as any other pool.
"""

import gc
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.shared_memory import DriverRefused
from engine.kv import pool
from engine.kv.pool import KvPool, NotExportable
from kvtransfer.transports.cuda import transport as cuda_ipc
from tests.contract.rigs.kv_pools import LAYOUT

GRANULARITY = 2 << 20
STEPS = [
    "cuDeviceGet",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
]


class FakeDriver:
    """Keeps accounts of handles, addresses and mappings; refuses the step named in `refused`."""

    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103,
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED=110,
    )

    def __init__(self, refused: str = "", *, exports: bool = True) -> None:
        self._refused, self._exports = refused, exports
        self.handles: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.created: Any = None
        self.access: Any = None

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace(gpuDirectRDMACapable=0))

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def __getattr__(self, name: str) -> Any:
        call = getattr(self, "_" + name)
        return lambda *arguments: (_STATUS[2],) if name == self._refused else (_STATUS[0], *call(*arguments))

    def _cuInit(self, flags: int) -> tuple[()]:
        return ()

    def _cuDeviceGet(self, index: int) -> tuple[int]:
        return (index,)

    def _cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int]:
        return (int(self._exports or attribute == 110),)

    def _cuMemGetAllocationGranularity(self, properties: object, option: int) -> tuple[int]:
        return (GRANULARITY,)

    def _cuMemCreate(self, size: int, properties: object, flags: int) -> tuple[int]:
        assert size % GRANULARITY == 0
        self.created = properties
        self.handles.add(7)
        return (7,)

    def _cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[int]:
        assert handle in self.handles
        return (os.memfd_create("pages"),)

    def _cuMemImportFromShareableHandle(self, file: int, kind: int) -> tuple[int]:
        os.fstat(file)
        self.handles.add(7)
        return (7,)

    def _cuMemRelease(self, handle: int) -> tuple[()]:
        self.handles.remove(handle)
        return ()

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[int]:
        self.reserved[1 << 40] = size
        return (1 << 40,)

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[()]:
        assert self.reserved[address] == size and handle in self.handles
        self.mapped[address] = size
        return ()

    def _cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[()]:
        assert self.mapped[address] == size and len(access) == count == 1
        self.access = access[0]
        return ()

    def _cuMemUnmap(self, address: int, size: int) -> tuple[()]:
        self.mapped.pop(address, None)
        return ()

    def _cuMemAddressFree(self, address: int, size: int) -> tuple[()]:
        assert address not in self.mapped
        del self.reserved[address]
        return ()


class Status(int):
    @property
    def name(self) -> str:
        return f"CUDA_ERROR_{int(self)}"


_STATUS = {0: Status(0), 2: Status(2)}


def install(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("step", STEPS)
def test_a_step_refused_by_the_driver_frees_all_earlier_allocations(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(step)
    install(monkeypatch, driver)
    before = num_files()
    with pytest.raises(NotExportable, match="CUDA_ERROR_2"):
        pool._allocate(1000, 0)
    assert not driver.handles and not driver.mapped and not driver.reserved and num_files() == before


def test_pages_stay_mapped_as_long_as_the_region_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    install(monkeypatch, driver)
    waited: list[tuple[int, dict[int, int]]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: waited.append((index, dict(driver.mapped))))
    file, size, address = pool._allocate(GRANULARITY + 1, 3)
    os.close(file)
    assert size == 2 * GRANULARITY and driver.created.location.id == 3
    assert driver.created.allocFlags.gpuDirectRDMACapable == 1
    assert not driver.handles  # the mapping keeps the pages
    region = pool._Region(address, size, 3)
    assert driver.mapped == {address: size} and not waited
    del region
    gc.collect()
    assert not driver.mapped and not driver.reserved
    assert waited == [(3, {address: size})]  # launched work may still use the pages


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pool_that_is_closed_below_running_work_does_not_end_it() -> None:
    pool = KvPool(LAYOUT, 64, "cuda")
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # clock cycles: about 50 ms
    copy = pool.raw.clone()
    pool.close()
    torch.cuda.synchronize()
    assert not copy.any()


def test_a_device_without_export_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver(exports=False))
    with pytest.raises(NotExportable, match="does not export"):
        pool._allocate(1000, 0)


def test_another_process_maps_the_pages_for_reading_only() -> None:
    driver, before = FakeDriver(), num_files()
    address = cuda_ipc._import_for_reading(driver, os.memfd_create("pages"), GRANULARITY, 2)
    assert driver.mapped == {address: GRANULARITY}
    assert (driver.access.flags, driver.access.location.id) == (1, 2)
    assert not driver.handles and num_files() == before  # the mapping keeps the pages


@pytest.mark.parametrize(
    "step", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_pages_that_cannot_be_mapped_are_released(step: str) -> None:
    driver, before = FakeDriver(step), num_files()
    with pytest.raises(DriverRefused, match="CUDA_ERROR_2"):
        cuda_ipc._import_for_reading(driver, os.memfd_create("pages"), GRANULARITY, 0)
    assert not driver.handles and not driver.mapped and not driver.reserved and num_files() == before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_pool_is_exported_and_zero() -> None:
    num_blocks = (256 << 20) // LAYOUT.block_bytes
    pool = KvPool(LAYOUT, num_blocks, "cuda")
    assert pool.why_no_cuda_file == "" and pool.cuda_file is not None
    assert pool.cuda_file_bytes >= num_blocks * LAYOUT.block_bytes
    assert pool.raw.is_cuda and pool.raw.is_contiguous() and not pool.raw.any()
    pool.tensor[1].fill_(2.0)
    assert bool((pool.tensor[1] == 2.0).all()) and not pool.raw[0].any() and not pool.raw[2].any()
    pool.close()


@pytest.mark.cuda
@pytest.mark.whole_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_released_pages_can_be_allocated_again() -> None:
    """The test allocates more in turn than the device has: the free memory at one moment would depend on other
    processes.
    """
    num_bytes = torch.cuda.mem_get_info()[1] // 8
    for _ in range(9):
        memory = pool.CudaMemory(num_bytes, torch.device("cuda"))
        os.close(memory.file)
        del memory
        gc.collect()
