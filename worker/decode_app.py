"""The decode role of a worker: its engine, scheduler and services."""

import logging
from collections.abc import Callable, Iterator
from functools import partial

from cluster.errors import Unhealthy
from cluster.process import lasting
from cluster.protocol.wire import link_speeds_to_wire
from cluster.request_size import LengthLimits
from cluster.settings.config import WorkerConfig
from decode_worker.service import DecodeService
from engine.build import Engine, build_engine
from engine.kv.host_blocks import HostBlocks, open_host_blocks, with_swaps
from engine.scheduling import commands
from engine.scheduling.batching.swapping import PreemptionCost
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import make_policy
from engine.scheduling.scheduler import SequenceScheduler
from engine.speculation.draft_model import with_draft_model
from engine.speculation.drafter import drafter_factory
from engine.speculation.step_cost import fixed_rows
from kvtransfer.importer.link_check import Destination
from kvtransfer.wire.wire_format import WireDtype
from tandem.internal.v1 import worker_pb2_grpc
from worker.app import WorkerApp
from worker.decode_canary import DecodeCanary
from worker.heartbeats import Heartbeats
from worker.life import WorkerLife
from worker.service import WorkerService

_LOG = logging.getLogger("tandem.decode")


async def serve(life: WorkerLife, *, announce: Callable[..., None]) -> None:
    """Run the worker until it is asked to stop, then drain. Raises ConfigError, ModelRefused, Fenced."""
    with lasting():
        engine = await life.unless_stopped(partial(_engine, life.config))
    if engine is None:
        return
    host_blocks, swap_report = open_host_blocks(engine.pool, life.config.swap_bytes)
    for line in (*engine.report, swap_report):
        _LOG.info(line)
    app = _DecodeApp(life, engine, host_blocks)
    await app.run(_limits(life.config, engine, host_blocks).capacity, announce)


class _DecodeApp(WorkerApp[commands.Command, commands.Event]):
    def __init__(self, life: WorkerLife, engine: Engine, host_blocks: HostBlocks | None) -> None:
        config, limits = life.config, _limits(life.config, engine, host_blocks)
        super().__init__(
            life,
            engine,
            _scheduler(life, engine, limits, host_blocks),
            with_swaps(engine.runner, host_blocks) if host_blocks else engine.runner,
            DecodeCanary,
        )
        self.service = self._decode_service(life, engine, limits)
        imports = self.service.imports
        self._link_check = self.transfer.link_check(Destination(imports, imports.new_id, self._num_free))
        self.heartbeats = Heartbeats(
            self.service.beat,
            interval_s=config.heartbeat_s,
            num_steps=lambda: self.steps.progress.steps,
            watch=self.watch,
            service_times=self.service_times,
            links=lambda: link_speeds_to_wire(self.transfer.links.speeds()),
        )
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self.service, life.server.grpc)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._worker_service(life), life.server.grpc)

    def _decode_service(self, life: WorkerLife, engine: Engine, limits: SchedulerLimits) -> DecodeService:
        return DecodeService(
            member=life.member,
            steps=self.steps,
            importer=self.transfer.importer,
            exporter=self.transfer.exporter,
            vocab_size=engine.model_info.vocab_size,
            limits=limits,
            cluster_key=life.key,
            new_chain=life.new_chain,
            wire_dtype=life.config.kv_wire_dtype,
            stream_grace_s=life.config.stream_grace_s,
            refuse_if_unhealthy=self.watch.health.refuse_if_unhealthy,
            telemetry=life.telemetry,
        )

    def _worker_service(self, life: WorkerLife) -> WorkerService:
        return WorkerService(
            member=life.member,
            inspections=self.watch.inspections,
            more_figures=self._figures,
            request_drain=life.request_drain,
            check_link=self._link_check.measure,
        )

    def on_events(self, events: tuple[commands.Event, ...]) -> None:
        self.service.on_events(events)

    def release(self, ticket_id: bytes) -> None:
        self.service.exports.release(ticket_id)

    def owners(self) -> Iterator[str]:
        yield from self.service.owners()
        yield from self._link_check.owners()

    def end_work(self, error: Unhealthy) -> None:
        self.service.end_work(error)

    async def drain(self, grace_s: float) -> None:
        await self.service.drain(grace_s)

    async def close_calls(self) -> None:
        await self.service.close()

    async def _num_free(self) -> int:
        return (await self.watch.inspections.inspect()).blocks["free"]

    def _figures(self) -> dict[str, float]:
        figures = self.transfer.figures() | self.watch.health.figures() | self.service.figures()
        return figures | {
            "local_prefills": float(self.service.num_local_prefills),
            "imports": float(len(self.service.imports)),
        }


def _engine(config: WorkerConfig) -> Engine:
    """Build the engine. Raises ConfigError and ModelRefused."""
    engine = build_engine(config, WireDtype(config.kv_wire_dtype))
    return with_draft_model(config, engine) if config.speculation == "draft" else engine


def _scheduler(
    life: WorkerLife, engine: Engine, limits: SchedulerLimits, host_blocks: HostBlocks | None
) -> SequenceScheduler:
    return SequenceScheduler(
        limits,
        new_chain=life.new_chain,
        wire_dtype=life.config.kv_wire_dtype,
        cost=PreemptionCost(host_blocks.copy_s_per_block() if host_blocks else None),
        policy=make_policy(life.config.scheduling_policy),
        lengths=LengthPredictor(),
        new_drafter=drafter_factory(life.config, lambda: fixed_rows(engine)),
    )


def _limits(config: WorkerConfig, engine: Engine, host_blocks: HostBlocks | None) -> SchedulerLimits:
    return SchedulerLimits(
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
