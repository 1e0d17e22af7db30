"""Map pages of CUDA's virtual memory management into this process's address space: all of them or none.

The module is in `cluster/` because two packages that may not import each other use it: `engine` maps the pages of its
own pool, and `kvtransfer` those of another process's pool. It imports no CUDA: the driver of cuda-bindings is an
argument, because only a process that uses a GPU imports it.
"""

from typing import Any


class DriverRefused(Exception):
    """The CUDA driver returned an error status."""


def checked(answer: tuple[Any, ...]) -> Any:
    """Return the result of a call to the driver of cuda-bindings. Raises DriverRefused."""
    status, *results = answer
    if int(status) != 0:
        raise DriverRefused(f"the CUDA driver returned {status.name}")
    return results[0] if results else None


def map_pages(driver: Any, handle: Any, num_bytes: int, index: int, access_flags: Any) -> int:
    """Map the pages and return the address at which the GPU with this index accesses them. `access_flags`: a
    `CUmemAccess_flags`. Raises DriverRefused; then nothing is mapped."""
    address = checked(driver.cuMemAddressReserve(num_bytes, 0, 0, 0))
    try:
        checked(driver.cuMemMap(address, num_bytes, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        access.flags = access_flags
        checked(driver.cuMemSetAccess(address, num_bytes, [access], 1))
    except DriverRefused:
        driver.cuMemUnmap(address, num_bytes)
        driver.cuMemAddressFree(address, num_bytes)
        raise
    return int(address)


def unmap(address: int, num_bytes: int) -> None:
    """Unmap the pages. Finalizers call it, so the driver's status is ignored: no caller could act on it."""
    from cuda.bindings import driver

    driver.cuMemUnmap(address, num_bytes)
    driver.cuMemAddressFree(address, num_bytes)
