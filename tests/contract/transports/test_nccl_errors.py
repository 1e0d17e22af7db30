"""Errors that nobody expects, such as too little memory, in the calls of the transport `nccl`."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nccl.library import Piece
from tests.contract.rigs.nccl_sides import DEADLINE_S, LIMITS, only, sides, until
from tests.contract.rigs.socket_nccl import SocketCommunicator, SocketNccl


async def test_an_unexpected_error_of_a_read_ends_the_communicator_before_the_channel_is_quiet() -> None:
    """The library may have begun to write by then: memory runs short while the pieces of a read are enqueued."""
    async with sides() as side:
        assert await side.moves_blocks(1)
        (ours,) = side.imports.communicators
        begin = ours.receive

        def receive(pieces: Sequence[Piece]) -> None:
            begin(pieces)
            raise MemoryError

        ours.receive = receive  # type: ignore[method-assign]
        channel = await side.open_channel(2)
        with pytest.raises(TransportError, match="MemoryError"):
            await channel.read([3], [1])
        await channel.destroy()
        assert ours.is_aborted


@pytest.mark.parametrize("who", ["exports", "imports"])
async def test_an_unexpected_error_while_a_communicator_is_made_ends_the_link(who: str) -> None:
    """A link that had not ended would keep the pair from making another one."""
    library = SocketNccl()

    def connect(unique_id: bytes, rank: int) -> SocketCommunicator:
        raise MemoryError

    library.connect = connect  # type: ignore[method-assign]
    async with sides(replace(LIMITS, initialise_s=0.2, warm_s=0.2), **only(who, library)) as side:
        with pytest.raises(TransportError):
            await side.open_channel()
        peers = side.exporter._peers if who == "exports" else side.importer._peers
        (peer,) = peers.values()
        await until(lambda: peer.link is not None and peer.link.quiet.is_set())


async def test_an_exporter_that_goes_while_nccl_initialises_is_not_waited_for() -> None:
    """Nothing can interrupt the library's constructor, but the connection tells that its peer will not come."""

    def fail(unique_id: bytes, rank: int) -> SocketCommunicator:
        raise MemoryError

    exports = SocketNccl()
    exports.connect = fail  # type: ignore[method-assign]
    limits = replace(LIMITS, initialise_s=10 * DEADLINE_S)
    async with sides(limits, exports=exports, imports=SocketNccl(hang="connect")) as side:
        with pytest.raises(TransportError, match="ended the connection while NCCL initialised"):
            await side.open_channel()
