"""Between a decode worker's step thread and its exporter: whoever is first, a frozen one's ticket comes to its end."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cluster.clock import ManualClock
from cluster.errors import NotFound, TooManyFrozen
from cluster.messages import MemberId
from cluster.protocol import kv_wire, tickets, wire
from cluster.protocol.hashing import hash_prompt
from cluster.settings.transfer_settings import TransferSettings
from decode_worker.exports import MAX_FROZEN, Exports, FreezeOrder, FrozenSequence
from decode_worker.scheduling import commands
from kvtransfer.exporter.export_call import ExportCall
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.transports.loopback import LoopbackExporter, LoopbackNetwork
from kvtransfer.wire.wire_format import NativeFormat
from tandem.v1 import kv_pb2
from tests.contract.handoff_rig import EXPORTER, IMPORTER, KEY, LAYOUT, Counters
from tests.contract.kv_pools import random_pool
from tests.unit.decode_bench import ROUTER, DecodeBench, limits

_ATTEMPT = 3


class Worker:
    """A real scheduler and a real exporter. Commands wait until the test lets them through, as a step makes them."""

    def __init__(self) -> None:
        self.bench = DecodeBench(limits())
        self.clock = ManualClock()
        self.posted: list[commands.Command] = []
        pool = random_pool(64, seed=1)
        self.exporter = Exporter(
            member=EXPORTER,
            address="nowhere:1",
            wire=NativeFormat(pool),
            layout=LAYOUT,
            key=KEY,
            settings=TransferSettings(attach_timeout_s=60.0),
            transports=[LoopbackExporter(memory=pool, network=LoopbackNetwork())],
            release=lambda ticket_id: self.exports.release(ticket_id),
            clock=self.clock,
            counters=Counters(),
        )
        self.forgotten: asyncio.Queue[tuple[MemberId, int]] = asyncio.Queue()
        self.exports = Exports(
            exporter=self.exporter,
            cluster_key=KEY,
            post=self.posted.append,
            on_forgotten=lambda router, handle: self.forgotten.put_nowait((router, handle)),
            word_s=0.01,
        )
        (self.handle,) = self.bench.admit(self.bench.job(range(1, 7), max_tokens=20))
        self.bench.step()
        self.bench.step()

    @property
    def order(self) -> FreezeOrder:
        return FreezeOrder(ROUTER, self.handle, _ATTEMPT, IMPORTER)

    def pass_commands(self) -> None:
        """The step thread takes them in, and what it tells arrives."""
        while self.posted:
            for event in self.bench.scheduler.apply(self.posted.pop(0), 0.0):
                self.tell(event)

    def tell(self, event: commands.Event) -> None:
        match event:
            case commands.Frozen():
                self.exports.on_frozen(event)
            case commands.FreezeRefused():
                self.exports.on_freeze_refused(event)
            case commands.Thawed() | commands.ThawRefused():
                self.exports.on_thawed(event)

    async def asked(self) -> "asyncio.Task[FrozenSequence]":
        """A freeze that is on its way to the step thread."""
        task = asyncio.create_task(self.exports.freeze(self.order))
        await asyncio.sleep(0)
        return task

    async def frozen(self) -> FrozenSequence:
        task = await self.asked()
        self.pass_commands()
        return await task

    def another(self) -> FreezeOrder:
        """One more sequence that decodes here."""
        (handle,) = self.bench.admit(self.bench.job(range(1, 7), max_tokens=20))
        self.bench.step()
        self.bench.step()
        return FreezeOrder(ROUTER, handle, _ATTEMPT, IMPORTER)

    def cancel(self) -> None:
        """As the service does it."""
        self.posted.append(commands.CancelSequences(ROUTER, frozenset({self.handle})))
        self.exports.forget(ROUTER, frozenset({self.handle}))

    def blocks(self) -> dict[str, int]:
        return {state: number for state, number in self.bench.inspect().blocks.items() if number and state != "free"}

    async def attach(self, signed: bytes) -> tuple[ExportCall, list[kv_pb2.ExporterMessage]]:
        """What an importer is told, up to Finished: the digests are known then."""
        call = self.exporter.open_call(str(IMPORTER))
        ticket = kv_pb2.SignedTicket.FromString(signed)
        endpoints = {"loopback": b""}
        attach = kv_pb2.Attach(
            ticket=ticket, transports=["loopback"], layout=kv_wire.fingerprint_to_wire(LAYOUT), endpoints=endpoints
        )
        self.exporter.attach(call, attach)
        told = []
        async with asyncio.timeout(10):
            async for message in call.messages():
                told.append(message)
                if message.WhichOneof("message") in ("finished", "refused"):
                    break
        return call, told


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Worker]:
    """Ends with every ticket released and every block accounted for."""
    worker = Worker()
    await worker.exporter.start()
    yield worker
    worker.pass_commands()
    await worker.exporter.close()
    worker.pass_commands()
    worker.bench.scheduler.check()
    assert worker.bench.inspect().blocks["leased"] == 0


async def test_the_ticket_is_for_all_tokens_but_the_last_and_names_its_importer(worker: Worker) -> None:
    frozen = await worker.frozen()

    ticket = tickets.verify(frozen.signed_ticket, KEY, importer=str(IMPORTER))
    tokens = (*range(1, 7), worker.bench.choices[worker.handle].output[0])
    assert (ticket.num_tokens, ticket.num_choices, ticket.attempt) == (7, 1, _ATTEMPT)
    assert ticket.prompt_hash == hash_prompt(KEY, tokens)
    assert frozen.num_output == 2


async def test_everything_is_offered_at_once_and_decoding_goes_on_from_the_last_token(worker: Worker) -> None:
    call, told = await worker.attach((await worker.frozen()).signed_ticket)

    *_, finished = [message.finished for message in told]
    assert [message.WhichOneof("message") for message in told] == ["accepted", "sealed", "finished"]
    assert len(wire.unpack_ids(told[1].sealed.block_ids)) == 1
    assert finished.tail.num_valid == 3
    assert [first.token_id for first in finished.first_tokens] == [worker.bench.choices[worker.handle].output[-1]]
    worker.exporter.end_call(call)


async def test_a_cancel_before_the_step_thread_has_frozen_it(worker: Worker) -> None:
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


async def test_a_cancel_gives_the_ticket_back_at_once_when_nobody_has_attached(worker: Worker) -> None:
    await worker.frozen()

    worker.cancel()
    assert worker.exporter.num_live_tickets == 0
    worker.pass_commands()
    assert worker.blocks() in ({}, {"cached": 1})


async def test_a_cancel_while_an_importer_reads_leaves_it_its_lease(worker: Worker) -> None:
    call, _ = await worker.attach((await worker.frozen()).signed_ticket)

    worker.cancel()
    worker.pass_commands()
    assert worker.bench.inspect().blocks["leased"] == 2
    worker.exporter.end_call(call)
    worker.pass_commands()
    assert worker.exporter.num_live_tickets == 0
    assert worker.blocks() in ({}, {"cached": 1})


async def test_a_thaw_withdraws_the_ticket(worker: Worker) -> None:
    frozen = await worker.frozen()

    thawing = asyncio.create_task(worker.exports.thaw(ROUTER, worker.handle, 99))
    await asyncio.sleep(0)
    worker.pass_commands()
    await thawing
    worker.exports.forget(ROUTER, frozenset({worker.handle}))  # as the service does it
    worker.pass_commands()

    _, told = await worker.attach(frozen.signed_ticket)
    assert told[0].refused.reason == "unknown_ticket"
    assert "leased" not in worker.blocks()


async def test_what_is_not_frozen_cannot_be_thawed(worker: Worker) -> None:
    thawing = asyncio.create_task(worker.exports.thaw(ROUTER, worker.handle, 99))
    await asyncio.sleep(0)
    worker.pass_commands()

    with pytest.raises(NotFound, match="not frozen"):
        await thawing


async def test_a_second_freeze_of_one_sequence_is_refused(worker: Worker) -> None:
    first = await worker.asked()

    with pytest.raises(NotFound, match="frozen already"):
        await worker.exports.freeze(worker.order)
    worker.pass_commands()
    assert (await first).num_output == 2


async def test_a_refused_sequence_can_be_asked_for_again(worker: Worker) -> None:
    strange = FreezeOrder(ROUTER, 77, _ATTEMPT, MemberId("d9", "x"))
    for _ in range(2):
        task = asyncio.create_task(worker.exports.freeze(strange))
        await asyncio.sleep(0)
        worker.pass_commands()
        with pytest.raises(NotFound, match="does not decode here"):
            await task
    assert len(worker.exports) == 0


async def test_a_router_that_does_not_wait_for_the_answer_still_has_the_last_word(worker: Worker) -> None:
    task = await worker.asked()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    worker.pass_commands()
    assert worker.exporter.num_live_tickets == 1

    worker.cancel()
    worker.pass_commands()
    assert worker.exporter.num_live_tickets == 0
    assert worker.blocks() in ({}, {"cached": 1})


async def test_a_ticket_nobody_came_for_ends_and_the_sequence_stays_frozen(worker: Worker) -> None:
    call, _ = await worker.attach((await worker.frozen()).signed_ticket)
    worker.clock.advance(10.0)  # past its lease
    worker.exporter.reap()
    worker.pass_commands()

    assert worker.exporter.num_live_tickets == 0
    assert worker.blocks() == {"held": 2}
    assert worker.bench.inspect().figures["frozen"] == 1
    worker.exporter.end_call(call)


async def test_a_sequence_whose_router_never_says_what_becomes_of_it_does_not_wait_for_ever(worker: Worker) -> None:
    frozen = await worker.frozen()
    worker.exporter.end_call((await worker.attach(frozen.signed_ticket))[0])
    worker.clock.advance(10.0)  # a lease: for so long another one may come for it
    worker.exporter.reap()

    async with asyncio.timeout(10):
        assert await worker.forgotten.get() == (ROUTER, worker.handle)


async def test_a_worker_freezes_at_most_four_at_a_time_for_all_routers(worker: Worker) -> None:
    orders = [worker.order, *(worker.another() for _ in range(MAX_FROZEN))]
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
    for order in orders[1:]:
        worker.posted.append(commands.CancelSequences(ROUTER, frozenset({order.handle})))
        worker.exports.forget(ROUTER, frozenset({order.handle}))
    worker.pass_commands()
