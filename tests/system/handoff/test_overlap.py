"""Prefill, transfer and decode overlap: no step waits for data that it does not need yet."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from cluster.auth.keys import ClusterKeys
from cluster.clock import Clock, MonotonicClock
from cluster.messages import Epoch, LayoutFingerprint, MemberId, PrefillJob, Sampling, TokenStops
from cluster.observe.telemetry import Telemetry
from cluster.outstanding_work import OutstandingWork
from cluster.protocol import wire
from cluster.protocol.hashing import hash_prompt, nameless_chains
from cluster.settings.worker_settings import EngineSettings, TransferSettings
from engine.build import Engine, build_engine
from engine.grammar.compiled_grammars import CompiledGrammars
from engine.kv.pool import KvPool
from engine.scheduling import commands
from engine.scheduling.commands import Release
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import Runner, StepPlan, StepResult
from engine.steps.step_loop import StepLoop
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.exporter.service import KvTransferServicer
from kvtransfer.importer.importer import ExpectedPrompt, Importer
from kvtransfer.transports.base import Channel, ImporterTransport
from kvtransfer.transports.proven_connections import ConnectionProofs
from kvtransfer.transports.shm.transport import ShmExporter, ShmImporter
from kvtransfer.wire.wire_format import NativeFormat
from prefill_worker.service import CacheEventPublisher, PrefillService
from tandem.internal.v1 import kv_pb2_grpc, worker_pb2_grpc
from tests.contract.rigs.handoff_parts import Counters, DecodeBlocks
from tests.system.rigs.members.asking import ask, asked, question
from tests.system.rigs.processes.local_cluster import DEMO_MODEL, LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_DEADLINE_S = 60.0
_KEY = ClusterKeys(b"k" * 32)
_IMPORTER = MemberId("d0", "1")
_PROOFS = ConnectionProofs(_KEY, MemberId("p0", "1"), Telemetry())
_CHUNK = 32
_HELD_CHUNK = 5
_PROMPT = tuple(range(10, 10 + 7 * _CHUNK + 9))  # seven chunks and a tail


async def test_with_the_transfer_held_the_client_already_has_its_first_token(cluster: LocalCluster) -> None:
    request = question(range(20, 60), max_tokens=12, ignore_eos=True)
    undisturbed = await ask(cluster, request)
    async with asked(cluster, request) as answer:
        with ExitStack() as stopped:
            for name in cluster.workers("decode"):
                stopped.enter_context(cluster.members[name].stopped())
            await answer.until(1)
            assert answer.token_ids == undisturbed.token_ids[:1]
        await answer.end()
    assert answer.token_ids == undisturbed.token_ids
    assert not answer.ledger.reasons, "it was the same attempt all along"


async def test_with_prefill_held_at_chunk_5_chunks_1_to_4_are_at_the_importer() -> None:
    async with _prefill_worker() as worker, _importing(worker) as importing:
        importer, reads, pool = importing
        job = _job()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            events = worker_pb2_grpc.PrefillWorkerStub(channel).Prefill(wire.prefill_job_to_wire(job))
            ticket = (await events.read()).accepted.ticket
            expected = ExpectedPrompt(len(_PROMPT), hash_prompt(_KEY.hash_key, _PROMPT), 1)
            blocks = DecodeBlocks(pool.num_blocks)
            importing_task = asyncio.create_task(
                importer.import_blocks(handoff_id=1, signed_ticket=ticket, expected=expected, blocks=blocks)
            )
            async with asyncio.timeout(_DEADLINE_S):
                await worker.runner.held.wait()
                num_blocks = (_HELD_CHUNK - 1) * _CHUNK // pool.layout.block_size
                pairs = await reads.until(num_blocks)

            assert len(pairs) == num_blocks
            assert not importing_task.done()
            assert worker.runner.num_done == _HELD_CHUNK - 1
            assert [remote for remote, _ in pairs] == list(worker.runner.block_ids[:num_blocks])
            assert _equal(worker.pool, pool, pairs)
            assert all(bool(pool.raw[local].any()) for _, local in pairs), "unwritten blocks are equal too"

            worker.runner.go_on.set()
            async with asyncio.timeout(_DEADLINE_S):
                first_tokens = (await events.read()).first_tokens
                imported = await importing_task
        assert imported.first_tokens[0].token_id == first_tokens.tokens[0].token_id
        assert [local for _, local in pairs] == list(imported.sealed_block_ids[:num_blocks])
        local_ids = (*imported.sealed_block_ids, *imported.tail_block_ids)
        assert _equal(worker.pool, pool, list(zip(worker.runner.block_ids, local_ids, strict=True)))


class _GateRunner:
    """The real runner, whose fifth step waits for a gate."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self.held = asyncio.Event()
        self.go_on = threading.Event()
        self.num_done = 0
        self.block_ids: tuple[int, ...] = ()  # of the prompt, in its order

    def run(self, plan: StepPlan) -> StepResult:
        if self.num_done == _HELD_CHUNK - 1:
            self._loop.call_soon_threadsafe(self.held.set)
            assert self.go_on.wait(_DEADLINE_S)
        result = self._inner.run(plan)
        self.num_done += 1
        self.block_ids = plan.chunks[0].block_ids
        return result


@dataclass
class _Reads:
    """Records (remote block, local block) of every completed read."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def add(self, remote: Sequence[int], local: Sequence[int]) -> None:
        async with self.changed:
            self.pairs += zip(remote, local, strict=True)
            self.changed.notify_all()

    async def until(self, num_blocks: int) -> list[tuple[int, int]]:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.pairs) >= num_blocks)
            return list(self.pairs)


class _ShownChannel:
    def __init__(self, inner: Channel, reads: _Reads) -> None:
        self._inner, self._reads = inner, reads
        self.destroy, self.finish = inner.destroy, inner.finish

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        await self._inner.read(remote_block_ids, local_block_ids)
        await self._reads.add(remote_block_ids, local_block_ids)


class _ShownTransport:
    """The real transport, which reports completed reads to the test."""

    def __init__(self, inner: ImporterTransport, reads: _Reads) -> None:
        self._inner, self._reads = inner, reads
        self.name, self.endpoint, self.close = inner.name, inner.endpoint, inner.close

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> _ShownChannel:
        return _ShownChannel(await self._inner.open_channel(epoch, exporter_endpoint), self._reads)


@dataclass(frozen=True, slots=True)
class _PrefillWorker:
    address: str
    pool: KvPool
    fingerprint: LayoutFingerprint
    runner: _GateRunner


@asynccontextmanager
async def _prefill_worker() -> AsyncIterator[_PrefillWorker]:
    """Run the parts of a prefill worker that a hand-off uses, on a real server."""
    settings = EngineSettings(
        model=str(DEMO_MODEL), dtype="float32", num_blocks=32, max_model_len=512, max_prefill_tokens=_CHUNK
    )
    engine = await asyncio.to_thread(build_engine, settings)
    loop, runner, clock = asyncio.get_running_loop(), _GateRunner(engine.runner), MonotonicClock()
    broken: list[Exception] = []
    services: list[PrefillService] = []

    def emit(events: tuple[commands.Event, ...]) -> None:
        loop.call_soon_threadsafe(lambda: services[0].on_events(steps.settle(events)))

    scheduler = _scheduler(engine.pool.num_blocks, settings.block_size)
    steps = StepLoop[commands.Command, commands.Event](
        scheduler, runner, clock, emit, on_error=broken.append, on_fatal=broken.append
    )
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    exporter = _exporter(engine, address, clock, steps)
    service = PrefillService(
        steps=steps,
        exporter=exporter,
        pulls=None,
        tiers=None,
        cache_events=CacheEventPublisher(MemberId("p0", "1"), steps),
        outstanding=OutstandingWork(),
        max_calls=64,
        grammars=CompiledGrammars(None),
        refuse_if_unhealthy=lambda: None,
        vocab_size=engine.model_info.vocab_size,
        keys=_KEY,
        telemetry=Telemetry(),
    )
    services.append(service)
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(service, server)
    kv_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(exporter=exporter), server)
    await exporter.start()
    await server.start()
    steps.start()
    try:
        yield _PrefillWorker(address, engine.pool, engine.fingerprint, runner)
    finally:
        runner.go_on.set()
        await exporter.close()
        await server.stop(None)
        assert await asyncio.to_thread(steps.stop)
        engine.pool.close()
    assert not broken
    scheduler.check()


def _scheduler(num_blocks: int, block_size: int) -> SequenceScheduler:
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        max_model_len=1 << 20,
        block_size=block_size,
        max_prefill_tokens=_CHUNK,
        max_num_seqs=4,
        max_queue=4,
    )
    return SequenceScheduler(limits, new_chain=nameless_chains())


def _exporter(
    engine: Engine, address: str, clock: Clock, steps: StepLoop[commands.Command, commands.Event]
) -> Exporter:
    return Exporter(
        member=MemberId("p0", "1"),
        address=address,
        wire=NativeFormat(engine.pool),
        layout=engine.fingerprint,
        keys=_KEY,
        settings=TransferSettings(),
        transports=[ShmExporter(memory=engine.pool, proofs=_PROOFS)],
        release=lambda ticket_id: steps.post(Release(ticket_id)),
        clock=clock,
        counters=Counters(),
    )


@asynccontextmanager
async def _importing(worker: _PrefillWorker) -> AsyncIterator[tuple[Importer, _Reads, KvPool]]:
    pool, reads = KvPool(worker.pool.layout, worker.pool.num_blocks, "cpu"), _Reads()
    importer = Importer(
        member=_IMPORTER,
        wire=NativeFormat(pool),
        layout=worker.fingerprint,
        block_size=pool.layout.block_size,
        keys=_KEY,
        settings=TransferSettings(),
        transports=[_ShownTransport(ShmImporter(memory=pool, proofs=_PROOFS), reads)],
        clock=MonotonicClock(),
        counters=Counters(),
    )
    try:
        yield importer, reads, pool
    finally:
        await importer.close()
        pool.close()


def _job() -> PrefillJob:
    return PrefillJob(
        request_id="held",
        attempt=1,
        token_ids=_PROMPT,
        sampling=Sampling(temperature=0.0),
        stops=TokenStops(max_tokens=4, min_tokens=0, stop_token_ids=frozenset()),
        seeds=(1,),
        num_committed=0,
        importer=_IMPORTER,
        timeout_s=_DEADLINE_S,
    )


def _equal(source: KvPool, target: KvPool, pairs: Sequence[tuple[int, int]]) -> bool:
    remote, local = (list(ids) for ids in zip(*pairs, strict=True))
    return bool((source.raw[remote] == target.raw[local]).all())
