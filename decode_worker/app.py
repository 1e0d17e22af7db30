"""Where the decode worker's objects meet: engine, scheduler, step thread, transfer and services."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from cluster.canary import Canaries
from cluster.clock import MonotonicClock
from cluster.config import WorkerConfig
from cluster.errors import Unavailable
from cluster.hashing import keyed_chains, nameless_chains
from cluster.lengths import LengthLimits
from cluster.member import Capacity
from cluster.pair_wire import figures_to_wire
from cluster.process import lasting
from cluster.watchdog import StuckLimits
from cluster.worker_health import WorkerHealth
from cluster.worker_life import WorkerLife
from cluster.worker_service import Inspections, WorkerService
from decode_worker import commands
from decode_worker.canary import DecodeCanary
from decode_worker.limits import DecodeLimits
from decode_worker.preemption_cost import PreemptionCost
from decode_worker.scheduler import DecodeScheduler
from decode_worker.service import DecodeService
from engine.build import Engine, build_engine
from engine.host_blocks import HostBlocks, open_host_blocks, with_swaps
from engine.length_prediction import LengthPredictor
from engine.policies import make_policy
from engine.speculation.draft_model import with_draft_model
from engine.speculation.guessers import new_guesser
from engine.speculation.step_cost import fixed_rows
from engine.step_loop import StepLoop
from kvtransfer.probe import Destination
from kvtransfer.wire_dtypes import WireDtype
from kvtransfer.worker_transfer import WorkerTransfer
from tandem.v1 import worker_pb2, worker_pb2_grpc

_LOG = logging.getLogger("tandem.decode")
_CANARY_FACTOR = 5.0  # of a step's limit: the first one may compile


async def serve(life: WorkerLife, *, announce: Callable[..., None]) -> None:
    """Until the worker is asked to stop; then drains. Raises ConfigError, ModelRefused, Fenced."""
    config = life.config
    with lasting():
        engine = await life.unless_stopped(partial(_engine, config))
    if engine is None:
        return
    host_blocks, swap_report = open_host_blocks(engine.pool, config.swap_bytes)
    for line in (*engine.report, swap_report):
        _LOG.info(line)
    worker = _Worker(life, engine, host_blocks)
    await worker.transfer.start()
    worker.steps.start()
    beats = asyncio.create_task(worker.beat(), name="heartbeats")
    canaries = asyncio.create_task(worker.canaries.run(), name="canaries")
    try:
        await life.live(
            fingerprint=engine.fingerprint,
            capacity=Capacity(
                num_blocks=engine.pool.num_blocks,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_model_len=engine.model_info.max_model_len,
                block_bytes=worker.transfer.block_bytes,
            ),
            transports=worker.transfer.transports.names,
            announce=announce,
            drain=worker.service.drain,
            watch=worker.health.watch,
        )
    finally:
        beats.cancel()
        canaries.cancel()
        await worker.service.close()
        await life.end()
        await worker.transfer.close()
        await asyncio.to_thread(worker.steps.stop, worker.health.stop_s)


class _Worker:
    """The parts that know each other; built whole, before anything starts."""

    def __init__(self, life: WorkerLife, engine: Engine, host_blocks: HostBlocks | None) -> None:
        config = life.config
        self._loop = asyncio.get_running_loop()
        clock = MonotonicClock()
        limits = _limits(config, engine, host_blocks)
        cost = PreemptionCost(host_blocks.copy_s_per_block() if host_blocks else None)
        new_chain = keyed_chains(life.key, config.block_size) if config.prefix_caching == "on" else nameless_chains()
        self._heartbeat_s = config.heartbeat_s
        self.steps = StepLoop[commands.Command, commands.Event](
            DecodeScheduler(
                limits,
                new_chain=new_chain,
                wire_dtype=config.kv_wire_dtype,
                cost=cost,
                policy=make_policy(config.scheduling_policy),
                lengths=LengthPredictor(),
                new_guesser=new_guesser(config, lambda: fixed_rows(engine)),
            ),
            with_swaps(engine.runner, host_blocks) if host_blocks else engine.runner,
            clock,
            self._emit,
            on_error=lambda error: _LOG.error("a step failed", exc_info=error),
            on_fatal=life.fatal,
        )
        inspections = Inspections(self.steps.post)
        self._inspections = inspections
        self.health = WorkerHealth(
            server=life.server,
            steps=self.steps,
            limits=StuckLimits(config.step_timeout_s, config.stuck_exit_s),
            clock=clock,
            telemetry=life.telemetry,
            end_work=lambda error: self.service.end_work(error),
        )
        flight = DecodeCanary(
            self.steps.post, vocab_size=engine.model_info.vocab_size, timeout_s=_CANARY_FACTOR * config.step_timeout_s
        )
        self._without_canaries = flight.take
        self.canaries = Canaries(
            flight,
            interval_s=config.canary_interval_s,
            timeout_s=_CANARY_FACTOR * config.step_timeout_s,
            retry_s=min(config.canary_interval_s, config.stuck_exit_s / 4),
            progress=lambda: self.steps.progress,
            health=self.health,
            clock=clock,
            telemetry=life.telemetry,
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
        self.service = DecodeService(
            member=life.member,
            steps=self.steps,
            importer=self.transfer.importer,
            exporter=self.transfer.exporter,
            prefixes=self.transfer.prefixes,
            vocab_size=engine.model_info.vocab_size,
            limits=limits,
            cluster_key=life.key,
            new_chain=new_chain,
            wire_dtype=config.kv_wire_dtype,
            stream_grace_s=config.stream_grace_s,
            inspections=inspections,
            refuse_if_unhealthy=self.health.refuse_if_unhealthy,
            telemetry=life.telemetry,
        )
        workers = WorkerService(
            member=life.member,
            inspections=inspections,
            more_figures=self._figures,
            request_drain=life.request_drain,
            measure_pair=self.transfer.probe(self._probe_destination()).measure,
        )
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self.service, life.server.grpc)
        worker_pb2_grpc.add_WorkerServicer_to_server(workers, life.server.grpc)

    async def beat(self) -> None:
        """One heartbeat after the other, off the step thread: a stuck step shows as a counter that stands still."""
        running = waiting = free_blocks = 0
        while True:
            try:
                inspected = await self._inspections.inspect(timeout_s=self._heartbeat_s)
            except Unavailable:
                _LOG.debug("the step thread is in a long step; the figures before it stand")
            else:
                running, waiting = int(inspected.figures["running"]), int(inspected.figures["waiting"])
                free_blocks = inspected.blocks["free"] + inspected.blocks["cached"]
            self.service.beat(
                worker_pb2.Heartbeat(
                    step=self.steps.progress.steps,
                    running=running,
                    waiting=waiting,
                    free_blocks=free_blocks,
                    pairs=figures_to_wire(self.transfer.pairs.figures()),
                    step_s=self.health.step_s,
                )
            )
            await asyncio.sleep(self._heartbeat_s)

    def _probe_destination(self) -> Destination:
        async def num_free() -> int:
            return (await self._inspections.inspect()).blocks["free"]

        imports = self.service.imports
        return Destination(blocks=imports, new_id=imports.new_id, num_free=num_free)

    def _ask_for_prefix(self, ticket_id: bytes, block_hashes: tuple[bytes, ...], min_blocks: int) -> None:
        self.steps.post(commands.OfferPrefix(ticket_id, block_hashes, min_blocks))

    def _emit(self, events: tuple[commands.Event, ...]) -> None:
        """From the step thread to the event loop."""
        self._loop.call_soon_threadsafe(self._on_events, events)

    def _on_events(self, events: tuple[commands.Event, ...]) -> None:
        self.service.on_events(self._without_canaries(events))

    def _release(self, ticket_id: bytes) -> None:
        """No lease is left on a ticket of this worker."""
        self.service.exports.release(ticket_id)

    def _figures(self) -> dict[str, float]:
        return (
            self.transfer.figures()
            | self.health.figures()
            | self.service.figures()
            | {
                "local_prefills": float(self.service.num_local_prefills),
                "imports": float(len(self.service.imports)),
            }
        )


def _engine(config: WorkerConfig) -> Engine:
    """Raises ConfigError and ModelRefused."""
    engine = build_engine(config, WireDtype(config.kv_wire_dtype))
    return with_draft_model(config, engine) if config.speculation == "draft" else engine


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
