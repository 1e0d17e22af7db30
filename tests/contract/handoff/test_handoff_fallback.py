"""Tests of an attempt with several transports: blocks whose read failed are read by the next transport, and not before
the failed read is proven quiet.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.errors import HandOffReason
from cluster.messages import Epoch
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.transports.base import TransportError
from tests.contract.rigs.handoff_parts import DEADLINE_S, EXPORTER
from tests.contract.rigs.handoff_rig import Rig, handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with handoff_rig("shm", alternatives=["tcp"]) as rig:
        yield rig
        rig.check_clean()


async def test_a_channel_that_does_not_open_leaves_the_hand_off_to_the_next_transport(rig: Rig) -> None:
    rig.watched.is_unopenable = True
    prefill = rig.prefill(2 * BLOCK_SIZE + 1)
    prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        imported = await rig.start_import(prefill)
        await prefill.released.wait()
    assert rig.holds(prefill, imported) and imported.transport == "tcp"
    assert rig.counters.fallbacks == [("shm", "tcp", "open_failed")]
    assert rig.counters.handoffs["importer", "tcp", "ok", ""] == 1
    rig.decode.finish(1)


async def test_a_read_that_fails_half_way_is_finished_by_the_next_transport(rig: Rig) -> None:
    """Blocks that have arrived are not read again."""
    prefill = rig.prefill(3 * BLOCK_SIZE + 1)
    importing = rig.start_import(prefill)
    prefill.seal(2)
    first = await rig.read_arrived()
    await rig.machine_idle()
    rig.watched.num_failing = 1
    prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        imported = await importing
        await prefill.released.wait()
    assert rig.holds(prefill, imported)
    assert rig.counters.fallbacks == [("shm", "tcp", "read_failed")]
    again = {block_id for read in rig.alternatives[0].reads for block_id in read.local_block_ids}
    assert again == {*imported.sealed_block_ids, *imported.tail_block_ids} - set(first.local_block_ids)
    rig.decode.finish(1)


async def test_a_read_that_never_ends_is_destroyed_and_finished_by_the_next_transport() -> None:
    async with handoff_rig("shm", alternatives=["tcp"]) as rig:
        rig.watched.is_holding = True
        prefill = rig.prefill(2 * BLOCK_SIZE)
        prefill.compute()
        importing = rig.start_import(prefill)
        await rig.read_arrived()
        rig.pass_at_importer(TransferSettings().read_timeout_s)
        async with asyncio.timeout(DEADLINE_S):
            imported = await importing
            await prefill.released.wait()
        assert rig.holds(prefill, imported)
        assert rig.counters.fallbacks == [("shm", "tcp", "read_timeout")]
        rig.decode.finish(1)
        again = rig.prefill(BLOCK_SIZE)
        again.compute()
        async with asyncio.timeout(DEADLINE_S):
            assert (await rig.start_import(again, 2)).transport == "tcp"  # the other one is not tried for a while
            await again.released.wait()
        assert len(rig.counters.fallbacks) == 1
        rig.decode.finish(2)
        rig.check_clean()


async def test_no_other_transport_reads_while_the_first_may_still_write() -> None:
    settings = TransferSettings(quarantine_s=0.1)
    async with handoff_rig("shm", alternatives=["tcp"], settings=settings) as rig:
        rig.watched.num_failing = 1
        rig.watched.is_indestructible = True
        prefill = rig.prefill(2 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.compute()
        await asyncio.wait_for(rig.watched.destroying.wait(), DEADLINE_S)
        rig.pass_at_importer(settings.quarantine_s)
        assert await rig.failure(importing) is HandOffReason.READ_TIMEOUT
        assert not rig.alternatives[0].reads and not rig.counters.fallbacks
        assert rig.decode.pool.counts()["quarantined"] == len(rig.watched.reads[0].local_block_ids)
        rig.pass_at_importer(settings.quarantine_s)
        assert rig.unhealthy.is_set()


async def test_a_hand_off_fails_by_name_when_every_transport_fails() -> None:
    async with handoff_rig("shm", alternatives=["tcp"]) as rig:
        rig.watched.is_unopenable = rig.alternatives[0].is_unopenable = True
        prefill = rig.prefill(BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.compute()
        assert await rig.failure(importing, match="no way there") is HandOffReason.READ_FAILED
        rig.let_leases_lapse()
        assert prefill.released.is_set()
        rig.check_clean()


async def test_a_failed_transport_is_not_offered_to_that_exporter_for_a_while(rig: Rig) -> None:
    rig.watched.is_unopenable = True
    for handoff_id in (1, 2):
        prefill = rig.prefill(BLOCK_SIZE)
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            imported = await rig.start_import(prefill, handoff_id)
            await prefill.released.wait()
        assert imported.transport == "tcp"
        rig.decode.finish(handoff_id)
    assert len(rig.counters.fallbacks) == 1  # the second did not try shm at all


async def test_no_transport_reads_blocks_of_a_settled_attempt(rig: Rig) -> None:
    rig.watched.is_unopenable = True
    prefill = rig.prefill(BLOCK_SIZE)
    prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        await rig.start_import(prefill)
        await prefill.released.wait()
        rig.decode.finish(1)
        rig.watched.is_unopenable = False
        for transport in (rig.watched, rig.alternatives[0]):
            epoch = Epoch(EXPORTER, prefill.ticket_id, 1)
            with pytest.raises(TransportError):
                await (await transport.open_channel(epoch, transport.endpoint_seen)).read([0], [0])
