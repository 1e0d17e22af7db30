"""The bytes of the tiers: slots in host memory, and one file per block on disk. Never decides where a block is stored.

All methods block and run on helper threads. The tier index keeps two of them from using one slot, and the scheduler
pins the pool blocks that they read or write. Every block is compared with its digest before it enters the pool.
`TierStorage` raises nothing for a broken disk or a damaged block: it returns the outcome, one of the constants below.

A file has a header and the block's bytes. The header names the layout (weights, shapes, dtype), the block's hash, its
digest, its length and its provenance, so a file of another model, a truncated one and a damaged one are recognised. A
file is renamed into place when it is complete, is readable by its owner only, and is named by the keyed hash of its
block, which reveals nothing of a prompt. One process uses a folder at a time. Its digest has no key, so a folder that
another user owns is refused, and a file that another user owns is not a block.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.messages import LayoutFingerprint
from cluster.protocol.hashing import HASH_BYTES
from kvtransfer.digests import digest_tensor
from kvtransfer.memory import PoolMemory
from prefill_worker.prefixes.tier_index import Place, Store

_LOG = logging.getLogger("tandem.prefill.tiers")
_HEADER = struct.Struct("<8s16s16s16sQ?")  # magic, layout, hash, digest, length, is verified
_MAGIC = b"tandemk2"
_DRAFT = ".draft"
_BLOCK_NAME = re.compile(f"[0-9a-f]{{{2 * HASH_BYTES}}}")
OK, DAMAGED, UNREADABLE, UNWRITABLE, LATE = "ok", "damaged", "unreadable", "unwritable", "late"
UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The data that a tier keeps with the bytes of a block."""

    digest: bytes
    is_verified: bool  # False: the block came from another worker, and its digest was not compared then


@dataclass(frozen=True, slots=True)
class Fetched:
    """The first `num_blocks` of a fetch are in the pool; `outcome` says why the next one is not, or ok."""

    num_blocks: int
    outcome: str
    seconds: float
    unverified: frozenset[int]  # pool blocks among them that were not verified when they came from another worker


class TierStorage:
    def __init__(
        self, pool: PoolMemory, num_slots: int, files: "BlockFiles | None", *, refuses_unverified: bool = False
    ) -> None:
        """`refuses_unverified`: a fetch fails at a block that was not verified; an earlier run may have left some."""
        self._refuses_unverified = refuses_unverified
        self._pool = pool.raw
        self._files = files
        self._slots = torch.zeros(num_slots, pool.block_bytes, dtype=torch.uint8, pin_memory=pool.raw.is_cuda)
        self._stored = [StoredBlock(b"", is_verified=True)] * num_slots
        self._scratch = torch.zeros(1, pool.block_bytes, dtype=torch.uint8)  # used by the fetching thread only
        self._stream = torch.cuda.Stream(pool.raw.device) if pool.raw.is_cuda else None  # type: ignore[no-untyped-call]
        self._last_logged = ""
        self._unremoved: dict[bytes, None] = {}  # files to delete; used by the storing thread only

    def demote(self, stores: Sequence[Store]) -> list[str]:
        """Write the blocks that these slots hold to disk. Return the outcome for each."""
        return [self._demote(store) for store in stores]

    def store(self, jobs: Sequence[tuple[Store, int]], unverified: Set[int]) -> None:
        """Copy pool blocks into empty slots. `unverified`: pool blocks among them that were not verified."""
        for store, block_id in jobs:
            self._copy(self._slots[store.slot], self._pool[block_id])
        self._end_copies()
        for store, block_id in jobs:
            digest = digest_tensor(self._slots[store.slot : store.slot + 1])[0]
            self._stored[store.slot] = StoredBlock(digest, is_verified=block_id not in unverified)

    def fetch(self, jobs: Sequence[tuple[Place, int]], stop: threading.Event) -> Fetched:
        """Copy each (place, pool block) in order, until one fails or `stop` is set."""
        started_s, outcome, unverified, num_blocks = time.monotonic(), OK, set[int](), 0
        try:
            for place, block_id in jobs:
                outcome, is_verified = (LATE, True) if stop.is_set() else self._fetch(place, block_id)
                if outcome != OK:
                    break
                num_blocks += 1
                if not is_verified:
                    unverified.add(block_id)
        finally:  # no copy may still write to a pool block after this call
            self._end_copies()
        return Fetched(num_blocks, outcome, time.monotonic() - started_s, frozenset(unverified))

    def flush(self, places: Sequence[Place], timeout_s: float) -> int:
        """Write slots to disk until the timeout or the first failure. Return how many were written."""
        until_s = time.monotonic() + timeout_s
        for number, place in enumerate(places):
            assert place.slot is not None
            if time.monotonic() > until_s or self._write(place.block_hash, place.slot) != OK:
                return number
        return len(places)

    def remove(self, block_hashes: Sequence[bytes]) -> None:
        """Delete the files of these blocks, and those that an earlier call could not delete. Ends at the first failure;
        the next call goes on."""
        if self._files is None:
            return
        self._unremoved.update(dict.fromkeys(block_hashes))
        for block_hash in list(self._unremoved):
            try:
                self._files.remove(block_hash)
            except OSError as error:
                self._log(error)
                self._unremoved[block_hash] = self._unremoved.pop(block_hash)  # the others are tried before it
                return
            del self._unremoved[block_hash]

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def _demote(self, store: Store) -> str:
        self.remove(store.dropped)
        return OK if store.demoted is None else self._write(store.demoted, store.slot)

    def _write(self, block_hash: bytes, slot: int) -> str:
        assert self._files is not None
        try:
            self._files.write(block_hash, self._stored[slot], self._slots[slot].numpy().data)
        except OSError as error:
            self._log(error)
            return UNWRITABLE
        self._unremoved.pop(block_hash, None)
        return OK

    def _fetch(self, place: Place, block_id: int) -> tuple[str, bool]:
        """Fetch one block. Return the outcome, and whether the block is verified."""
        if place.slot is not None:
            row, stored = self._slots[place.slot], self._stored[place.slot]
        else:
            assert self._files is not None
            row = self._scratch[0]
            self._end_copies()  # the previous copy may still read from the scratch row
            try:
                stored = self._files.read(place.block_hash, row.numpy().data)
            except OSError as error:
                self._log(error)
                return UNREADABLE, False
            except BadBlockFile as error:
                _LOG.warning("block %s on disk is unusable: %s", place.block_hash.hex(), error)
                return DAMAGED, False
        if digest_tensor(row[None])[0] != stored.digest:
            _LOG.warning("block %s in a tier does not match its digest", place.block_hash.hex())
            return DAMAGED, False
        if self._refuses_unverified and not stored.is_verified:
            return UNVERIFIED, False
        self._copy(self._pool[block_id], row)
        return OK, stored.is_verified

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on a separate stream on a GPU, so that no step of the engine waits for it."""
        if self._stream is None:
            target.copy_(source)
        else:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)

    def _end_copies(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _log(self, error: OSError) -> None:
        """Log each kind of error once in a row: a full disk stays full."""
        if str(error.strerror) != self._last_logged:
            self._last_logged = str(error.strerror)
            _LOG.warning("the disk of the prefix cache failed: %s", error)


class BadBlockFile(ValueError):
    """The file exists, but does not hold the expected block and layout completely."""


class BlockFiles:
    """The files of blocks on disk, in a folder per layout. Every method may raise OSError."""

    def __init__(self, folder: Path, fingerprint: LayoutFingerprint, block_bytes: int) -> None:
        """Create and lock the folder. Raises BlockingIOError if another process uses it, and PermissionError if it
        belongs to another user."""
        self._layout = hashlib.blake2b(repr(fingerprint).encode(), digest_size=16).digest()
        self._folder = folder / self._layout.hex()
        self._block_bytes = block_bytes
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_private(self._folder)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise

    @staticmethod
    def file_bytes(block_bytes: int) -> int:
        return _HEADER.size + block_bytes

    def hashes(self) -> list[bytes]:
        """Return the hashes of all files of the right size, the oldest first. Deletes incomplete drafts."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_DRAFT):
                    os.unlink(entry.path)
                elif _BLOCK_NAME.fullmatch(entry.name):  # a file of another name is not ours
                    status = entry.stat(follow_symlinks=False)
                    if status.st_size == self.file_bytes(self._block_bytes) and status.st_uid == os.getuid():
                        found.append((status.st_mtime_ns, bytes.fromhex(entry.name)))
        return [block_hash for _, block_hash in sorted(found)]

    def write(self, block_hash: bytes, stored: StoredBlock, data: memoryview) -> None:
        path = self._path(block_hash)
        draft = path.with_name(path.name + _DRAFT)
        header = _HEADER.pack(_MAGIC, self._layout, block_hash, stored.digest, len(data), stored.is_verified)
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(header)
                file.write(data)
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def read(self, block_hash: bytes, into: memoryview) -> StoredBlock:
        """Fill `into` with the block's bytes; return its digest and provenance. Raises BadBlockFile."""
        with open(self._path(block_hash), "rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise BadBlockFile(f"its header has {len(header)} bytes")
            magic, layout, name, digest, length, is_verified = _HEADER.unpack(header)
            if (magic, layout, name, length) != (_MAGIC, self._layout, block_hash, len(into)):
                raise BadBlockFile("its header names another block, layout or length")
            if (num_read := file.readinto(into)) != length:
                raise BadBlockFile(f"it has {num_read} of {length} bytes")
        return StoredBlock(digest, is_verified)

    def remove(self, block_hash: bytes) -> None:
        self._path(block_hash).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def _path(self, block_hash: bytes) -> Path:
        return self._folder / block_hash.hex()


def _whose(folder: Path, owner: int, user: int) -> str:
    """Return that the folder belongs to another user, and what to change. NFS with root_squash, its default, gives what
    root makes to the user nobody."""
    why = "; if it is on NFS with root_squash, root's folders get another owner there" if user == 0 else ""
    return (
        f"{folder} belongs to another user ({owner}), and the worker runs as user {user}{why}: run the worker as user"
        f" {owner}, or choose a folder in which user {user} owns what it makes"
    )


def _make_private(folder: Path) -> None:
    """Check that the folder belongs to this user, and close it to all others. It may have been open to them: Kubernetes
    lets the group of a pod write to the folders of its volumes. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, _whose(folder, found.st_uid, os.getuid()), str(folder))
        if found.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
