"""Tests that an import that fails or is cancelled at any await, over real gRPC, returns its blocks on both workers and
fails at its caller at once."""

import asyncio

import pytest

from cluster.errors import HandOffFailed, HandOffReason
from tests.contract.rigs.handoff_parts import DEADLINE_S
from tests.contract.rigs.handoff_rig import Rig, handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE
from tests.faults.injection import AwaitFaults, SubmitFaults, When, Where

_ERRORS = (MemoryError, OSError, RuntimeError, KeyError)
_NUM_TOKENS = 3 * BLOCK_SIZE + 2


async def _import_once(rig: Rig, handoff_id: int, faults: AwaitFaults | SubmitFaults) -> None:
    prefill = rig.prefill(_NUM_TOKENS)
    if isinstance(faults, AwaitFaults):
        faults.install()
    importing = rig.start_import(prefill, handoff_id)
    prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait([importing])
        faults.disarm()
        if importing.cancelled() or importing.exception() is not None:
            rig.exporter.fail(prefill.ticket_id, reason=HandOffReason.CANCELLED, detail="")
        else:
            rig.decode.finish(handoff_id)
        await prefill.released.wait()
        while rig.importer.num_live:
            await asyncio.wait(tuple(rig.importer._runs))
            await asyncio.sleep(0)  # their callbacks
    assert not list(rig.importer.owners())
    assert not rig.unhealthy.is_set()
    rig.check_clean()


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("error", _ERRORS)
@pytest.mark.parametrize("coroutine", ["importer.py:Importer.import_blocks", "handoff_driver.py:HandOffDriver._re"])
async def test_an_exception_at_any_await_of_an_import_gives_its_blocks_back(
    coroutine: str, error: type[Exception], when: When
) -> None:
    async with handoff_rig("loopback") as rig:
        num_points = at = 0
        while at <= num_points:
            faults = AwaitFaults(f"kvtransfer/importer/{coroutine}", at - 1, error, when)
            await _import_once(rig, at, faults)
            num_points = max(num_points, faults.num_awaits)
            at += 1
    assert num_points >= 1


@pytest.mark.parametrize("when", When)
async def test_a_cancellation_at_any_await_of_an_import_gives_its_blocks_back(when: When) -> None:
    async with handoff_rig("loopback") as rig:
        for at in range(2):
            faults = AwaitFaults(
                "kvtransfer/importer/importer.py:Importer.import_blocks", at, asyncio.CancelledError, when
            )
            await _import_once(rig, at, faults)


@pytest.mark.parametrize("where", Where)
@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
async def test_an_exception_of_any_thread_of_a_hand_off_gives_its_blocks_back(
    error: type[Exception], where: Where
) -> None:
    """The exceptions are raised where the exporter and the importer compute digests."""
    num_points = at = 0
    while at <= num_points:
        async with handoff_rig("loopback", wire_dtype="int8") as rig:
            faults = SubmitFaults(at - 1, error, where)
            with pytest.MonkeyPatch.context() as patch:
                faults.install(patch)
                await _import_once(rig, at, faults)
            num_points = max(num_points, faults.num_submitted)
            await _import_once(rig, at + 1, SubmitFaults())
            at += 1
    assert num_points >= 2


async def test_an_error_that_no_transport_should_raise_ends_the_import_at_once() -> None:
    async with handoff_rig("loopback") as rig:
        prefill = rig.prefill(_NUM_TOKENS)
        faults = AwaitFaults(
            "kvtransfer/importer/handoff_driver.py:HandOffDriver._reserve", 0, KeyError, When.BEFORE_ITS_RESULT
        )
        taken = rig.decode.pool.reserve(rig.decode.pool.num_blocks)
        assert taken is not None, "the reservation has to wait"
        faults.install()
        importing = rig.start_import(prefill)
        prefill.compute()
        with pytest.raises(HandOffFailed, match="KeyError"):
            async with asyncio.timeout(DEADLINE_S):
                await importing
        faults.disarm()
        rig.decode.pool.drop_references(taken)
        await rig.given_up(prefill)
        rig.check_clean()
