"""The functions of NCCL that the `nccl` transport needs, as protocols, and their implementation with `cupy.cuda.nccl`
on one device.

The tests have another implementation. The following was read in cupy 14's `cupy_backends/cuda/libs/nccl.pyx` and in
NCCL's user guide and `src/init.cc`:

- Every call (the constructor, `send`, `recv`, `groupEnd`, `abort`, `check_async_error` and others) runs `with nogil`: a
  call that hangs stops its thread but not the interpreter.
- The constructor blocks in ncclCommInitRankConfig, and cupy's NcclConfig does not support `blocking=0`. "Fault
  tolerance" allows ncclCommAbort only while no thread is in a call of that communicator. So a constructor that hangs
  can be abandoned but not aborted; its caller agrees with the peer first and runs it on a thread that it can lose.
- A send or receive blocks only while it builds the connections to its peer, all of them at the first one
  (`src/enqueue.cc`, p2pnChannelsPerPeer). After `warm`, calls return as soon as the work is enqueued.
- `__dealloc__` calls ncclCommDestroy, which waits for running work and for ranks of the same node. So a communicator is
  always aborted before it is dropped, which clears the pointer first.
- "Thread safety": calls to different communicators of one device must not run in parallel, hence one lock per device.
- A status that cupy has no name for becomes a KeyError.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch

EXPORTER_RANK, IMPORTER_RANK = 0, 1
_WARM_BYTES = 1 << 20
_LEAST_VERSION = 2_18_00  # the first version whose communicators take a configuration, which cupy passes
_SHARING_VERSION = 2_30_00  # two ranks may share a GPU
_Result = TypeVar("_Result")


class NcclFailed(Exception):
    """The library refused or reported a failure. The communicator can only be aborted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a pool's memory, by address."""

    address: int
    num_bytes: int


class Communicator(Protocol):
    """A communicator of two ranks, on its own stream.

    Only the thread that connected may call it: NCCL allows an abort only while no other thread is in a call of the same
    communicator.
    """

    def warm(self) -> None:
        """Start the first message, from exporter to importer, which builds the connections.

        It may block until the peer does the same. Raises NcclFailed, as every method does."""
        ...

    def send(self, pieces: Sequence[Piece]) -> None:
        """Start to send the pieces in order, as one group. The peer's `receive` has pieces of the same sizes."""
        ...

    def receive(self, pieces: Sequence[Piece]) -> None: ...

    def is_done(self) -> bool:
        """Return whether all started work is done and received bytes are visible to the device."""
        ...

    def abort(self) -> None:
        """Stop running work and free the communicator. `is_done` then returns whether the work has stopped."""
        ...


class NcclLibrary(Protocol):
    def version(self) -> int:
        """Return the version of NCCL. Both sides need the same."""
        ...

    def device(self) -> bytes:
        """Return the name of the GPU, which two ranks may not share; empty if they may."""
        ...

    def unique_id(self) -> bytes: ...

    def connect(self, unique_id: bytes, rank: int) -> Communicator:
        """Connect. Blocks until the other rank does the same, forever if it does not."""
        ...


def why_not_loadable() -> str:
    """Return why cupy or its NCCL cannot be used; empty if they can."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return f"cupy with NCCL cannot be imported ({error})"
    if not nccl.available:
        return "this cupy comes without NCCL"
    if nccl.get_version() < _LEAST_VERSION:
        return f"NCCL {nccl.get_version()} is older than {_LEAST_VERSION}"
    return ""


@lru_cache(maxsize=16)
def cupy_nccl(device: int) -> "CupyNccl":
    """Return the object of a device. Exporter and importer of a process share its lock."""
    return CupyNccl(device)


class CupyNccl:
    """NCCL through cupy; implements NcclLibrary."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._calls = threading.Lock()
        self._uuid: bytes | None = None

    def version(self) -> int:
        from cupy.cuda import nccl

        return int(_checked(nccl.get_version))

    def device(self) -> bytes:
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and self.version() >= _SHARING_VERSION:
            return b""
        if self._uuid is None:
            self._uuid = _checked(lambda: _uuid(self._device))
        return self._uuid

    def unique_id(self) -> bytes:
        from cupy.cuda import nccl

        return bytes(_checked(nccl.get_unique_id))

    def connect(self, unique_id: bytes, rank: int) -> "CupyCommunicator":
        import cupy
        from cupy.cuda import nccl

        _checked(cupy.cuda.Device(self._device).use)  # of this thread, for all its later calls
        stream = _checked(lambda: cupy.cuda.Stream(non_blocking=True))
        scratch = _checked(lambda: cupy.cuda.alloc(_WARM_BYTES))
        communicator = _checked(lambda: nccl.NcclCommunicator(2, unique_id, rank))
        return CupyCommunicator(communicator, rank, self._calls, stream, scratch)


class CupyCommunicator:
    """A Communicator through cupy. It does not use torch's streams, which are few and shared, so no other work waits
    behind it."""

    def __init__(self, communicator: Any, rank: int, calls: threading.Lock, stream: Any, scratch: Any) -> None:
        self._communicator: Any = communicator
        self._rank, self._calls = rank, calls
        self._peer = IMPORTER_RANK if rank == EXPORTER_RANK else EXPORTER_RANK
        self._stream, self._scratch = stream, scratch

    def warm(self) -> None:
        pieces = [Piece(self._scratch.ptr, _WARM_BYTES)]
        if self._rank == EXPORTER_RANK:
            self.send(pieces)
        else:
            self.receive(pieces)

    def send(self, pieces: Sequence[Piece]) -> None:
        self._begin(self._communicator.send, pieces)

    def receive(self, pieces: Sequence[Piece]) -> None:
        self._begin(self._communicator.recv, pieces)

    def is_done(self) -> bool:
        if self._communicator is not None:
            _checked(self._communicator.check_async_error)
        return bool(_checked(lambda: self._stream.done))

    def abort(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            _checked(communicator.abort)

    def _begin(self, call: Callable[..., None], pieces: Sequence[Piece]) -> None:
        """Enqueue the calls as one group.

        No other stream has to be waited for: the bytes to send were complete before they were offered, and the
        destination is not in use."""
        from cupy.cuda import nccl

        with self._calls, _group():
            for piece in pieces:
                call(piece.address, piece.num_bytes, nccl.NCCL_UINT8, self._peer, self._stream.ptr)


def _uuid(device: int) -> bytes:
    """Return the UUID from torch, because cupy's ends at the first zero byte."""
    if not torch.cuda.is_available():
        raise RuntimeError("no GPU here")
    return str(torch.cuda.get_device_properties(device).uuid).encode()


@contextmanager
def _group() -> Iterator[None]:
    """Run calls as one group, which is ended in any case: otherwise the thread's next calls would join it."""
    from cupy.cuda import nccl

    _checked(nccl.groupStart)
    try:
        yield
    except (RuntimeError, KeyError) as error:
        raise NcclFailed(_named(error)) from error
    finally:
        _checked(nccl.groupEnd)


def _checked(call: Callable[[], _Result]) -> _Result:
    try:
        return call()
    except (RuntimeError, KeyError, MemoryError) as error:  # cupy's own errors are RuntimeErrors
        raise NcclFailed(_named(error)) from error


def _named(error: Exception) -> str:
    return f"unknown NCCL status {error}" if isinstance(error, KeyError) else str(error)
