"""What the `nccl` transport needs of NCCL, and no more: two implementations, cupy's and the tests'."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

EXPORTER_RANK, IMPORTER_RANK = 0, 1


class NcclFailed(Exception):
    """The library refused or reported a failure: the communicator can only be aborted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a pool, by address."""

    address: int
    num_bytes: int


class Communicator(Protocol):
    """Between two ranks, on a stream of its own. All of its methods are for one thread, the one that connected: NCCL
    allows an abort only while no other thread is in a call of the same communicator."""

    def warm(self) -> None:
        """Begins the first message, exporter to importer, which builds the connections. May block until the peer does
        the same. Raises NcclFailed, as every method does."""
        ...

    def send(self, pieces: Sequence[Piece]) -> None:
        """Begins sending them in order, as one group. The peer's `receive` has pieces of the same sizes."""
        ...

    def receive(self, pieces: Sequence[Piece]) -> None: ...

    def is_done(self) -> bool:
        """Nothing that was begun still runs; what was received is visible to the device."""
        ...

    def abort(self) -> None:
        """Tells what runs to stop, and frees the communicator; `is_done` then says when it has stopped."""
        ...


class NcclLibrary(Protocol):
    def version(self) -> int:
        """Two sides need the same."""
        ...

    def device(self) -> bytes:
        """Names the GPU, which two ranks may not share; empty where they may."""
        ...

    def unique_id(self) -> bytes: ...

    def connect(self, unique_id: bytes, rank: int) -> Communicator:
        """Blocks until the other rank does the same, for ever if it does not."""
        ...
