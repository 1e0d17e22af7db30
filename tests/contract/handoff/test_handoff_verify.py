"""Tests of --kv-verify over real transports: the blocks that are compared, those that are accepted unverified, and
refusals.
"""

import asyncio

import pytest

from cluster.errors import HandOffReason
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.exporter.exporter import FirstToken, TailBlock
from tests.contract.rigs.handoff_parts import DEADLINE_S
from tests.contract.rigs.handoff_rig import handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE

OFF, SAMPLE = TransferSettings(kv_verify="off"), TransferSettings(kv_verify="sample")


@pytest.mark.parametrize(
    ("settings", "num_verified"), [(TransferSettings(), 21), (SAMPLE, 2), (OFF, 0)], ids=["all", "sample", "off"]
)
async def test_each_verify_mode_compares_its_share_of_blocks(settings: TransferSettings, num_verified: int) -> None:
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
async def test_a_verifying_importer_refuses_blocks_without_digests(importer: TransferSettings) -> None:
    async with handoff_rig("tcp", settings=OFF, importer_settings=importer) as rig:
        prefill = rig.prefill(BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.compute()
        assert await rig.failure(importing, match="gives no digests") is HandOffReason.UNVERIFIABLE
        rig.let_leases_lapse()
        assert prefill.released.is_set()
        rig.check_clean()


@pytest.mark.parametrize("passes_on", ["all", "sample"])
async def test_a_verifying_importer_refuses_unverified_provenance(passes_on: str) -> None:
    """A computes, B imports, C imports from B with --kv-verify all. The digests that B computes prove nothing about the
    blocks that B received: C takes the blocks only if B verified them."""
    middle = TransferSettings(kv_verify=passes_on)
    async with handoff_rig("tcp", importer_settings=middle) as rig:
        prefill = rig.prefill(5 * BLOCK_SIZE + 1)
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            at_b = await rig.start_import(prefill)
            await prefill.released.wait()
        assert len(at_b.unverified_block_ids) >= (4 if passes_on == "sample" else 0)
        assert bool(at_b.unverified_block_ids) == (passes_on == "sample")
        rig.decode.finish(1)
        rig.check_clean()
    async with handoff_rig("tcp", settings=middle, importer_settings=TransferSettings()) as rig:
        again = rig.prefill(5 * BLOCK_SIZE + 1)
        local = dict(zip([*at_b.sealed_block_ids, *at_b.tail_block_ids], again.block_ids, strict=True))
        unverified = {local[block_id] for block_id in at_b.unverified_block_ids}
        rig.exporter.seal(again.ticket_id, first_index=0, block_ids=again.block_ids[:5], unverified=unverified)
        tail = TailBlock(again.block_ids[5], 1, again.block_ids[5] in unverified)
        rig.exporter.finish(again.ticket_id, first_tokens=[FirstToken(100, ended=False)], tail=tail)
        importing = rig.start_import(again)
        async with asyncio.timeout(DEADLINE_S):
            if passes_on == "all":
                assert rig.holds(again, await importing)
                rig.decode.finish(1)
                await again.released.wait()
            else:
                reason = await rig.failure(importing, match="did not verify blocks")
                assert reason is HandOffReason.UNVERIFIED_PROVENANCE
                assert rig.counters.handoffs["importer", "tcp", "failed", "unverified_provenance"] == 1
                await rig.given_up(again)
        await rig.all_quiet()
        rig.check_clean()


@pytest.mark.parametrize("is_tail", [False, True], ids=["sealed", "tail"])
async def test_each_block_keeps_its_provenance_when_not_all_blocks_are_verified(is_tail: bool) -> None:
    async with handoff_rig("tcp", settings=SAMPLE) as rig:
        prefill = rig.prefill(2 * BLOCK_SIZE + 1)
        doubtful = prefill.block_ids[2 if is_tail else 0]
        rig.exporter.seal(prefill.ticket_id, first_index=0, block_ids=prefill.block_ids[:2], unverified={doubtful})
        tail = TailBlock(prefill.block_ids[2], 1, is_tail)
        rig.exporter.finish(prefill.ticket_id, first_tokens=[FirstToken(100, ended=False)], tail=tail)
        async with asyncio.timeout(DEADLINE_S):
            imported = await rig.start_import(prefill)
            await prefill.released.wait()
        local = imported.tail_block_ids[0] if is_tail else imported.sealed_block_ids[0]
        assert local in imported.unverified_block_ids, "verified on its way from there, and still not before"
        rig.decode.finish(1)
        rig.check_clean()
