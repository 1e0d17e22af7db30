"""--kv-verify over real transports: what is compared, what is taken as it comes, and what is refused."""

import asyncio

import pytest

from cluster.clock import ManualClock
from cluster.errors import HandOffReason
from cluster.transfer_settings import TransferSettings
from tests.contract.handoff_rig import DEADLINE_S, handoff_rig
from tests.contract.kv_pools import BLOCK_SIZE

OFF, SAMPLE = TransferSettings(kv_verify="off"), TransferSettings(kv_verify="sample")


@pytest.mark.parametrize(
    ("settings", "num_verified"), [(TransferSettings(), 21), (SAMPLE, 2), (OFF, 0)], ids=["all", "sample", "off"]
)
async def test_so_many_blocks_are_compared_with_their_digests(settings: TransferSettings, num_verified: int) -> None:
    async with handoff_rig("tcp", settings=settings) as rig:
        prefill = rig.prefill(21 * BLOCK_SIZE)
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            assert rig.holds(prefill, await rig.start_import(prefill))
            await prefill.released.wait()
        assert rig.counters.num_verified == num_verified
        assert rig.counters.num_verified + rig.counters.num_unverified == 21
        rig.decode.finish(1)
        rig.check_clean()


async def test_a_sample_of_one_block_finds_its_damage() -> None:
    async with handoff_rig("tcp", settings=SAMPLE) as rig:
        rig.watched.num_damaged = 1
        rig.watched.damage = rig.flip_a_bit
        prefill = rig.prefill(BLOCK_SIZE)
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            assert rig.holds(prefill, await rig.start_import(prefill))
        assert rig.counters.num_digest_failures == 1
        rig.decode.finish(1)


@pytest.mark.parametrize("importer", [TransferSettings(), SAMPLE], ids=["all", "sample"])
async def test_who_verifies_refuses_blocks_without_digests(importer: TransferSettings) -> None:
    clock = ManualClock()
    async with handoff_rig("tcp", settings=OFF, importer_settings=importer, exporter_clock=clock) as rig:
        prefill = rig.prefill(BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.compute()
        assert await rig.failure(importing, match="gives no digests") is HandOffReason.UNVERIFIABLE
        rig.let_leases_lapse(clock)
        assert prefill.released.is_set()
        rig.check_clean()
