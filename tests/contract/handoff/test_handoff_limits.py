"""Hand-offs in time and in space: leases that lapse, waits that end, pools that are too small, reads that never end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from cluster.clock import MonotonicClock
from cluster.errors import HandOffReason
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.exporter.ticket_driver import IncomingCall
from kvtransfer.protocol.handoff import Renew, Settle
from tandem.internal.v1 import kv_pb2
from tests.contract.rigs.handoff_parts import DEADLINE_S, finish_received
from tests.contract.rigs.handoff_rig import handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE
from tests.loopback import Fault

TRANSPORTS = ["loopback", "tcp", "shm", "nixl", "nccl", "cuda_ipc"]


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 -- no event tells
        await asyncio.sleep(0)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_lapsed_lease_frees_its_blocks_and_fails_its_importer(transport: str) -> None:
    async with handoff_rig(transport) as rig:
        rig.watched.is_holding = True
        prefill = rig.prefill(2 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.compute()
        read = await rig.read_arrived()
        rig.pass_at_exporter(TransferSettings().lease_s)
        assert prefill.released.is_set() and rig.counters.num_lapses == 1
        assert await rig.failure(importing) is HandOffReason.LEASE_LAPSED
        read.gate.set()
        await rig.all_quiet()
        rig.check_clean()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_blocks_that_were_reused_during_a_read_are_never_decoded(transport: str) -> None:
    """The exporter's clock runs ahead and its blocks are rewritten before the importer learns of it."""
    async with handoff_rig(transport) as rig:
        prefill = rig.prefill(2 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.seal(1)
        await rig.read_arrived()
        await rig.machine_idle()
        rig.source.raw[prefill.block_ids[1]].zero_()
        prefill.seal(1)
        rig.exporter_clock.advance(TransferSettings().lease_s)  # no lease was reaped, so only Settle can show it
        prefill.finish()
        assert await rig.failure(importing) is HandOffReason.LEASE_LAPSED
        async with asyncio.timeout(DEADLINE_S):
            await prefill.released.wait()
        rig.check_clean()


async def test_renewals_keep_a_lease_during_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lease durations pass between two blocks, each half only after the renewal of the one before."""
    half_s = TransferSettings().lease_s / 2
    async with handoff_rig("tcp") as rig, asyncio.timeout(DEADLINE_S):
        renewed, receive = asyncio.Event(), rig.exporter.receive

        def watched(call: IncomingCall, message: Renew | Settle) -> None:
            receive(call, message)
            renewed.set()

        monkeypatch.setattr(rig.exporter, "receive", watched)
        prefill = rig.prefill(2 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.seal(1)
        await rig.read_arrived()
        for _ in range(4):
            rig.pass_at_exporter(half_s)
            assert not prefill.released.is_set()
            renewed.clear()
            rig.pass_at_importer(half_s)
            await renewed.wait()
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            assert rig.holds(prefill, await importing)
            await prefill.released.wait()
        rig.decode.finish(1)
        rig.check_clean()


async def test_a_lease_ends_at_its_deadline_without_a_request() -> None:
    settings = TransferSettings(lease_s=0.05, max_lease_s=0.05)
    async with handoff_rig("tcp", settings=settings, exporter_clock=MonotonicClock()) as rig:
        prefill = rig.prefill(2 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.seal(1)
        async with asyncio.timeout(DEADLINE_S):
            await prefill.released.wait()
        assert await rig.failure(importing) is HandOffReason.LEASE_LAPSED
        await rig.all_quiet()  # the first block may still be on its way when the lease ends
        rig.check_clean()


async def test_a_ticket_without_an_importer_is_dropped() -> None:
    async with handoff_rig("tcp") as rig:
        prefill = rig.prefill(BLOCK_SIZE + 1)
        rig.pass_at_exporter(10 * TransferSettings().attach_timeout_s)
        assert not prefill.released.is_set()  # nothing is sealed: it waits in the queue, and pins nothing
        prefill.seal(1)
        await rig.digested()
        rig.pass_at_exporter(TransferSettings().attach_timeout_s)
        assert prefill.released.is_set()
        assert rig.counters.handoffs == {("exporter", "", "failed", "ticket_expired"): 1}
        assert await rig.failure(rig.start_import(prefill)) is HandOffReason.UNKNOWN_TICKET
        rig.check_clean()


async def test_a_ticket_whose_router_died_is_dropped_within_a_lease() -> None:
    async with handoff_rig("tcp", settings=TransferSettings(lease_s=0.05)) as rig:
        prefill = rig.prefill(BLOCK_SIZE + 1)
        prefill.compute()
        rig.exporter.expect_soon(prefill.ticket_id)
        async with asyncio.timeout(DEADLINE_S):
            await prefill.released.wait()
        assert await rig.failure(rig.start_import(prefill)) is HandOffReason.UNKNOWN_TICKET
        rig.check_clean()


async def test_the_end_of_the_router_does_not_disturb_an_attached_importer() -> None:
    settings = TransferSettings(lease_s=0.05)
    async with handoff_rig("tcp", settings=settings) as rig:
        rig.watched.is_holding = True
        prefill = rig.prefill(BLOCK_SIZE + 1)
        importing = rig.start_import(prefill)
        prefill.compute()
        read = await rig.read_arrived()
        withdrawn = asyncio.Event()
        rig.exporter.expect_soon(prefill.ticket_id)
        asyncio.get_running_loop().call_later(settings.lease_s, withdrawn.set)  # after the exporter's own timer
        await withdrawn.wait()
        assert not prefill.released.is_set()
        rig.watched.is_holding = False
        read.gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert rig.holds(prefill, await importing)
            await prefill.released.wait()
        rig.decode.finish(1)
        rig.check_clean()


async def test_an_importer_without_blocks_waits_and_holds_nothing() -> None:
    async with handoff_rig("tcp", num_decode_blocks=4) as rig:
        running = rig.decode.pool.reserve(2)
        assert running is not None
        prefill, waits_s = rig.prefill(2 * BLOCK_SIZE + 1), 2.0
        importing = rig.start_import(prefill)
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            await rig.decode.asked.wait()
        await finish_received(rig.importer)
        assert rig.decode.pool.num_free == 2 and not rig.watched.reads
        rig.pass_at_importer(waits_s)
        rig.decode.granted[0] = running
        rig.decode.finish(0)
        async with asyncio.timeout(DEADLINE_S):
            imported = await importing
            assert rig.holds(prefill, imported)
            await prefill.released.wait()
        assert (imported.queue_s, imported.exposed_transfer_s, imported.total_s) == (waits_s, 0.0, waits_s)
        rig.decode.finish(1)
        rig.check_clean()


async def test_an_importer_that_waits_for_blocks_reports_when_its_exporter_computes() -> None:
    async with handoff_rig("tcp", num_decode_blocks=3) as rig, asyncio.timeout(DEADLINE_S):
        running = rig.decode.pool.reserve(1)
        assert running is not None
        prefills = [rig.prefill(2 * BLOCK_SIZE + 1) for _ in range(2)]
        imports = [rig.start_import(prefill, handoff_id) for handoff_id, prefill in enumerate(prefills)]
        await _until(lambda: len(rig.decode.waiting) == 2)
        assert not rig.decode.announced
        prefills[1].seal(1)
        await _until(lambda: rig.decode.announced == {1})
        for prefill in prefills:
            prefill.compute()
        await _until(lambda: rig.decode.announced == {0, 1})
        in_order = rig.decode.waiting
        rig.decode.granted[2] = running
        rig.decode.finish(2)
        for handoff_id in in_order:
            assert rig.holds(prefills[handoff_id], await imports[handoff_id])
            await prefills[handoff_id].released.wait()
            rig.decode.finish(handoff_id)
        rig.check_clean()


async def test_an_importer_that_waits_for_blocks_can_be_cancelled() -> None:
    async with handoff_rig("tcp", num_decode_blocks=2) as rig:
        running = rig.decode.pool.reserve(1)
        assert running is not None
        prefill = rig.prefill(2 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        async with asyncio.timeout(DEADLINE_S):
            await rig.decode.asked.wait()
            importing.cancel()
            with suppress(asyncio.CancelledError):
                await importing
            await prefill.released.wait()
        rig.decode.pool.drop_references(running)
        rig.check_clean()


async def test_hand_offs_that_do_not_fit_together_come_one_after_the_other() -> None:
    async with handoff_rig("shm", num_decode_blocks=4) as rig:
        prefills = [rig.prefill(3 * BLOCK_SIZE) for _ in range(3)]
        imports = [rig.start_import(prefill, handoff_id) for handoff_id, prefill in enumerate(prefills)]
        for prefill in prefills:
            prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            left = dict(enumerate(imports))
            while left:
                await asyncio.wait(left.values(), return_when=asyncio.FIRST_COMPLETED)
                (handoff_id,) = [handoff_id for handoff_id, task in left.items() if task.done()]  # never two at once
                assert rig.holds(prefills[handoff_id], await left.pop(handoff_id))
                rig.decode.finish(handoff_id)
            for prefill in prefills:
                await prefill.released.wait()
        rig.check_clean()


async def test_a_hand_off_that_can_never_fit_is_refused_with_the_numbers() -> None:
    async with handoff_rig("tcp", num_decode_blocks=2) as rig:
        prefill = rig.prefill(3 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.seal(1)
        assert await rig.failure(importing, match="3 of 2 blocks") is HandOffReason.NOT_ENOUGH_BLOCKS
        rig.let_leases_lapse()
        assert prefill.released.is_set()
        rig.check_clean()


async def test_an_exporter_that_does_not_answer_attach_counts_as_lost_after_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silent(_: IncomingCall) -> AsyncIterator[kv_pb2.ExporterMessage]:
        await asyncio.Event().wait()
        yield kv_pb2.ExporterMessage()

    monkeypatch.setattr(IncomingCall, "messages", silent)
    settings = TransferSettings(lease_s=0.2)
    async with handoff_rig("loopback", settings=settings) as rig, asyncio.timeout(DEADLINE_S):
        importing = rig.start_import(rig.prefill(BLOCK_SIZE))
        await _until(lambda: rig.importer.num_live == 1)
        rig.pass_at_importer(settings.lease_s / 2)
        assert rig.importer.num_live == 1, "it still waits"
        rig.pass_at_importer(settings.lease_s / 2)
        assert await rig.failure(importing, match="did not answer while attaching") is HandOffReason.EXPORTER_LOST


async def test_a_read_that_does_not_end_has_its_channel_destroyed() -> None:
    """Its blocks stay in quarantine until destroying the channel has proven it quiet."""
    settings = TransferSettings()
    async with handoff_rig("loopback", faults={1: Fault.DROP}) as rig:
        prefill = rig.prefill(3 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.compute()
        await asyncio.wait_for(rig.schedule.holding.wait(), DEADLINE_S)
        rig.pass_at_importer(settings.read_timeout_s)
        assert await rig.failure(importing) is HandOffReason.READ_TIMEOUT
        assert rig.decode.pool.counts()["quarantined"] == 3
        rig.pass_at_importer(settings.quarantine_s)
        await rig.all_quiet()
        rig.let_leases_lapse()
        assert prefill.released.is_set()
        rig.check_clean()


async def test_a_read_that_cannot_be_ended_is_reported() -> None:
    settings = TransferSettings(quarantine_s=0.1)
    async with handoff_rig("loopback", settings=settings, faults={0: Fault.DROP}) as rig:
        rig.watched.is_indestructible = True
        prefill = rig.prefill(BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.compute()
        await asyncio.wait_for(rig.schedule.holding.wait(), DEADLINE_S)
        rig.pass_at_importer(settings.read_timeout_s)
        assert await rig.failure(importing) is HandOffReason.READ_TIMEOUT
        rig.pass_at_importer(settings.quarantine_s)
        assert not rig.unhealthy.is_set(), "its channel is being destroyed"
        rig.pass_at_importer(settings.quarantine_s)
        assert rig.unhealthy.is_set()
        assert rig.decode.pool.counts()["quarantined"] == 1


@pytest.mark.parametrize(
    ("faults", "outcome"),
    [
        ({1: Fault.DUPLICATE}, None),
        ({0: Fault.REORDER}, None),
        ({2: Fault.CORRUPT}, None),
        ({0: Fault.CORRUPT, 3: Fault.CORRUPT}, HandOffReason.DIGEST_MISMATCH),
        ({1: Fault.KILL}, HandOffReason.READ_FAILED),
    ],
    ids=["duplicate", "reorder", "corrupt", "corrupt twice", "kill"],
)
async def test_transport_faults_are_survived_or_named(faults: dict[int, Fault], outcome: HandOffReason | None) -> None:
    async with handoff_rig("loopback", faults=faults) as rig:
        prefill = rig.prefill(3 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.compute()
        if outcome is None:
            async with asyncio.timeout(DEADLINE_S):
                assert rig.holds(prefill, await importing)
            rig.decode.finish(1)
        else:
            assert await rig.failure(importing) is outcome
            rig.let_leases_lapse()
        async with asyncio.timeout(DEADLINE_S):
            await prefill.released.wait()
        await rig.all_quiet()
        rig.check_clean()


@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.STOP])
async def test_a_held_back_message_arrives_when_it_is_resumed(fault: Fault) -> None:
    async with handoff_rig("loopback", faults={1: fault}) as rig:
        prefill = rig.prefill(3 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            await rig.schedule.holding.wait()
            assert not importing.done()
            rig.schedule.resume()
            assert rig.holds(prefill, await importing)
            await prefill.released.wait()
        rig.decode.finish(1)
        rig.check_clean()
