"""One contract for hand-offs, whatever the transport: real pools, real gRPC, real sockets and shared memory."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.errors import HandOffFailed, HandOffReason
from tests.contract.handoff_rig import DEADLINE_S, Rig, handoff_rig
from tests.contract.kv_pools import BLOCK_SIZE

TRANSPORTS = ["loopback", "tcp", "shm"]


@pytest.fixture(params=TRANSPORTS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with handoff_rig(request.param) as rig:
        yield rig
        rig.check_clean()


@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 2])
async def test_a_prompt_of_any_length_arrives_intact(rig: Rig, num_tokens: int) -> None:
    prefill = rig.prefill(num_tokens)
    importing = rig.start_import(prefill)
    prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        imported = await importing
        await prefill.released.wait()
    assert rig.holds(prefill, imported)
    assert len(imported.sealed_block_ids) == num_tokens // BLOCK_SIZE
    assert len(imported.tail_block_ids) == (1 if num_tokens % BLOCK_SIZE else 0)
    assert imported.kv_bytes == rig.counters.num_bytes == rig.target.block_bytes * -(-num_tokens // BLOCK_SIZE)
    assert imported.transport == rig.exporter_transport.name
    assert rig.counters.handoffs == {
        ("importer", imported.transport, "ok", ""): 1,
        ("exporter", imported.transport, "ok", ""): 1,
    }
    rig.decode.finish(1)


async def test_blocks_arrive_while_later_ones_are_not_sealed(rig: Rig) -> None:
    prefill = rig.prefill(4 * BLOCK_SIZE + 1)
    importing = rig.start_import(prefill)
    for _ in range(4):
        prefill.seal(1)
        read = await rig.read_arrived()
        assert not importing.done() and len(read.local_block_ids) == 1
    prefill.finish()
    async with asyncio.timeout(DEADLINE_S):
        imported = await importing
    assert rig.holds(prefill, imported)
    assert 0 <= imported.exposed_transfer_s <= imported.total_s
    rig.decode.finish(1)
    await prefill.released.wait()
