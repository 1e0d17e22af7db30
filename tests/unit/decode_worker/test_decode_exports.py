"""Between a decode worker's step thread and its exporter, the ticket of a frozen sequence ends in any order of
events.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cluster.errors import DuplicateRequest, NotFound, TooManyFrozen
from cluster.messages import MemberId
from cluster.protocol import tickets, wire
from cluster.protocol.hashing import hash_prompt
from decode_worker.handoffs import MAX_FROZEN, FreezeOrder
from tests.contract.rigs.handoff_parts import IMPORTER, KEY
from tests.unit.decode_worker.frozen_worker import ATTEMPT, FrozenWorker
from tests.unit.engine.rigs.scheduler_bench import ROUTER


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[FrozenWorker]:
    """Yield a worker, and check at the end that every ticket is released and every block accounted for."""
    worker = FrozenWorker()
    await worker.exporter.start()
    yield worker
    worker.pass_commands()
    await worker.exporter.close()
    worker.pass_commands()
    worker.bench.scheduler.check()
    assert worker.bench.inspect().blocks["leased"] == 0


async def test_the_ticket_is_for_all_tokens_but_the_last_and_names_its_importer(worker: FrozenWorker) -> None:
    frozen = await worker.frozen()

    ticket = tickets.verify(frozen.signed_ticket, KEY, importer=str(IMPORTER))
    tokens = (*range(1, 7), worker.bench.choices[worker.handle].output[0])
    assert (ticket.num_tokens, ticket.num_choices, ticket.attempt) == (7, 1, ATTEMPT)
    assert ticket.prompt_hash == hash_prompt(KEY.hash_key, tokens)
    assert frozen.num_output == 2


async def test_all_blocks_are_announced_at_once_and_decoding_continues_from_the_last_token(
    worker: FrozenWorker,
) -> None:
    call, told = await worker.attach((await worker.frozen()).signed_ticket)

    *_, finished = [message.finished for message in told]
    assert [message.WhichOneof("message") for message in told] == ["accepted", "sealed", "finished"]
    assert len(wire.unpack_ids(told[1].sealed.block_ids)) == 1
    assert finished.tail.num_valid == 3
    assert [first.token_id for first in finished.first_tokens] == [worker.bench.choices[worker.handle].output[-1]]
    worker.exporter.end_call(call)


async def test_a_cancel_before_the_freeze_ends_leaves_no_ticket_and_no_block(worker: FrozenWorker) -> None:
    task = await worker.asked()
    (freeze,) = worker.posted
    worker.posted.clear()
    (frozen,) = worker.bench.scheduler.apply(freeze, 0.0)
    worker.cancel()  # while Frozen is on its way
    worker.tell(frozen)
    worker.pass_commands()

    with pytest.raises(NotFound, match="cancelled"):
        await task
    assert worker.exporter.num_live_tickets == 0
    assert worker.blocks() in ({}, {"cached": 1})


async def test_a_cancel_ends_a_ticket_without_an_importer_at_once(worker: FrozenWorker) -> None:
    await worker.frozen()

    worker.cancel()
    assert worker.exporter.num_live_tickets == 0
    worker.pass_commands()
    assert worker.blocks() in ({}, {"cached": 1})


async def test_a_cancel_keeps_the_lease_of_an_importer_that_reads(worker: FrozenWorker) -> None:
    call, _ = await worker.attach((await worker.frozen()).signed_ticket)

    worker.cancel()
    worker.pass_commands()
    assert worker.bench.inspect().blocks["leased"] == 2
    worker.exporter.end_call(call)
    worker.pass_commands()
    assert worker.exporter.num_live_tickets == 0
    assert worker.blocks() in ({}, {"cached": 1})


async def test_a_thaw_withdraws_the_ticket(worker: FrozenWorker) -> None:
    frozen = await worker.frozen()

    thawing = asyncio.create_task(worker.thaw(99))
    await asyncio.sleep(0)
    worker.pass_commands()
    await thawing
    worker.pass_commands()
    assert worker.handles() == {99}

    _, told = await worker.attach(frozen.signed_ticket)
    assert told[0].refused.reason == "unknown_ticket"
    assert "leased" not in worker.blocks()


async def test_a_sequence_that_is_not_frozen_cannot_be_thawed(worker: FrozenWorker) -> None:
    thawing = asyncio.create_task(worker.thaw(99))
    await asyncio.sleep(0)
    worker.pass_commands()

    with pytest.raises(NotFound, match="not frozen"):
        await thawing
    assert worker.handles() == {worker.handle}


async def test_a_thaw_ends_the_old_handle_when_its_router_does_not_wait(worker: FrozenWorker) -> None:
    """Otherwise the old handle stays until the grace after the ticket's end, and counts as a frozen sequence."""
    await worker.frozen()
    thawing = asyncio.create_task(worker.thaw(99))
    await asyncio.sleep(0)
    thawing.cancel()
    await asyncio.gather(thawing, return_exceptions=True)
    worker.pass_commands()

    assert worker.handles() == {99} and len(worker.exports) == 0
    worker.cancel(99)
    worker.pass_commands()
    await worker.until_nothing_is_held()


async def test_a_thaw_to_a_handle_in_use_is_refused_and_has_no_effect(worker: FrozenWorker) -> None:
    other = worker.decoding()
    await worker.frozen()
    with pytest.raises(DuplicateRequest, match="in use"):
        await worker.thaw(other)
    assert worker.handles() == {worker.handle, other} and worker.posted == []
    worker.cancel(worker.handle, other)


async def test_a_second_freeze_of_one_sequence_is_refused(worker: FrozenWorker) -> None:
    first = await worker.asked()

    with pytest.raises(NotFound, match="frozen already"):
        await worker.exports.freeze(worker.order)
    worker.pass_commands()
    assert (await first).num_output == 2


async def test_a_refused_freeze_can_be_requested_again(worker: FrozenWorker) -> None:
    strange = FreezeOrder(ROUTER, 77, ATTEMPT, MemberId("d9", "x"))
    for _ in range(2):
        task = asyncio.create_task(worker.exports.freeze(strange))
        await asyncio.sleep(0)
        worker.pass_commands()
        with pytest.raises(NotFound, match="does not decode here"):
            await task
    assert len(worker.exports) == 0


async def test_a_router_that_does_not_wait_for_the_response_can_still_end_its_sequence(worker: FrozenWorker) -> None:
    task = await worker.asked()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    worker.pass_commands()
    assert worker.exporter.num_live_tickets == 1

    worker.cancel()
    worker.pass_commands()
    assert worker.exporter.num_live_tickets == 0
    assert worker.blocks() in ({}, {"cached": 1})


async def test_a_sequence_stays_frozen_when_its_ticket_expires(worker: FrozenWorker) -> None:
    call, _ = await worker.attach((await worker.frozen()).signed_ticket)
    worker.clock.advance(10.0)  # past its lease
    worker.exporter.reap()
    worker.pass_commands()

    assert worker.exporter.num_live_tickets == 0
    assert worker.blocks() == {"held": 2}
    assert worker.bench.inspect().figures["frozen"] == 1
    worker.exporter.end_call(call)


async def test_a_frozen_sequence_ends_within_the_grace_after_its_ticket(
    worker: FrozenWorker,
) -> None:
    frozen = await worker.frozen()
    worker.exporter.end_call((await worker.attach(frozen.signed_ticket))[0])
    worker.clock.advance(10.0)  # past the lease: until then another importer may attach
    worker.exporter.reap()

    await worker.until_nothing_is_held()


async def test_a_router_that_reconnects_without_sequences_ends_its_old_sequences(worker: FrozenWorker) -> None:
    """A frozen sequence sends nothing that would show the router that it is still on this worker."""
    another_routers = MemberId("router", "2")
    stream = await worker.connect(has_no_sequences=False)
    await worker.frozen()
    came_back = await worker.connect(has_no_sequences=False)
    assert worker.handles() == {worker.handle}
    other = await worker.connect(has_no_sequences=True, router=another_routers)
    assert worker.handles() == {worker.handle}

    reconnected = await worker.connect(has_no_sequences=True)

    assert not worker.handles() and worker.exporter.num_live_tickets == 0
    assert worker.telemetry.value("tandem_decode_router_gone_total", reason="began_again") == 1
    worker.pass_commands()
    await worker.until_nothing_is_held()
    for listening in (stream, came_back, other, reconnected):
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def test_sequences_end_when_the_stream_of_their_router_does_not_come_back(worker: FrozenWorker) -> None:
    stream = await worker.connect(has_no_sequences=False)
    await worker.frozen()
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    assert worker.handles() == {worker.handle}, "it may come back"

    await worker.until_nothing_is_held()
    assert worker.telemetry.value("tandem_decode_router_gone_total", reason="stream_ended") == 1


async def test_a_worker_freezes_at_most_four_at_a_time_for_all_routers(worker: FrozenWorker) -> None:
    handles = [worker.handle, *(worker.decoding() for _ in range(MAX_FROZEN))]
    orders = [FreezeOrder(ROUTER, handle, ATTEMPT, IMPORTER) for handle in handles]
    freezing = [asyncio.create_task(worker.exports.freeze(order)) for order in orders]
    await asyncio.sleep(0)
    with pytest.raises(TooManyFrozen, match="4 sequences are frozen here"):
        await freezing[-1]
    worker.pass_commands()
    await asyncio.gather(*freezing[:-1])
    assert len(worker.exports) == MAX_FROZEN

    worker.cancel()  # the first one has left

    last = asyncio.create_task(worker.exports.freeze(orders[-1]))
    await asyncio.sleep(0)
    worker.pass_commands()
    assert (await last).num_output
    worker.cancel(*handles[1:])
    worker.pass_commands()
