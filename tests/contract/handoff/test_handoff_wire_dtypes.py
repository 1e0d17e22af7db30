"""Tests of hand-offs with quantised KV: the blocks that arrive, the counters, detected damage, and refusals."""

import asyncio
from dataclasses import replace

import pytest

from cluster.errors import HandOffReason
from tests.contract.rigs.handoff_parts import DEADLINE_S, LAYOUT
from tests.contract.rigs.handoff_rig import handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE

QUANTISED = ["int8", "fp8", "int4"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("wire_dtype", QUANTISED)
async def test_the_imported_blocks_are_the_quantised_blocks_of_the_source(transport: str, wire_dtype: str) -> None:
    async with handoff_rig(transport, wire_dtype=wire_dtype) as rig:
        prefill = rig.prefill(5 * BLOCK_SIZE + 2, num_choices=2)
        importing = rig.start_import(prefill)
        prefill.seal(2)
        await rig.read_arrived()
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            imported = await importing
            await prefill.released.wait()
        assert rig.holds(prefill, imported)
        assert not (rig.sent() == rig.source.raw).all()  # it was quantised at all
        assert imported.kv_bytes == rig.counters.num_bytes == 7 * rig.arriving.block_bytes
        assert rig.arriving.block_bytes < 0.6 * rig.source.block_bytes
        rig.decode.finish(1)
        rig.check_clean()


@pytest.mark.parametrize("wire_dtype", QUANTISED)
async def test_two_prompts_with_the_same_block_do_not_disturb_each_other(wire_dtype: str) -> None:
    """The second ticket's blocks are encoded while the first ticket's are being read."""
    async with handoff_rig("shm", wire_dtype=wire_dtype) as rig:
        first, second = rig.prefill(3 * BLOCK_SIZE), rig.prefill(3 * BLOCK_SIZE)
        rig.source.raw[list(second.block_ids)] = rig.source.raw[list(first.block_ids)]
        rig.watched.is_holding_back = True
        importing = rig.start_import(first)
        first.compute()
        async with asyncio.timeout(DEADLINE_S):
            await rig.watched.read_held_back.wait()
        rig.exporter.seal(second.ticket_id, first_index=0, block_ids=first.block_ids)  # as a prefix cache shares them
        await rig.digested()
        rig.watched.begin.set()
        async with asyncio.timeout(DEADLINE_S):
            assert rig.holds(first, await importing)
        assert rig.counters.num_digest_failures == 0
        rig.decode.finish(1)


@pytest.mark.parametrize("wire_dtype", QUANTISED)
async def test_one_flipped_bit_of_the_quantised_bytes_is_caught_and_read_again(wire_dtype: str) -> None:
    async with handoff_rig("shm", wire_dtype=wire_dtype) as rig:
        rig.watched.damage, rig.watched.num_damaged = rig.flip_a_bit, 1
        prefill = rig.prefill(2 * BLOCK_SIZE)
        importing = rig.start_import(prefill)
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            imported = await importing
        assert rig.counters.num_digest_failures == 1
        assert rig.holds(prefill, imported)
        rig.decode.finish(1)


@pytest.mark.parametrize("wire_dtype", QUANTISED)
async def test_workers_of_different_wire_dtypes_refuse_each_other(wire_dtype: str) -> None:
    async with handoff_rig("tcp", importer_layout=replace(LAYOUT, wire_dtype=wire_dtype)) as rig:
        prefill = rig.prefill(BLOCK_SIZE)
        importing = rig.start_import(prefill)
        match = f"wire_dtype: importer {wire_dtype}, exporter native"
        assert await rig.failure(importing, match=match) is HandOffReason.LAYOUT_MISMATCH
