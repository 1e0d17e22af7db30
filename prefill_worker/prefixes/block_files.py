"""Blocks of KV as files in one folder, one file each, for whoever starts here next with the same model and layout.

A file is a header and the block's bytes. The header names the layout (weights, shapes, dtype), the block's hash, its
digest and its length, so that a file of another model, cut short or damaged is told from one that is whole. Files
appear whole or not at all, and only their owner may read them. One process uses a folder at a time. Hashes are keyed:
names tell nothing of a prompt. Everything here blocks, and raises OSError.
"""

import fcntl
import hashlib
import os
import struct
from pathlib import Path

from cluster.messages import LayoutFingerprint
from cluster.protocol.hashing import HASH_BYTES

_HEADER = struct.Struct("<8s16s16s16sQ")  # magic, layout, hash, digest, length
_MAGIC = b"tandemk1"
_DRAFT = ".draft"


class BadBlockFile(ValueError):
    """It is there, and is not what it should be."""


class BlockFiles:
    def __init__(self, folder: Path, fingerprint: LayoutFingerprint, block_bytes: int) -> None:
        """Makes the folder, and takes it. Raises OSError; BlockingIOError: another process has it."""
        self._layout = hashlib.blake2b(repr(fingerprint).encode(), digest_size=16).digest()
        self._folder = folder / self._layout.hex()
        self._block_bytes = block_bytes
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise

    @staticmethod
    def file_bytes(block_bytes: int) -> int:
        return _HEADER.size + block_bytes

    def hashes(self) -> list[bytes]:
        """Of the blocks that are here and have the right size, the oldest first. Removes unfinished drafts."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_DRAFT):
                    os.unlink(entry.path)
                elif len(entry.name) == 2 * HASH_BYTES:
                    status = entry.stat()
                    if status.st_size == self.file_bytes(self._block_bytes):
                        found.append((status.st_mtime_ns, bytes.fromhex(entry.name)))
        return [block_hash for _, block_hash in sorted(found)]

    def write(self, block_hash: bytes, digest: bytes, data: memoryview) -> None:
        path = self._path(block_hash)
        draft = path.with_name(path.name + _DRAFT)
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_HEADER.pack(_MAGIC, self._layout, block_hash, digest, len(data)))
                file.write(data)
            os.replace(draft, path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def read(self, block_hash: bytes, into: memoryview) -> bytes:
        """Fills `into`; the digest that the block should have. Raises BadBlockFile."""
        with open(self._path(block_hash), "rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise BadBlockFile(f"its header has {len(header)} bytes")
            magic, layout, name, digest, length = _HEADER.unpack(header)
            if (magic, layout, name, length) != (_MAGIC, self._layout, block_hash, len(into)):
                raise BadBlockFile("its header names another block, layout or length")
            if (num_read := file.readinto(into)) != length:
                raise BadBlockFile(f"it has {num_read} of {length} bytes")
        assert isinstance(digest, bytes)
        return digest

    def remove(self, block_hash: bytes) -> None:
        self._path(block_hash).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def _path(self, block_hash: bytes) -> Path:
        return self._folder / block_hash.hex()
