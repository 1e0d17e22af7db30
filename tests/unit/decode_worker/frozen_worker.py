"""A decode worker whose sequences are frozen: the real service, scheduler and exporter, without a step thread.

Commands wait until a test lets them through, as a step makes them wait.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, cast

from cluster.clock import ManualClock
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from cluster.protocol import wire
from cluster.settings.worker_settings import TransferSettings
from decode_worker.handoffs import FreezeOrder, FrozenSequence
from decode_worker.service import DecodeService
from engine.grammar.compiled_grammars import CompiledGrammars
from engine.scheduling import commands
from engine.steps.step_loop import StepLoop
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.exporter.ticket_driver import IncomingCall
from kvtransfer.importer.importer import Importer
from kvtransfer.wire.wire_format import NativeFormat
from tandem.internal.v1 import kv_pb2, worker_pb2
from tests.contract.rigs.handoff_parts import EXPORTER, IMPORTER, KEY, LAYOUT, Counters
from tests.contract.rigs.kv_pools import random_pool
from tests.loopback import LoopbackExporter, LoopbackNetwork
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.scheduler_bench import ROUTER, SchedulerBench

ATTEMPT = 3
GRACE_S = 0.01
LEASE_S = 5.0
NO_CONTEXT = cast(Any, None)


class FrozenWorker:
    def __init__(self) -> None:
        self.bench = SchedulerBench(limits())
        self.clock = ManualClock()
        self.posted: list[commands.Command] = []
        self.telemetry = Telemetry()
        pool = random_pool(64, seed=1)
        self.wire = NativeFormat(pool)
        self.exporter = Exporter(
            member=EXPORTER,
            address="nowhere:1",
            wire=self.wire,
            layout=LAYOUT,
            keys=KEY,
            settings=TransferSettings(lease_s=LEASE_S, attach_timeout_s=60.0),
            transports=[LoopbackExporter(memory=pool, network=LoopbackNetwork())],
            release=lambda ticket_id: self.exports.release(ticket_id),
            clock=self.clock,
            counters=Counters(),
        )
        self.service = DecodeService(
            handoff_ids=itertools.count(),
            member=EXPORTER,
            steps=cast(StepLoop[commands.Command, commands.Event], self),
            importer=cast(Importer, None),  # nothing is imported here
            exporter=self.exporter,
            vocab_size=1000,
            limits=self.bench.limits,
            hash_key=KEY.hash_key,
            new_chain=self.bench.new_chain,
            wire_dtype="native",
            stream_grace_s=GRACE_S,
            grammars=CompiledGrammars(None),
            refuse_if_unhealthy=lambda: None,
            telemetry=self.telemetry,
        )
        self.exports = self.service.exports
        self.handle = self.decoding()

    def decoding(self) -> int:
        """Start one more sequence that decodes here, and return its handle."""
        job = self.bench.job(range(1, 7), max_tokens=20)
        (handle,) = self.bench.admit(job)
        self.service._handles.add_job(ROUTER, [handle], job.tenant, 0.0)
        self.bench.step()
        self.bench.step()
        return handle

    def post(self, command: commands.Command) -> None:
        """Record a command, in place of StepLoop.post."""
        self.posted.append(command)

    def pass_commands(self) -> None:
        """Apply the recorded commands as the step thread does, and deliver its events."""
        while self.posted:
            self.tell(*self.bench.scheduler.apply(self.posted.pop(0), 0.0))

    def tell(self, *events: commands.Event) -> None:
        self.service.on_events(events)

    @property
    def order(self) -> FreezeOrder:
        return FreezeOrder(ROUTER, self.handle, ATTEMPT, IMPORTER)

    async def asked(self) -> "asyncio.Task[FrozenSequence]":
        """Start a freeze, and return once its command waits for the step thread."""
        task = asyncio.create_task(self.exports.freeze(self.order))
        await asyncio.sleep(0)
        return task

    async def frozen(self) -> FrozenSequence:
        task = await self.asked()
        self.pass_commands()
        return await task

    async def freeze(self) -> worker_pb2.FreezeResponse:
        """Make the call as a router does."""
        return await self.service.Freeze(
            worker_pb2.FreezeRequest(router=str(ROUTER), handle=self.handle, attempt=ATTEMPT, importer=str(IMPORTER)),
            NO_CONTEXT,
        )

    async def thaw(self, new_handle: int) -> worker_pb2.ThawResponse:
        """Make the call as a router does."""
        request = worker_pb2.ThawRequest(router=str(ROUTER), handle=self.handle, new_handle=new_handle)
        return await self.service.Thaw(request, NO_CONTEXT)

    def cancel(self, *handles: int) -> None:
        """Send the router's cancellation of the frozen sequence, or of these handles, on its stream."""
        self.service._cancel(ROUTER, frozenset(handles or {self.handle}))

    async def connect(self, *, has_no_sequences: bool, router: MemberId = ROUTER) -> "asyncio.Task[None]":
        """Open a stream of the router that sends only its hello."""
        hello = worker_pb2.RouterHello(router=str(router), has_no_sequences=has_no_sequences)

        async def says() -> AsyncIterator[worker_pb2.RouterMessage]:
            yield worker_pb2.RouterMessage(hello=hello)
            await asyncio.get_running_loop().create_future()

        async def listens() -> None:
            async for message in self.service.Connect(says(), NO_CONTEXT):
                heard.set_result(message) if not heard.done() else None

        heard: asyncio.Future[worker_pb2.WorkerMessage] = asyncio.get_running_loop().create_future()
        listening = asyncio.create_task(listens())
        await asyncio.wait((heard, listening), return_when=asyncio.FIRST_COMPLETED)
        return listening

    def handles(self) -> frozenset[int]:
        """Return the handles of the router's sequences that this worker still has."""
        return self.service._handles.of(ROUTER)

    def blocks(self) -> dict[str, int]:
        return {state: number for state, number in self.bench.inspect().blocks.items() if number and state != "free"}

    async def attach(self, signed: bytes) -> tuple[IncomingCall, list[kv_pb2.ExporterMessage]]:
        """Attach an importer; return its call and the messages it gets up to Finished, when the digests are known."""
        call = self.exporter.start_call(str(IMPORTER))
        ticket = kv_pb2.SignedTicket.FromString(signed)
        endpoints = {"loopback": b""}
        attach = kv_pb2.Attach(
            ticket=ticket,
            transports=["loopback"],
            layout=wire.fingerprint_to_wire(LAYOUT),
            endpoints=endpoints,
            digests=["folded-sums"],
        )
        self.exporter.attach(call, attach)
        told = []
        async with asyncio.timeout(10):
            async for message in call.messages():
                told.append(message)
                if message.WhichOneof("message") in ("finished", "refused", "failed"):
                    break
        return call, told

    async def until_nothing_is_held(self, *, lapsing: bool = False) -> None:
        """Wait until no block is held. `lapsing`: let leases and tickets end by their own deadlines. Raises
        AssertionError, TimeoutError.
        """
        async with asyncio.timeout(10):
            while len(self.exports) or self.handles() or self.exporter.num_live_tickets:
                if lapsing:
                    self.clock.advance(100.0)
                    self.exporter.reap()
                await asyncio.sleep(GRACE_S)
                self.pass_commands()
        self.pass_commands()
        self.bench.scheduler.check()
        assert not list(self.service.owners())
        assert self.bench.inspect().figures["frozen"] == 0
        assert self.blocks().keys() <= {"cached"}
