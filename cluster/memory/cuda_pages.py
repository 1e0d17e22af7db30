"""Pages of CUDA's virtual memory management in this process's addresses: mapped whole, or not at all.

Whoever owns a pool and whoever reads one of another process both map such pages. The driver comes from cuda-bindings
and is an argument, for only a process that uses a GPU imports it.
"""

from typing import Any


class DriverRefused(Exception):
    """What the driver answers instead of success."""


def checked(answer: tuple[Any, ...]) -> Any:
    """The result of a call of cuda-bindings' driver. Raises DriverRefused."""
    status, *results = answer
    if int(status) != 0:
        raise DriverRefused(f"the driver answers {status.name}")
    return results[0] if results else None


def map_pages(driver: Any, handle: Any, num_bytes: int, index: int, access_flags: Any) -> int:
    """The address at which the GPU of this index sees them. `access_flags`: a `CUmemAccess_flags`. Raises
    DriverRefused, and then nothing is mapped."""
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
    """As a finalizer calls it: what the driver says to it helps nobody any more."""
    from cuda.bindings import driver

    driver.cuMemUnmap(address, num_bytes)
    driver.cuMemAddressFree(address, num_bytes)
