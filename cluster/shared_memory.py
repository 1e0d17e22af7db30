"""Memory that other processes on the host may read in place: sealed files, and pages of CUDA's virtual memory
management.

`engine` allocates this memory and `kvtransfer` maps that of other processes; they may not import each other, so the
code that both use is here. It imports neither torch nor CUDA: the driver of cuda-bindings is an argument, because only
a process that uses a GPU imports it. Which blocks are in use is not known here.

A sealed file is a memfd of fixed size that only its owner writes. A process that receives a read-only descriptor could
open the same file for writing through /proc/self/fd. The file's seals (fcntl(2), memfd_create(2)) prevent it from
writing, and from truncating the file, which would end the owner with SIGBUS. Seals cannot be removed.
"""

import contextlib
import fcntl
import mmap
import os
from typing import Any

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of linux/fcntl.h, since Linux 5.1; Python 3.11 does not name it


def allocate_sealed(name: str, num_bytes: int) -> tuple[int, mmap.mmap]:
    """Return (descriptor, mapping) of `num_bytes` zero bytes, both owned by the caller.

    The mapping stays writable. No process, this one included, can change the file's size, or map or write the file in
    another way; before Linux 5.1 a process that has the descriptor can still write. Raises OSError.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        mapping = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED)
        with contextlib.suppress(OSError):  # EINVAL: the kernel does not support this seal
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, mapping


def has_fixed_size(descriptor: int) -> bool:
    """Return whether the file's size is sealed, so that reading a mapping of it never raises SIGBUS."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS
    except OSError:  # a file that cannot be sealed
        return False


class DriverRefused(Exception):
    """The CUDA driver returned an error status."""


def driver_result(answer: tuple[Any, ...]) -> Any:
    """Return the result of a call to the driver of cuda-bindings. Raises DriverRefused."""
    status, *results = answer
    if int(status) != 0:
        raise DriverRefused(f"the CUDA driver returned {status.name}")
    return results[0] if results else None


def map_pages(driver: Any, handle: Any, num_bytes: int, index: int, access_flags: Any) -> int:
    """Map the pages and return the address at which the GPU with this index accesses them. `access_flags`: a
    `CUmemAccess_flags`. Raises DriverRefused; then nothing is mapped."""
    address = driver_result(driver.cuMemAddressReserve(num_bytes, 0, 0, 0))
    try:
        driver_result(driver.cuMemMap(address, num_bytes, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        access.flags = access_flags
        driver_result(driver.cuMemSetAccess(address, num_bytes, [access], 1))
    except DriverRefused:
        driver.cuMemUnmap(address, num_bytes)
        driver.cuMemAddressFree(address, num_bytes)
        raise
    return int(address)


def unmap_pages(address: int, num_bytes: int) -> None:
    """Unmap the pages. Finalizers call it, so the driver's status is ignored: no caller could act on it."""
    from cuda.bindings import driver

    driver.cuMemUnmap(address, num_bytes)
    driver.cuMemAddressFree(address, num_bytes)
