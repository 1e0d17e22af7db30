"""Where the prefill worker's objects meet: engine, scheduler, step thread, transfer and services."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from functools import partial

from cluster.canary import Canaries
from cluster.clock import MonotonicClock
from cluster.config import WorkerConfig
from cluster.errors import DrainIncomplete
from cluster.hashing import NATIVE, NewChain, keyed_chains, nameless_chains
from cluster.lengths import LengthLimits
from cluster.member import Capacity
from cluster.process import lasting
from cluster.watchdog import StuckLimits
from cluster.worker_health import WorkerHealth
from cluster.worker_life import WorkerLife
from cluster.worker_service import Inspections, WorkerService
from engine.build import Engine, build_engine
from engine.policies import make_policy
from engine.step_loop import StepLoop
from kvtransfer.exporter_channels import ExporterChannels
from kvtransfer.wire_dtypes import WireDtype
from kvtransfer.worker_transfer import WorkerTransfer
from prefill_worker import commands
from prefill_worker.canary import PrefillCanary
from prefill_worker.prefix_feed import PrefixFeed
from prefill_worker.prefix_pulls import PrefixPulls, PullMeans
from prefill_worker.prefix_tiers import PrefixTiers, TierMeans
from prefill_worker.rates import RunningRate
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.service import PrefillService
from prefill_worker.tier_opening import open_tiers
from tandem.v1 import worker_pb2_grpc

_LOG = logging.getLogger("tandem.prefill")
_CANARY_FACTOR = 5.0  # of a step's limit: the first one may compile


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
            drain=worker.drain,
            watch=worker.health.watch,
        )
    finally:
        canaries.cancel()
        await life.end()
        await worker.transfer.close()
        if worker.pulls is not None:
            await worker.pulls.close()
        if worker.tiers is not None:
            await worker.tiers.close()
        await asyncio.to_thread(worker.steps.stop, worker.health.stop_s)


class _Worker:
    """The parts that know each other; built whole, before anything starts."""

    def __init__(self, life: WorkerLife, engine: Engine) -> None:
        config = life.config
        self._loop = asyncio.get_running_loop()
        self._released = asyncio.Event()
        clock = MonotonicClock()
        new_chain = keyed_chains(life.key, config.block_size) if config.prefix_caching == "on" else nameless_chains()
        self.steps = StepLoop[commands.Command, commands.Event](
            _scheduler(config, engine, new_chain),
            engine.runner,
            clock,
            self._emit,
            on_error=lambda error: _LOG.error("a step failed", exc_info=error),
            on_fatal=life.fatal,
        )
        inspections = Inspections(self.steps.post)
        self.health = WorkerHealth(
            server=life.server,
            steps=self.steps,
            limits=StuckLimits(config.step_timeout_s, config.stuck_exit_s),
            clock=clock,
            telemetry=life.telemetry,
            end_work=lambda error: self.service.end_work(error),
        )
        flight = PrefillCanary(
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
        compute, pull_ids = RunningRate(), itertools.count()
        means = PullMeans(
            member=life.member,
            importer=self.transfer.importer,
            pairs=self.transfer.pairs,
            channels=ExporterChannels(life.connect),
            block_size=config.block_size,
            block_bytes=self.transfer.block_bytes,
            new_chain=new_chain,
            compute=compute,
            pull_ids=pull_ids,
            clock=clock,
            telemetry=life.telemetry,
        )
        # What was quantised on its way would not be what is computed here.
        pulls = config.prefix_caching == "on" and config.kv_wire_dtype == NATIVE
        self.pulls = PrefixPulls(means, self.steps.post) if pulls else None
        self.tiers = None
        if config.prefix_caching == "on" and config.prefix_host_bytes:
            index, copies = open_tiers(config, engine.pool, engine.fingerprint)
            tier_means = TierMeans(
                index=index,
                copies=copies,
                new_chain=new_chain,
                block_size=config.block_size,
                block_bytes=engine.pool.block_bytes,
                compute=compute,
                pull_ids=pull_ids,
                telemetry=life.telemetry,
            )
            self.tiers = PrefixTiers(tier_means, self.steps.post)
        self._feed = PrefixFeed(life.member, self.steps.post)
        self.service = PrefillService(
            steps=self.steps,
            exporter=self.transfer.exporter,
            prefixes=self.transfer.prefixes,
            pulls=self.pulls,
            tiers=self.tiers,
            compute=compute,
            feed=self._feed,
            vocab_size=engine.model_info.vocab_size,
            max_calls=config.max_queue + config.max_num_seqs,
            cluster_key=life.key,
            inspections=inspections,
            refuse_if_unhealthy=self.health.refuse_if_unhealthy,
            telemetry=life.telemetry,
        )
        workers = WorkerService(
            member=life.member,
            inspections=inspections,
            more_figures=self._figures,
            request_drain=life.request_drain,
            follow_prefixes=self._feed.follow,
        )
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self.service, life.server.grpc)
        worker_pb2_grpc.add_WorkerServicer_to_server(workers, life.server.grpc)

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
        return figures | self.health.figures()

    def _ask_for_prefix(self, ticket_id: bytes, block_hashes: tuple[bytes, ...], min_blocks: int) -> None:
        self.steps.post(commands.OfferPrefix(ticket_id, block_hashes, min_blocks))

    def _emit(self, events: tuple[commands.Event, ...]) -> None:
        """From the step thread to the event loop."""
        self._loop.call_soon_threadsafe(self._on_events, events)

    def _on_events(self, events: tuple[commands.Event, ...]) -> None:
        self.service.on_events(self._without_canaries(events))

    def _release(self, ticket_id: bytes) -> None:
        self.steps.post(commands.Release(ticket_id))
        self._released.set()


def _scheduler(config: WorkerConfig, engine: Engine, new_chain: NewChain) -> PrefillScheduler:
    return PrefillScheduler(
        num_blocks=engine.pool.num_blocks,
        block_size=config.block_size,
        max_prefill_tokens=config.max_prefill_tokens,
        max_num_seqs=config.max_num_seqs,
        max_queue=config.max_queue,
        lengths=LengthLimits(config.max_input_length, config.max_output_length),
        new_chain=new_chain,
        policy=make_policy(config.scheduling_policy),
        prefix_eviction=config.prefix_eviction,
    )
