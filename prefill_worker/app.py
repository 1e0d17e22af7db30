"""Where the prefill worker's objects meet: engine, scheduler, step thread, transfer and services."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial

from cluster.clock import Clock, MonotonicClock
from cluster.errors import DrainIncomplete
from cluster.observe.heartbeats import HeartbeatFeed, Heartbeats
from cluster.process import lasting
from cluster.protocol.hashing import NATIVE
from cluster.settings.config import WorkerConfig
from cluster.settings.lengths import LengthLimits
from cluster.worker_life import WorkerLife
from cluster.worker_service import WorkerService
from cluster.worker_watch import canary_timeout_s, watch_over
from engine.build import Engine, build_engine
from engine.scheduling.policies import make_policy
from engine.steps.step_loop import StepLoop
from kvtransfer.importer.exporter_channels import ExporterChannels
from kvtransfer.wire.wire_dtypes import WireDtype
from kvtransfer.worker_transfer import WorkerTransfer
from prefill_worker.canary import PrefillCanary
from prefill_worker.prefixes.prefix_feed import PrefixFeed
from prefill_worker.prefixes.prefix_pulls import PrefixPulls, PullMeans
from prefill_worker.prefixes.prefix_tiers import PrefixTiers, TierMeans
from prefill_worker.prefixes.tier_opening import open_tiers
from prefill_worker.scheduling import commands
from prefill_worker.scheduling.limits import PrefillLimits
from prefill_worker.scheduling.rates import RunningRate
from prefill_worker.scheduling.scheduler import PrefillScheduler
from prefill_worker.service import PrefillService
from tandem.v1 import worker_pb2_grpc

_LOG = logging.getLogger("tandem.prefill")


async def serve(life: WorkerLife, *, announce: Callable[..., None]) -> None:
    """Until the worker is asked to stop; then drains. Raises ConfigError, ModelRefused, Fenced."""
    config = life.config
    with lasting():
        engine = await life.unless_stopped(partial(build_engine, config, WireDtype(config.kv_wire_dtype)))
    if engine is None:
        return
    for line in engine.report:
        _LOG.info(line)
    worker = _Worker(life, engine)
    await worker.transfer.start()
    worker.steps.start()
    beats = asyncio.create_task(worker.heartbeats.run(), name="heartbeats")
    canaries = asyncio.create_task(worker.watch.canaries.run(), name="canaries")
    try:
        await life.live(
            worker.transfer.profile(_limits(config, engine).capacity),
            announce=announce,
            drain=worker.drain,
            watch=worker.watch.health.watch,
        )
    finally:
        beats.cancel()
        worker.heartbeat_feed.close()
        canaries.cancel()
        worker.transfer.leave()
        await life.end()
        await worker.transfer.close()
        if worker.pulls is not None:
            await worker.pulls.close()
        if worker.tiers is not None:
            await worker.tiers.close()
        await asyncio.to_thread(worker.steps.stop, worker.watch.health.stop_s)


class _Worker:
    """The parts that know each other; built whole, before anything starts."""

    def __init__(self, life: WorkerLife, engine: Engine) -> None:
        self._released = asyncio.Event()
        clock = MonotonicClock()
        self.steps = StepLoop[commands.Command, commands.Event](
            _scheduler(life, engine),
            engine.runner,
            clock,
            life.on_loop(self._on_events),
            on_error=lambda error: _LOG.error("a step failed", exc_info=error),
            on_fatal=life.fatal,
        )
        self._canary = PrefillCanary(
            self.steps.post, vocab_size=engine.model_info.vocab_size, timeout_s=canary_timeout_s(life.config)
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
        compute, pull_ids = RunningRate(), itertools.count()
        self.pulls = self._prefix_pulls(life, compute, pull_ids, clock)
        self.tiers = self._prefix_tiers(life, engine, compute, pull_ids)
        self._feed = PrefixFeed(life.member, self.steps.post)
        self.heartbeat_feed = HeartbeatFeed()
        self.heartbeats = Heartbeats(
            self.heartbeat_feed.beat,
            interval_s=life.config.heartbeat_s,
            num_steps=lambda: self.steps.progress.steps,
            watch=self.watch,
        )
        self.service = self._prefill_service(life, engine, compute)
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self.service, life.server.grpc)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._worker_service(life), life.server.grpc)

    def _prefix_pulls(
        self, life: WorkerLife, compute: RunningRate, pull_ids: Iterator[int], clock: Clock
    ) -> PrefixPulls | None:
        """What was quantised on its way would not be what is computed here: then nothing is pulled."""
        if life.config.prefix_caching == "off" or life.config.kv_wire_dtype != NATIVE:
            return None
        means = PullMeans(
            member=life.member,
            importer=self.transfer.importer,
            pairs=self.transfer.pairs,
            channels=ExporterChannels(life.connect),
            block_size=life.config.block_size,
            block_bytes=self.transfer.block_bytes,
            new_chain=life.new_chain,
            compute=compute,
            pull_ids=pull_ids,
            clock=clock,
            telemetry=life.telemetry,
        )
        return PrefixPulls(means, self.steps.post)

    def _prefix_tiers(
        self, life: WorkerLife, engine: Engine, compute: RunningRate, pull_ids: Iterator[int]
    ) -> PrefixTiers | None:
        if life.config.prefix_caching == "off" or not life.config.prefix_host_bytes:
            return None
        index, copies = open_tiers(life.config, engine.pool, engine.fingerprint)
        means = TierMeans(
            index=index,
            copies=copies,
            new_chain=life.new_chain,
            block_size=life.config.block_size,
            block_bytes=engine.pool.block_bytes,
            compute=compute,
            pull_ids=pull_ids,
            telemetry=life.telemetry,
        )
        return PrefixTiers(means, self.steps.post)

    def _prefill_service(self, life: WorkerLife, engine: Engine, compute: RunningRate) -> PrefillService:
        return PrefillService(
            steps=self.steps,
            exporter=self.transfer.exporter,
            prefixes=self.transfer.prefixes,
            pulls=self.pulls,
            tiers=self.tiers,
            compute=compute,
            feed=self._feed,
            heartbeats=self.heartbeat_feed,
            vocab_size=engine.model_info.vocab_size,
            max_calls=life.config.max_queue + life.config.max_num_seqs,
            cluster_key=life.key,
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
            follow_prefixes=self._feed.follow,
        )

    async def drain(self, grace_s: float) -> None:
        """Finishes the calls that have begun, and waits until what they left behind has been fetched or has lapsed.
        Raises DrainIncomplete."""
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
            self._feed.close()

    def _figures(self) -> dict[str, float]:
        parts = [part.figures() for part in (self.transfer, self.pulls, self.tiers) if part is not None]
        figures = {name: figure for figures in parts for name, figure in figures.items()}
        return figures | self.watch.health.figures()

    def _owners(self) -> Iterator[str]:
        """Holders of blocks that live on the event loop."""
        for part in (self._canary, self.service, self.transfer, self.pulls, self.tiers):
            if part is not None:
                yield from part.owners()

    def _ask_for_prefix(self, ticket_id: bytes, block_hashes: tuple[bytes, ...], min_blocks: int) -> None:
        self.steps.post(commands.OfferPrefix(ticket_id, block_hashes, min_blocks))

    def _on_events(self, events: tuple[commands.Event, ...]) -> None:
        self.service.on_events(self._canary.take(events))

    def _release(self, ticket_id: bytes) -> None:
        self.steps.post(commands.Release(ticket_id))
        self._released.set()


def _scheduler(life: WorkerLife, engine: Engine) -> PrefillScheduler:
    limits = _limits(life.config, engine)
    return PrefillScheduler(limits, new_chain=life.new_chain, policy=make_policy(life.config.scheduling_policy))


def _limits(config: WorkerConfig, engine: Engine) -> PrefillLimits:
    return PrefillLimits(
        num_blocks=engine.pool.num_blocks,
        block_size=config.block_size,
        max_model_len=engine.model_info.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_prefill_tokens=config.max_prefill_tokens,
        max_queue=config.max_queue,
        lengths=LengthLimits(config.max_input_length, config.max_output_length),
        prefix_eviction=config.prefix_eviction,
    )
