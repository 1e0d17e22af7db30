"""Tests of hand-offs over every transport: real pools, real gRPC, real sockets and shared memory."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from cluster.errors import HandOffReason
from cluster.protocol import tickets
from kvtransfer.digests import digest_blocks
from kvtransfer.memory import PoolMemory
from kvtransfer.protocol.handoff import FirstToken
from tests.contract.rigs.handoff_parts import DEADLINE_S, IMPORTER, KEY, finish_received
from tests.contract.rigs.handoff_rig import Rig, handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE

TRANSPORTS = ["loopback", "tcp", "shm", "nixl", "nccl", "cuda_ipc"]


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


async def test_every_hand_off_is_timed_beside_the_bytes_that_it_moves(rig: Rig) -> None:
    assert rig.links.hand_off is None
    exposed_s = []
    for number in range(1, 7):  # after three reads the link's speed is known
        prefill = rig.prefill(2 * BLOCK_SIZE)
        rig.watched.is_holding = True
        importing = rig.start_import(prefill, number)
        prefill.compute()
        read = await rig.read_arrived()
        await finish_received(rig.importer)
        rig.watched.is_holding = False
        rig.pass_at_importer(0.5)
        read.gate.set()
        async with asyncio.timeout(DEADLINE_S):
            exposed_s.append((await importing).exposed_transfer_s)
            await prefill.released.wait()
        rig.decode.finish(number)
    assert rig.links.hand_off is not None, "no hand-off was timed"
    assert exposed_s == [0.5] * len(exposed_s)
    assert 0 <= rig.links.hand_off.fixed_s <= 0.5


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
    assert imported.queue_s == 0  # there was room before the prefill ended
    rig.decode.finish(1)
    await prefill.released.wait()


async def test_exposed_time_counts_from_the_end_of_prefill_not_from_its_announcement(rig: Rig) -> None:
    prefill = rig.prefill(2 * BLOCK_SIZE)
    importing = rig.start_import(prefill)
    prefill.seal(2)
    ended_s = rig.exporter_clock.now_s() - 5.0
    rig.exporter.finish(prefill.ticket_id, first_tokens=[FirstToken(1, False)], tail=None, ended_s=ended_s)
    async with asyncio.timeout(DEADLINE_S):
        imported = await importing
        await prefill.released.wait()
    assert imported.exposed_transfer_s == 5.0
    rig.decode.finish(1)


async def test_blocks_of_one_step_are_digested_together(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []

    def digested(memory: PoolMemory, block_ids: Sequence[int], seed: bytes) -> tuple[bytes, ...]:
        batches.append(len(block_ids))
        return digest_blocks(memory, block_ids, seed)

    monkeypatch.setattr("kvtransfer.exporter.exporter.digest_blocks", digested)
    prefill, other = rig.prefill(3 * BLOCK_SIZE + 1), rig.prefill(BLOCK_SIZE)
    importing = rig.start_import(prefill), rig.start_import(other, 2)
    prefill.compute()  # three blocks and the tail
    other.compute()
    async with asyncio.timeout(DEADLINE_S):
        assert rig.holds(prefill, await importing[0]) and rig.holds(other, await importing[1])
        await prefill.released.wait()
        await other.released.wait()
    assert batches == [4, 1]
    rig.decode.finish(1)
    rig.decode.finish(2)


async def test_choices_share_the_prompt_and_have_private_tails(rig: Rig) -> None:
    prefill = rig.prefill(2 * BLOCK_SIZE + 3, num_choices=3)
    importing = rig.start_import(prefill)
    prefill.seal(2)
    prefill.finish(ended=[False, True, False])
    async with asyncio.timeout(DEADLINE_S):
        imported = await importing
    assert rig.holds(prefill, imported)
    assert len(imported.sealed_block_ids) == 2 and len(set(imported.tail_block_ids)) == 3
    assert [(first.token_id, first.ended) for first in imported.first_tokens] == [
        (100, False),
        (101, True),
        (102, False),
    ]
    rig.decode.finish(1)
    await prefill.released.wait()


async def test_blocks_that_the_pool_has_are_not_moved(rig: Rig) -> None:
    prefill = rig.prefill(4 * BLOCK_SIZE + 1)
    shared = rig.decode.pool.reserve(3)
    assert shared is not None
    rig.target.raw[list(shared)] = rig.source.raw[list(prefill.block_ids[:3])]
    rig.decode.cached[1] = shared
    prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        imported = await rig.start_import(prefill)
        await prefill.released.wait()
    assert rig.holds(prefill, imported)
    assert imported.sealed_block_ids[:3] == shared and imported.num_cached == 3
    assert {block_id for read in rig.watched.reads for block_id in read.local_block_ids}.isdisjoint(shared)
    assert imported.kv_bytes == rig.counters.num_bytes == 2 * rig.target.block_bytes
    rig.decode.finish(1)
    rig.decode.pool.drop_references(shared)


async def test_cancelling_does_not_free_blocks_that_other_sequences_share(rig: Rig) -> None:
    rig.watched.is_holding = True
    prefill = rig.prefill(3 * BLOCK_SIZE)
    shared = rig.decode.pool.reserve(1)
    assert shared is not None
    rig.decode.cached[1] = shared
    prefill.seal(3)
    await rig.digested()
    importing = rig.start_import(prefill)
    read = await rig.read_arrived()
    importing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await importing
    assert rig.decode.pool.counts()["quarantined"] == 2 and rig.decode.pool.counts()["held"] == 1
    read.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        await prefill.released.wait()
    rig.decode.pool.drop_references(shared)


async def test_many_hand_offs_run_concurrently(rig: Rig) -> None:
    prefills = [rig.prefill(2 * BLOCK_SIZE + 1) for _ in range(8)]
    imports = [rig.start_import(prefill, handoff_id) for handoff_id, prefill in enumerate(prefills)]
    for prefill in prefills:
        prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        for handoff_id, (prefill, imported) in enumerate(zip(prefills, await asyncio.gather(*imports), strict=True)):
            assert rig.holds(prefill, imported)
            rig.decode.finish(handoff_id)
            await prefill.released.wait()


async def test_a_ticket_is_valid_after_prefill_has_finished(rig: Rig) -> None:
    prefill = rig.prefill(2 * BLOCK_SIZE + 1)
    prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        assert rig.holds(prefill, await rig.start_import(prefill))
        await prefill.released.wait()
    rig.decode.finish(1)


async def test_cancelling_quarantines_blocks_under_read_until_the_read_has_ended(rig: Rig) -> None:
    rig.watched.is_holding = True
    prefill = rig.prefill(3 * BLOCK_SIZE)
    importing = rig.start_import(prefill)
    prefill.seal(2)
    read = await rig.read_arrived()
    importing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await importing
    in_flight = len(read.local_block_ids)
    assert rig.decode.pool.counts()["quarantined"] == in_flight == rig.counters.num_quarantined
    assert rig.decode.pool.num_free == rig.decode.pool.num_blocks - in_flight  # the rest at once
    assert not prefill.released.is_set()  # no "settled" is sent while a read is in progress
    read.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        await prefill.released.wait()
    assert rig.counters.handoffs[("exporter", rig.exporter_transport.name, "unneeded", "cancelled")] == 1


async def test_cancelling_between_reads_frees_everything_at_once(rig: Rig) -> None:
    prefill = rig.prefill(3 * BLOCK_SIZE)
    importing = rig.start_import(prefill)
    prefill.seal(1)
    await rig.read_arrived()
    await rig.machine_idle()
    importing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await importing
    assert rig.decode.pool.num_free == rig.decode.pool.num_blocks
    async with asyncio.timeout(DEADLINE_S):
        await prefill.released.wait()


async def test_damaged_blocks_are_read_again_once(rig: Rig) -> None:
    rig.watched.num_damaged = 1
    rig.watched.damage = rig.flip_a_bit
    prefill = rig.prefill(2 * BLOCK_SIZE + 1)
    prefill.compute()
    await rig.digested()
    async with asyncio.timeout(DEADLINE_S):
        assert rig.holds(prefill, await rig.start_import(prefill))
        await prefill.released.wait()
    assert rig.counters.num_digest_failures == 1 and len(rig.watched.reads) == 2
    rig.decode.finish(1)


async def test_blocks_that_stay_damaged_are_refused(rig: Rig) -> None:
    rig.watched.num_damaged = 2
    rig.watched.damage = rig.flip_a_bit
    prefill = rig.prefill(2 * BLOCK_SIZE)
    prefill.compute()
    assert await rig.failure(rig.start_import(prefill)) is HandOffReason.DIGEST_MISMATCH
    assert rig.counters.num_digest_failures == 2 and rig.counters.num_bytes == 0
    await rig.given_up(prefill)


async def test_a_prefill_that_fails_fails_its_importer(rig: Rig) -> None:
    prefill = rig.prefill(3 * BLOCK_SIZE)
    importing = rig.start_import(prefill)
    prefill.seal(1)
    await rig.read_arrived()
    rig.exporter.fail(prefill.ticket_id, reason=HandOffReason.PREFILL_FAILED, detail="out of memory")
    assert await rig.failure(importing, match="out of memory") is HandOffReason.PREFILL_FAILED
    async with asyncio.timeout(DEADLINE_S):
        await prefill.released.wait()


async def test_late_events_of_a_released_ticket_do_no_harm(rig: Rig) -> None:
    prefill = rig.prefill(3 * BLOCK_SIZE + 1)
    rig.exporter.fail(prefill.ticket_id, reason=HandOffReason.CANCELLED, detail="")
    assert prefill.released.is_set()
    prefill.compute()
    rig.exporter.fail(prefill.ticket_id, reason=HandOffReason.CANCELLED, detail="again")
    assert await rig.failure(rig.start_import(prefill)) is HandOffReason.UNKNOWN_TICKET


async def test_a_failure_overtakes_digests_that_are_still_computed(rig: Rig) -> None:
    prefill = rig.prefill(3 * BLOCK_SIZE)
    prefill.seal(3)
    rig.exporter.fail(prefill.ticket_id, reason=HandOffReason.CANCELLED, detail="")
    assert prefill.released.is_set()


async def test_a_reissued_ticket_may_be_pulled_again(rig: Rig) -> None:
    prefill = rig.prefill(2 * BLOCK_SIZE + 1)
    rig.watched.is_holding = True
    first = rig.start_import(prefill, 1)
    prefill.compute()
    read = await rig.read_arrived()
    rig.watched.is_holding = False
    again = tickets.reissue(prefill.signed, KEY, attempt=2, importer=IMPORTER)
    second = rig.start_import(prefill, 2, signed=again)
    async with asyncio.timeout(DEADLINE_S):
        assert rig.holds(prefill, await second)
        assert not prefill.released.is_set()  # the first attempt still has its lease
        read.gate.set()
        assert rig.holds(prefill, await first)
        await prefill.released.wait()
    rig.decode.finish(1)
    rig.decode.finish(2)


async def test_a_second_attempt_imports_a_ticket_whose_first_attempt_failed(rig: Rig) -> None:
    rig.watched.num_damaged = 2
    rig.watched.damage = rig.flip_a_bit
    prefill = rig.prefill(2 * BLOCK_SIZE)
    prefill.compute()
    assert await rig.failure(rig.start_import(prefill)) is HandOffReason.DIGEST_MISMATCH
    again = tickets.reissue(prefill.signed, KEY, attempt=2, importer=IMPORTER)
    async with asyncio.timeout(DEADLINE_S):
        assert rig.holds(prefill, await rig.start_import(prefill, 2, signed=again))
        await prefill.released.wait()
    rig.decode.finish(2)


async def test_nothing_can_be_pulled_after_the_last_attempt_has_settled(rig: Rig) -> None:
    prefill = rig.prefill(BLOCK_SIZE)
    prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        await rig.start_import(prefill)
        await prefill.released.wait()
    rig.decode.finish(1)
    again = tickets.reissue(prefill.signed, KEY, attempt=2, importer=IMPORTER)
    for signed in (prefill.signed, again):
        importing = rig.start_import(prefill, 2, signed=signed)
        assert await rig.failure(importing, handoff_id=2) is HandOffReason.UNKNOWN_TICKET


async def test_a_second_stream_with_the_same_attempt_is_a_replay(rig: Rig) -> None:
    prefill = rig.prefill(2 * BLOCK_SIZE)
    first = rig.start_import(prefill, 1)
    prefill.seal(1)
    await rig.read_arrived()
    assert await rig.failure(rig.start_import(prefill, 2), handoff_id=2) is HandOffReason.REPLAYED_TICKET
    prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        assert rig.holds(prefill, await first)
        await prefill.released.wait()
    rig.decode.finish(1)


async def test_closing_the_exporter_releases_every_ticket(rig: Rig) -> None:
    attached, queued, finished = rig.prefill(2 * BLOCK_SIZE), rig.prefill(BLOCK_SIZE), rig.prefill(BLOCK_SIZE)
    importing = rig.start_import(attached)
    attached.seal(1)
    await rig.read_arrived()
    finished.compute()
    await rig.exporter.close()
    assert attached.released.is_set() and queued.released.is_set() and finished.released.is_set()
    await rig.failure(importing)
    await rig.all_quiet()


async def test_closing_the_importer_gives_every_block_back(rig: Rig) -> None:
    rig.watched.is_holding = True
    prefill = rig.prefill(2 * BLOCK_SIZE)
    importing = rig.start_import(prefill)
    prefill.seal(2)
    read = await rig.read_arrived()
    importing.cancel()
    closing = asyncio.create_task(rig.importer.close())
    read.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        await closing
        await prefill.released.wait()
    assert rig.decode.pool.num_free == rig.decode.pool.num_blocks and rig.importer.num_live == 0
