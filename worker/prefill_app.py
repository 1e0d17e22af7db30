"""The prefill role of a worker: its engine, scheduler, services and prefixes."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial

from cluster.errors import DrainIncomplete, Unhealthy
from cluster.process import lasting
from cluster.protocol.hashing import NATIVE
from cluster.request_size import LengthLimits
from cluster.settings.config import WorkerConfig
from engine.build import Engine, build_engine
from engine.scheduling import commands
from engine.scheduling.commands import Release
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import make_policy
from engine.scheduling.scheduler import SequenceScheduler
from kvtransfer.importer.calls import GrpcChannelPool
from kvtransfer.wire.wire_format import WireDtype
from prefill_worker.prefixes.cache_event_publisher import CacheEventPublisher
from prefill_worker.prefixes.prefix_pulls import PrefixPulls, PullResources
from prefill_worker.prefixes.tiers import PrefixTiers, TierResources, open_tiers
from prefill_worker.service import PrefillService
from tandem.internal.v1 import worker_pb2_grpc
from worker.app import WorkerApp
from worker.heartbeats import HeartbeatFeed, Heartbeats
from worker.life import WorkerLife
from worker.prefill_canary import PrefillCanary
from worker.service import WorkerService

_LOG = logging.getLogger("tandem.prefill")


async def serve(life: WorkerLife, *, announce: Callable[..., None]) -> None:
    """Run the worker until it is asked to stop, then drain. Raises ConfigError, ModelRefused, Fenced."""
    config = life.config
    with lasting():
        engine = await life.unless_stopped(partial(build_engine, config, WireDtype(config.kv_wire_dtype)))
    if engine is None:
        return
    for line in engine.report:
        _LOG.info(line)
    app = _PrefillApp(life, engine)
    await app.run(_limits(config, engine).capacity, announce)


class _PrefillApp(WorkerApp[commands.Command, commands.Event]):
    def __init__(self, life: WorkerLife, engine: Engine) -> None:
        super().__init__(life, engine, _scheduler(life, engine), engine.runner, PrefillCanary)
        self._released = asyncio.Event()
        pull_ids = itertools.count()
        self.pulls = self._prefix_pulls(life, pull_ids)
        self.tiers = self._prefix_tiers(life, engine, pull_ids)
        self._cache_events = CacheEventPublisher(life.member, self.steps)
        self._heartbeat_feed = HeartbeatFeed()
        self.heartbeats = Heartbeats(
            self._heartbeat_feed.beat,
            interval_s=life.config.heartbeat_s,
            num_steps=lambda: self.steps.progress.steps,
            watch=self.watch,
            service_times=self.service_times,
        )
        self.service = self._prefill_service(life, engine)
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self.service, life.server.grpc)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._worker_service(life), life.server.grpc)

    def _prefix_pulls(self, life: WorkerLife, pull_ids: Iterator[int]) -> PrefixPulls | None:
        """Build the prefix pulls. Returns None with a quantised wire dtype: pulled blocks would differ from computed
        ones."""
        if life.config.prefix_caching == "off" or life.config.kv_wire_dtype != NATIVE:
            return None
        resources = PullResources(
            member=life.member,
            importer=self.transfer.importer,
            links=self.transfer.links,
            channels=GrpcChannelPool(life.connect),
            block_size=life.config.block_size,
            block_bytes=self.transfer.block_bytes,
            new_chain=life.new_chain,
            compute_s=self._compute_s,
            pull_ids=pull_ids,
            clock=self.clock,
            telemetry=life.telemetry,
        )
        return PrefixPulls(resources, self.steps)

    def _prefix_tiers(self, life: WorkerLife, engine: Engine, pull_ids: Iterator[int]) -> PrefixTiers | None:
        if life.config.prefix_caching == "off" or not life.config.prefix_host_bytes:
            return None
        index, storage = open_tiers(life.config, engine.pool, engine.fingerprint)
        resources = TierResources(
            index=index,
            storage=storage,
            new_chain=life.new_chain,
            block_size=life.config.block_size,
            block_bytes=engine.pool.block_bytes,
            compute_s=self._compute_s,
            pull_ids=pull_ids,
            telemetry=life.telemetry,
        )
        return PrefixTiers(resources, self.steps)

    def _compute_s(self, num_tokens: int, num_before: int) -> float:
        """Predict the seconds to compute a part of a prompt behind `num_before` tokens of it."""
        times = self.service_times()
        assert times is not None, "a job came before the first steps were timed"
        return times.prompt_s(num_tokens, num_before, self.life.config.max_prefill_tokens)

    def _prefill_service(self, life: WorkerLife, engine: Engine) -> PrefillService:
        return PrefillService(
            steps=self.steps,
            exporter=self.transfer.exporter,
            pulls=self.pulls,
            tiers=self.tiers,
            cache_events=self._cache_events,
            follow_heartbeats=self._heartbeat_feed.follow,
            vocab_size=engine.model_info.vocab_size,
            max_calls=life.config.max_queue + life.config.max_num_seqs,
            cluster_key=life.key,
            refuse_if_unhealthy=self.watch.health.refuse_if_unhealthy,
            telemetry=life.telemetry,
        )

    def _worker_service(self, life: WorkerLife) -> WorkerService:
        return WorkerService(
            member=life.member,
            inspections=self.watch.inspections,
            more_figures=self._figures,
            request_drain=life.request_drain,
            publish_cache_events=self._cache_events.subscribe,
        )

    async def drain(self, grace_s: float) -> None:
        """Finish the calls that have begun, and wait until every ticket is fetched or has lapsed. Raises
        DrainIncomplete."""
        exporter = self.transfer.exporter
        try:
            async with asyncio.timeout(grace_s):
                await self.service.drain()
                while exporter.num_live_tickets:
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            raise DrainIncomplete(
                f"{self.service.num_calls} prefill(s) and {exporter.num_live_tickets} ticket(s) were left after"
                f" {grace_s:g} s, which their routers start again elsewhere; give it more --drain-grace-s"
            ) from None
        finally:
            self._cache_events.close()

    def _figures(self) -> dict[str, float]:
        parts = [part.figures() for part in (self.transfer, self.pulls, self.tiers) if part is not None]
        figures = {name: figure for figures in parts for name, figure in figures.items()}
        return figures | self.watch.health.figures()

    def on_events(self, events: tuple[commands.Event, ...]) -> None:
        self.service.on_events(events)

    def release(self, ticket_id: bytes) -> None:
        self.steps.post(Release(ticket_id))
        self._released.set()

    def owners(self) -> Iterator[str]:
        for part in (self.service, self.pulls, self.tiers):
            if part is not None:
                yield from part.owners()

    def end_work(self, error: Unhealthy) -> None:
        self.service.end_work(error)

    async def close_calls(self) -> None:
        self._heartbeat_feed.close()

    async def close_caches(self) -> None:
        for part in (self.pulls, self.tiers):
            if part is not None:
                await part.close()


def _scheduler(life: WorkerLife, engine: Engine) -> SequenceScheduler:
    limits = _limits(life.config, engine)
    return SequenceScheduler(limits, new_chain=life.new_chain, policy=make_policy(life.config.scheduling_policy))


def _limits(config: WorkerConfig, engine: Engine) -> SchedulerLimits:
    return SchedulerLimits(
        num_blocks=engine.pool.num_blocks,
        block_size=config.block_size,
        max_model_len=engine.model_info.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_prefill_tokens=config.max_prefill_tokens,
        max_queue=config.max_queue,
        lengths=LengthLimits(config.max_input_length, config.max_output_length),
        prefix_eviction=config.prefix_eviction,
    )
