"""Simulated disks of the prefix tiers: files outlive the prefill worker that wrote them, and a disk may be full."""

import errno
from dataclasses import dataclass, field
from pathlib import Path

from cluster.messages import LayoutFingerprint
from prefill_worker.prefixes.tier_storage import BlockFiles, StoredBlock
from tests.chaos.simulated.machine.loop import Process, current


@dataclass(slots=True)
class Disk:
    """The disk of one place."""

    files: dict[bytes, tuple[StoredBlock, bytes]] = field(default_factory=dict)  # by hash
    is_full: bool = False
    holder: Process | None = None


class SimulatedBlockFiles:
    """The interface of `BlockFiles` on a `Disk`."""

    file_bytes = staticmethod(BlockFiles.file_bytes)

    def __init__(self, disk: Disk, folder: Path, fingerprint: LayoutFingerprint, block_bytes: int) -> None:
        """Raises BlockingIOError if another process uses the disk."""
        if disk.holder is not None and disk.holder.is_alive and disk.holder is not current():
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
        disk.holder = current()
        self._disk = disk

    def hashes(self) -> list[bytes]:
        return list(self._disk.files)

    def write(self, block_hash: bytes, stored: StoredBlock, data: memoryview) -> None:
        if self._disk.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._disk.files.pop(block_hash, None)
        self._disk.files[block_hash] = (stored, bytes(data))

    def read(self, block_hash: bytes, into: memoryview) -> StoredBlock:
        if block_hash not in self._disk.files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        stored, content = self._disk.files[block_hash]
        into[:] = content
        return stored

    def remove(self, block_hash: bytes) -> None:
        self._disk.files.pop(block_hash, None)

    def close(self) -> None:
        self._disk.holder = None
