"""Makes the system allocate the pages of reserved blocks while their content is still being computed elsewhere.

A pool's pages are allocated at their first write. That costs more than the copy: 12 MB took 7.5 ms in pages and 1.2 ms
in bytes on a virtual machine, at the end of a prefill, when a client waits for its second token. Owns which blocks have
their pages. It changes no byte, so it needs no account of what else happens to the blocks.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtransfer.memory import PoolMemory, runs

_MADV_POPULATE_WRITE = 23  # madvise(2), since Linux 5.14
_PIECE_BYTES = 1 << 20  # other threads that map memory wait for a piece


class PopulatedPages:
    """Call it on the event loop. A pool on a GPU has nothing to populate."""

    def __init__(self, memory: PoolMemory) -> None:
        self._block_bytes = memory.block_bytes
        self._address = 0 if memory.raw.is_cuda else memory.raw.data_ptr()
        self._lacking = set(() if memory.raw.is_cuda else range(memory.num_blocks))
        self._thread = ThreadPoolExecutor(1, "kv-pages")
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def populate_soon(self, block_ids: Sequence[int]) -> None:
        """Populate the pages of blocks that are about to be written, each block once, on a thread of its own."""
        lacking = [block_id for block_id in block_ids if block_id in self._lacking]
        if lacking:
            self._lacking.difference_update(lacking)
            with contextlib.suppress(RuntimeError, MemoryError):  # no thread: the first write allocates
                self._thread.submit(self._populate, lacking)

    def close(self) -> None:
        """Wait until the system has been asked for the last time."""
        self._thread.shutdown(cancel_futures=True)

    def _populate(self, block_ids: Sequence[int]) -> None:
        for first, _, length in runs(block_ids, block_ids):
            start = self._address + first * self._block_bytes
            end = start + length * self._block_bytes
            for piece in range(start - start % mmap.PAGESIZE, end, _PIECE_BYTES):
                # An error is no failure: an older kernel does not know the request, and the first write allocates.
                self._madvise(piece, min(_PIECE_BYTES, end - piece), _MADV_POPULATE_WRITE)
