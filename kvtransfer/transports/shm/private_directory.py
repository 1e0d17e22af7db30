"""A directory for this process's sockets that outlives it by no more than the next process's start.

Whoever is killed cannot remove its directory. So each holds a lock in it, which the kernel drops with the process, and
whoever makes one removes those of the same user whose lock nobody holds.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "tandem-kv-"
_LOCK = "lock"
_MAX_SOCKET_PATH = 100  # the kernel takes 107 bytes


class PrivateDirectory:
    """Readable by this user only. In /tmp where the usual place makes the paths of sockets too long for the kernel."""

    def __init__(self, parent: Path | None = None) -> None:
        """`parent`: the usual place unless told. Raises OSError."""
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        if len(str(parent / f"{_PREFIX}{'x' * 8}" / "pool").encode()) > _MAX_SOCKET_PATH:
            parent = Path("/tmp")
        _remove_abandoned(parent)
        unlocked = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        self._lock = (unlocked / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under this name only now that it is locked: nobody takes it for abandoned.
        self.path = unlocked.rename(parent / unlocked.name.removeprefix("."))

    def remove(self) -> None:
        """More than once, too."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            if directory.stat().st_uid == os.getuid() and not _is_held(directory / _LOCK):
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            continue  # another process removed it first, or it has no lock: not ours to judge


def _is_held(lock: Path) -> bool:
    """Raises OSError."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
