"""The `nccl` transport: links made on demand, kept, ended and rebuilt, and calls that hang in the library.

The library is played by sockets where its behaviour is the subject. The real one, by cupy, is used where it is
installed: as far as it goes without a GPU, and all the way on one.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nccl import transport as nccl_importer
from kvtransfer.transports.nccl.exporting import NcclExporter
from kvtransfer.transports.nccl.transport import NcclImporter
from tests.contract.rigs.handoff_rig import handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE, random_pool
from tests.contract.rigs.nccl_sides import DEADLINE_S, LIMITS, NUM_BLOCKS, epoch, only, sides, until
from tests.contract.rigs.proofs import PROOFS
from tests.contract.rigs.socket_nccl import SocketNccl


async def test_a_links_communicator_is_made_once_and_kept() -> None:
    async with sides() as side:
        for number in range(1, 4):
            assert await side.moves_blocks(number)
        assert len(side.exports.communicators) == len(side.imports.communicators) == 1
        assert not side.exports.communicators[0].is_aborted


async def test_a_long_read_never_fills_the_librarys_queue() -> None:
    """The read has more runs than fit into one group; the transport waits for each group."""
    num_blocks = 1200
    async with sides(num_blocks=num_blocks) as side:
        channel = await side.open_channel()
        backwards = list(range(num_blocks - 1, -1, -1))
        await channel.read(backwards, list(range(num_blocks)))
        assert torch.equal(side.target.raw, side.source.raw[backwards])
        assert side.imports.communicators[0].most_begun == side.exports.communicators[0].most_begun == 1
        await channel.finish()


async def test_hand_offs_that_open_at_once_share_one_communicator() -> None:
    async with sides() as side:
        channels = await asyncio.gather(*(side.open_channel(number) for number in range(1, 6)))
        await asyncio.gather(*(channel.read([i], [i]) for i, channel in enumerate(channels)))
        assert torch.equal(side.target.raw[:5], side.source.raw[:5])
        assert len(side.imports.communicators) == 1


@pytest.mark.parametrize("who", ["exports", "imports"])
async def test_a_hanging_initialisation_is_abandoned_and_the_hand_off_uses_other_transports(who: str) -> None:
    limits = replace(LIMITS, initialise_s=0.1, agree_s=2.0, warm_s=0.1)
    async with sides(limits, **only(who, SocketNccl(hang="connect"))) as side:
        with pytest.raises(TransportError, match="did not initialise in time"):
            await side.open_channel()
        num_connects = getattr(side, who).num_connects
        for _ in range(3):
            with pytest.raises(TransportError):
                await side.open_channel()
        assert getattr(side, who).num_connects == num_connects == 1, "another try would cost another thread"
        await until(lambda: not side.exporter.reachable(side.importer.endpoint()))


@pytest.mark.parametrize(
    ("who", "call"),
    [
        ("exports", "unique_id"),
        ("exports", "connect"),
        ("exports", "done"),
        ("imports", "connect"),
        ("imports", "done"),
    ],
)
async def test_an_initialisation_that_fails_frees_both_sides_and_is_not_tried_for_a_while(who: str, call: str) -> None:
    limits = replace(LIMITS, initialise_s=0.3, warm_s=0.3, agree_s=2.0)
    async with sides(limits, **only(who, SocketNccl(fail=call))) as side:
        with pytest.raises(TransportError):
            await side.open_channel()
        with pytest.raises(TransportError):
            await side.open_channel()
        await until(lambda: not side.exporter.reachable(side.importer.endpoint()))
        for communicator in side.exports.communicators + side.imports.communicators:
            await until(lambda it=communicator: it.is_aborted)  # type: ignore[misc]


async def test_a_link_that_failed_is_tried_again_after_its_backoff() -> None:
    limits = replace(LIMITS, retry_s=0.2, agree_s=0.5, initialise_s=0.5, warm_s=0.5)
    async with sides(limits, exports=SocketNccl(fail="unique_id")) as side:
        with pytest.raises(TransportError):
            await side.open_channel()
        side.exports.fail = ""
        await until(lambda: side.exporter.reachable(side.importer.endpoint()))
        moved = False
        while not moved:  # the importer's pause began a little later than the exporter's
            with suppress(TransportError):
                moved = await side.moves_blocks()


async def test_the_loss_of_the_exporter_ends_a_read_and_all_its_writes_at_once() -> None:
    async with sides() as side:
        channel = await side.open_channel()
        side.imports.hang = "done"  # as a kernel that waits for its peer
        read = asyncio.create_task(channel.read([0], [0]))
        await until(side.imports.hanging.is_set)
        closing = asyncio.create_task(side.exporter.close())
        await until(lambda: side.imports.communicators[0].is_aborted)
        side.imports.hang = ""
        with pytest.raises(TransportError):
            await read
        await channel.destroy()
        await closing


async def test_a_lost_communicator_is_rebuilt_at_the_next_hand_off() -> None:
    async with sides() as side:
        assert await side.moves_blocks(1)
        side.importer._peers[next(iter(side.importer._peers))].link.poison("cut")  # type: ignore[union-attr]
        await until(lambda: side.exports.communicators[0].is_aborted)
        await until(lambda: side.imports.communicators[0].is_aborted)
        assert await side.moves_blocks(2)
        assert len(side.imports.communicators) == 2


async def test_an_idle_link_frees_its_communicator_when_the_exporter_is_gone() -> None:
    async with sides() as side:
        assert await side.moves_blocks()
        await side.exporter.close()
        await until(lambda: side.imports.communicators[0].is_aborted)


async def test_links_past_the_bound_free_their_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_importer, "_MAX_PEERS", 1)
    async with sides() as first, sides() as second:
        importer = first.importer
        assert await first.moves_blocks()
        channel = await importer.open_channel(epoch(1), second.exporter.grant(epoch(1)))
        await until(lambda: first.imports.communicators[0].is_aborted and first.exports.communicators[0].is_aborted)
        await channel.read([3], [3])
        await channel.finish()
        assert await first.moves_blocks(2)  # and they are made again when they are needed


async def test_an_abort_ends_a_cancelled_read_that_does_not_end_itself() -> None:
    async with sides() as side:
        channel, other = await side.open_channel(1), await side.open_channel(2)
        side.imports.hang = "done"
        read = asyncio.create_task(channel.read([0], [0]))
        await until(side.imports.hanging.is_set)
        waiting = asyncio.create_task(other.read([1], [1]))
        await asyncio.sleep(0)
        read.cancel()
        with suppress(asyncio.CancelledError):
            await read
        destroying = asyncio.create_task(channel.destroy())
        await until(lambda: side.imports.communicators[0].is_aborted)
        assert not destroying.done()  # the stream still reports that it works: nothing is proven
        side.imports.hang = ""
        await destroying
        with pytest.raises(TransportError):
            await waiting
        await other.destroy()
        assert await side.moves_blocks(3)


async def test_a_cancelled_read_that_ends_itself_keeps_the_communicator() -> None:
    async with sides(replace(LIMITS, grace_s=DEADLINE_S)) as side:
        channel = await side.open_channel()
        side.imports.hang = "done"
        read = asyncio.create_task(channel.read([0], [0]))
        await until(side.imports.hanging.is_set)
        read.cancel()
        with suppress(asyncio.CancelledError):
            await read
        destroying = asyncio.create_task(channel.destroy())
        await asyncio.sleep(0)
        side.imports.hang = ""
        await destroying
        assert await side.moves_blocks(2)
        assert len(side.imports.communicators) == 1


async def test_a_read_that_waits_for_its_turn_is_cancelled_without_harm() -> None:
    async with sides() as side:
        first, second = await side.open_channel(1), await side.open_channel(2)
        side.imports.hang = "done"
        reads = [asyncio.create_task(first.read([0], [0]))]
        await until(side.imports.hanging.is_set)
        reads.append(asyncio.create_task(second.read([1], [1])))
        await asyncio.sleep(0)
        before = side.target.raw[1].clone()
        reads[1].cancel()
        with suppress(asyncio.CancelledError):
            await reads[1]
        await second.destroy()
        side.imports.hang = ""
        await reads[0]
        assert torch.equal(side.target.raw[1], before)
        assert len(side.imports.communicators) == 1 and await side.moves_blocks(3)


async def test_a_transfer_past_its_deadline_ends_the_communicator() -> None:
    async with sides(replace(LIMITS, transfer_s=0.2)) as side:
        channel = await side.open_channel()
        side.exports.hang = "done"
        await channel.read([0], [0])
        with pytest.raises(TransportError):  # the exporter's side never ended
            await channel.read([1], [1])
        await until(lambda: side.exports.communicators[0].is_aborted)
        await channel.destroy()


async def test_a_hanging_abort_keeps_the_quarantine_and_blocks_no_other_link() -> None:
    async with sides(replace(LIMITS, abort_s=0.2)) as side:
        channel = await side.open_channel()
        side.imports.hang = "done"
        read = asyncio.create_task(channel.read([0], [0]))
        await until(side.imports.hanging.is_set)
        side.imports.hanging.clear()
        side.imports.hang = "abort"
        side.importer._peers[next(iter(side.importer._peers))].link.poison("cut")  # type: ignore[union-attr]
        await until(side.imports.hanging.is_set)
        destroying = asyncio.create_task(channel.destroy())
        with pytest.raises(TransportError):
            await side.open_channel(2)
        done, _ = await asyncio.wait([destroying, read], timeout=0.3)
        assert not done
        side.imports.let_go()
        await destroying
        with suppress(TransportError):
            await read


async def test_a_hanging_link_does_not_stop_another_link() -> None:
    limits = replace(LIMITS, initialise_s=5.0)
    imports = SocketNccl()
    target = random_pool(NUM_BLOCKS, seed=2)
    importer = NcclImporter(memory=target, proofs=PROOFS, library=imports, limits=limits)
    stuck = SocketNccl(hang="connect")
    exporters = []
    for library in (stuck, SocketNccl()):
        source = random_pool(NUM_BLOCKS, seed=1)
        exporter = NcclExporter(
            memory=source, proofs=PROOFS, library=library, host="127.0.0.1", advertise_host="127.0.0.1", limits=limits
        )
        await exporter.start()
        exporters.append(exporter)
    async with asyncio.timeout(DEADLINE_S):
        opening = asyncio.create_task(importer.open_channel(epoch(1), exporters[0].grant(epoch(1))))
        await until(stuck.hanging.is_set)
        channel = await importer.open_channel(epoch(2), exporters[1].grant(epoch(2)))
        await channel.read([5], [5])
        assert torch.equal(target.raw[5], random_pool(NUM_BLOCKS, seed=1).raw[5])
        assert not opening.done()
        stuck.let_go()
        await opening
        await importer.close()
        for exporter in exporters:
            await exporter.close()


async def test_nccl_is_not_offered_to_another_nccl_version_or_the_same_gpu() -> None:
    async with sides(exports=SocketNccl(device=b"gpu-0"), imports=SocketNccl(device=b"gpu-1")) as side:
        assert side.exporter.reachable(side.importer.endpoint())
        assert not side.exporter.reachable(b"")
        for other in (SocketNccl(device=b"gpu-0"), SocketNccl(device=b"gpu-1", version=21_805)):
            importer = NcclImporter(memory=side.target, proofs=PROOFS, library=other, limits=LIMITS)
            assert not side.exporter.reachable(importer.endpoint())


async def test_another_version_is_refused_without_harm_to_the_link() -> None:
    imports = SocketNccl(version=21_805)
    async with sides(imports=imports) as side:
        with pytest.raises(TransportError, match="the exporter has NCCL 22807, and the importer has 21805"):
            await side.open_channel()
        imports._version = 22_807
        assert await side.moves_blocks()


async def test_a_refused_read_keeps_the_communicator() -> None:
    async with sides() as side:
        channel = await side.open_channel(1)
        side.exporter.revoke(epoch(1))
        with pytest.raises(TransportError, match="has not admitted this epoch"):
            await channel.read([0], [0])
        await channel.destroy()
        assert await side.moves_blocks(2)
        assert len(side.imports.communicators) == 1


async def test_a_hand_off_without_a_communicator_continues_over_tcp() -> None:
    async with handoff_rig("broken nccl", alternatives=["tcp"]) as rig:
        prefill = rig.prefill(2 * BLOCK_SIZE + 1)
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            imported = await rig.start_import(prefill)
            await prefill.released.wait()
        assert rig.holds(prefill, imported) and imported.transport == "tcp"
        assert rig.counters.fallbacks == [("nccl", "tcp", "open_failed")]
        rig.decode.finish(1)
        rig.check_clean()
