"""The disks under the spill tiers: what prefill workers wrote outlives them, and a disk may be full."""

import errno
from dataclasses import dataclass, field
from pathlib import Path

from cluster.messages import LayoutFingerprint
from prefill_worker.prefixes.block_files import BlockFiles
from tests.chaos.simulated.loop import Process, current


@dataclass(slots=True)
class Disk:
    """Of one place."""

    files: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)  # by hash: digest and bytes
    is_full: bool = False
    holder: Process | None = None


class SimulatedBlockFiles:
    """What `BlockFiles` promises, on a `Disk`."""

    file_bytes = staticmethod(BlockFiles.file_bytes)

    def __init__(self, disk: Disk, folder: Path, fingerprint: LayoutFingerprint, block_bytes: int) -> None:
        """Raises BlockingIOError: another process has it."""
        if disk.holder is not None and disk.holder.is_alive and disk.holder is not current():
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
        disk.holder = current()
        self._disk = disk

    def hashes(self) -> list[bytes]:
        return list(self._disk.files)

    def write(self, block_hash: bytes, digest: bytes, data: memoryview) -> None:
        if self._disk.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._disk.files.pop(block_hash, None)
        self._disk.files[block_hash] = (digest, bytes(data))

    def read(self, block_hash: bytes, into: memoryview) -> bytes:
        if block_hash not in self._disk.files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        digest, content = self._disk.files[block_hash]
        into[:] = content
        return digest

    def remove(self, block_hash: bytes) -> None:
        self._disk.files.pop(block_hash, None)

    def close(self) -> None:
        self._disk.holder = None
