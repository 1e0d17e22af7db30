"""Memory that other processes on the host may read in place: a memfd of fixed size that only its owner writes.

A process that receives a read-only descriptor could open the same file for writing through /proc/self/fd. The file's
seals (fcntl(2), memfd_create(2)) prevent it from writing, and from truncating the file, which would end the owner with
SIGBUS. Seals cannot be removed.
"""

import contextlib
import fcntl
import mmap
import os

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
        with contextlib.suppress(OSError):  # EINVAL: a kernel that does not know this seal
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
