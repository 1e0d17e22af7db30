"""Where the decode worker's objects meet: engine, scheduler, step thread, transfer and services."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial

from cluster.clock import MonotonicClock
from cluster.observe.heartbeats import Heartbeats
from cluster.process import lasting
from cluster.protocol.pair_wire import figures_to_wire
from cluster.settings.config import WorkerConfig
from cluster.settings.lengths import LengthLimits
from cluster.worker_life import WorkerLife
from cluster.worker_service import WorkerService
from cluster.worker_watch import canary_timeout_s, watch_over
from decode_worker.canary import DecodeCanary
from decode_worker.scheduling import commands
from decode_worker.scheduling.limits import DecodeLimits
from decode_worker.scheduling.preemption_cost import PreemptionCost
from decode_worker.scheduling.scheduler import DecodeScheduler
from decode_worker.service import DecodeService
from engine.build import Engine, build_engine
from engine.kv.host_blocks import HostBlocks, open_host_blocks, with_swaps
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.policies import make_policy
from engine.speculation.draft_model import with_draft_model
from engine.speculation.guessers import new_guesser
from engine.speculation.step_cost import fixed_rows
from engine.steps.step_loop import StepLoop
from kvtransfer.probe.measurement import Destination
from kvtransfer.wire.wire_dtypes import WireDtype
from kvtransfer.worker_transfer import WorkerTransfer
from tandem.v1 import worker_pb2_grpc

_LOG = logging.getLogger("tandem.decode")


async def serve(life: WorkerLife, *, announce: Callable[..., None]) -> None:
    """Until the worker is asked to stop; then drains. Raises ConfigError, ModelRefused, Fenced."""
    with lasting():
        engine = await life.unless_stopped(partial(_engine, life.config))
    if engine is None:
        return
    host_blocks, swap_report = open_host_blocks(engine.pool, life.config.swap_bytes)
    for line in (*engine.report, swap_report):
        _LOG.info(line)
    worker = _Worker(life, engine, host_blocks)
    await worker.transfer.start()
    worker.steps.start()
    beats = asyncio.create_task(worker.heartbeats.run(), name="heartbeats")
    canaries = asyncio.create_task(worker.watch.canaries.run(), name="canaries")
    try:
        await life.live(
            worker.transfer.profile(_limits(life.config, engine, host_blocks).capacity),
            announce=announce,
            drain=worker.service.drain,
            watch=worker.watch.health.watch,
        )
    finally:
        beats.cancel()
        canaries.cancel()
        await worker.service.close()
        worker.transfer.leave()
        await life.end()
        await worker.transfer.close()
        await asyncio.to_thread(worker.steps.stop, worker.watch.health.stop_s)


class _Worker:
    """The parts that know each other; built whole, before anything starts."""

    def __init__(self, life: WorkerLife, engine: Engine, host_blocks: HostBlocks | None) -> None:
        config, clock = life.config, MonotonicClock()
        limits = _limits(config, engine, host_blocks)
        self.steps = StepLoop[commands.Command, commands.Event](
            _scheduler(life, engine, limits, host_blocks),
            with_swaps(engine.runner, host_blocks) if host_blocks else engine.runner,
            clock,
            life.on_loop(self._on_events),
            on_error=lambda error: _LOG.error("a step failed", exc_info=error),
            on_fatal=life.fatal,
        )
        self._canary = DecodeCanary(
            self.steps.post, vocab_size=engine.model_info.vocab_size, timeout_s=canary_timeout_s(config)
        )
        self.watch = watch_over(
            self.steps,
            self._canary,
            life=life,
            clock=clock,
            end_work=lambda error: self.service.end_work(error),
            owners=self._owners,
        )
        self.transfer = WorkerTransfer(
            life=life,
            pool=engine.pool,
            table=engine.pool.layout,
            layout=engine.fingerprint,
            release=self._release,
            ask_for_prefix=self._ask_for_prefix,
            clock=clock,
        )
        self.service = self._decode_service(life, engine, limits)
        imports = self.service.imports
        self._probe = self.transfer.probe(Destination(imports, imports.new_id, self._num_free))
        self.heartbeats = Heartbeats(
            self.service.beat,
            interval_s=config.heartbeat_s,
            num_steps=lambda: self.steps.progress.steps,
            watch=self.watch,
            pairs=lambda: figures_to_wire(self.transfer.pairs.figures()),
        )
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self.service, life.server.grpc)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._worker_service(life), life.server.grpc)

    def _decode_service(self, life: WorkerLife, engine: Engine, limits: DecodeLimits) -> DecodeService:
        return DecodeService(
            member=life.member,
            steps=self.steps,
            importer=self.transfer.importer,
            exporter=self.transfer.exporter,
            prefixes=self.transfer.prefixes,
            vocab_size=engine.model_info.vocab_size,
            limits=limits,
            cluster_key=life.key,
            new_chain=life.new_chain,
            wire_dtype=life.config.kv_wire_dtype,
            stream_grace_s=life.config.stream_grace_s,
            inspections=self.watch.inspections,
            refuse_if_unhealthy=self.watch.health.refuse_if_unhealthy,
            telemetry=life.telemetry,
        )

    def _worker_service(self, life: WorkerLife) -> WorkerService:
        return WorkerService(
            member=life.member,
            inspections=self.watch.inspections,
            more_figures=self._figures,
            request_drain=life.request_drain,
            measure_pair=self._probe.measure,
        )

    def _on_events(self, events: tuple[commands.Event, ...]) -> None:
        self.service.on_events(self._canary.take(events))

    def _release(self, ticket_id: bytes) -> None:
        """No lease is left on a ticket of this worker."""
        self.service.exports.release(ticket_id)

    def _owners(self) -> Iterator[str]:
        """Holders of blocks that live on the event loop."""
        for part in (self._canary, self.service, self.transfer, self._probe):
            yield from part.owners()

    def _ask_for_prefix(self, ticket_id: bytes, block_hashes: tuple[bytes, ...], min_blocks: int) -> None:
        self.steps.post(commands.OfferPrefix(ticket_id, block_hashes, min_blocks))

    async def _num_free(self) -> int:
        return (await self.watch.inspections.inspect()).blocks["free"]

    def _figures(self) -> dict[str, float]:
        figures = self.transfer.figures() | self.watch.health.figures() | self.service.figures()
        return figures | {
            "local_prefills": float(self.service.num_local_prefills),
            "imports": float(len(self.service.imports)),
        }


def _engine(config: WorkerConfig) -> Engine:
    """Raises ConfigError and ModelRefused."""
    engine = build_engine(config, WireDtype(config.kv_wire_dtype))
    return with_draft_model(config, engine) if config.speculation == "draft" else engine


def _scheduler(
    life: WorkerLife, engine: Engine, limits: DecodeLimits, host_blocks: HostBlocks | None
) -> DecodeScheduler:
    return DecodeScheduler(
        limits,
        new_chain=life.new_chain,
        wire_dtype=life.config.kv_wire_dtype,
        cost=PreemptionCost(host_blocks.copy_s_per_block() if host_blocks else None),
        policy=make_policy(life.config.scheduling_policy),
        lengths=LengthPredictor(),
        new_guesser=new_guesser(life.config, lambda: fixed_rows(engine)),
    )


def _limits(config: WorkerConfig, engine: Engine, host_blocks: HostBlocks | None) -> DecodeLimits:
    return DecodeLimits(
        num_blocks=engine.pool.num_blocks,
        block_size=config.block_size,
        max_model_len=engine.model_info.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_prefill_tokens=config.max_prefill_tokens,
        max_queue=config.max_queue,
        watermark=config.watermark,
        num_swap_slots=host_blocks.num_slots if host_blocks else 0,
        lengths=LengthLimits(config.max_input_length, config.max_output_length),
        prefix_eviction=config.prefix_eviction,
    )
