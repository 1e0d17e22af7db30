"""The worker: one engine, one scheduler and one step loop, behind the services of both roles on one port.

This module builds every part before any of them starts, joins them, and starts and ends them in order. A worker's role
is the work that routers send to it and may change at any time, so every worker has all parts that its settings ask for.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from cluster.clock import MonotonicClock
from cluster.errors import Unhealthy
from cluster.messages import Role
from cluster.process import lasting
from cluster.protocol.report_wire import link_speeds_to_wire
from cluster.request_size import LengthLimits
from cluster.service_times import ServiceTimes, StepLimit, TimedStep
from cluster.settings.config import WorkerConfig
from decode_worker.service import DecodeService
from decode_worker.step_spans import StepSpans
from engine.build import Engine, build_engine
from engine.grammar.compiled_grammars import StepMasks, worker_grammars
from engine.kv.host_blocks import HostBlocks, allocate_host_blocks, with_swaps
from engine.scheduling import commands
from engine.scheduling.batching.block_tables import PreemptionCost
from engine.scheduling.cache_commands import LeasePrefix, PrefixLeased
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import make_policy
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import Runner, StepPlan
from engine.speculation.draft_model import with_draft_model
from engine.speculation.drafter import drafter_factory
from engine.steps.runner import max_scored_tokens
from engine.steps.step_loop import StepLoop, StepTime
from engine.steps.step_profile import StepProfiler
from engine.timing.service_time_fit import ServiceTimeFit, step_work
from engine.timing.steps_at_load import fixed_rows, time_steps
from kvtransfer.link_check import Destination
from kvtransfer.wire.wire_format import WireDtype
from tandem.internal.v1 import worker_pb2_grpc
from worker.health import CanaryGeneration
from worker.life import WorkerLife
from worker.prefill_part import PrefillPart
from worker.service import WorkerService
from worker.transfer import WorkerTransfer
from worker.watch import Heartbeats, WorkerMetrics, canary_timeout_s, watch_over

_LOG = logging.getLogger("tandem.worker")


async def serve(life: WorkerLife, *, announce: Callable[..., None]) -> None:
    """Run the worker until it is asked to stop, then drain. Raises ConfigError, ModelRefused, Fenced."""
    with lasting():
        engine = await life.unless_stopped(partial(_engine, life.config, life.phases.end))
    if engine is None:
        return
    host_blocks, swap_report = allocate_host_blocks(engine.pool, life.config.swap_bytes)
    for line in (*engine.report, swap_report):
        _LOG.info(line)
    await WorkerApp(life, engine, host_blocks).run(announce)


class WorkerApp:
    """A worker, built completely before any part starts."""

    def __init__(self, life: WorkerLife, engine: Engine, host_blocks: HostBlocks | None) -> None:
        config, limits = life.config, _limits(life.config, engine, host_blocks)
        self._life = life
        self._capacity = limits.capacity
        self._clock = MonotonicClock()
        self._fit = ServiceTimeFit()
        has_vllm_names = config.metric_aliases == "vllm"
        self._metrics = WorkerMetrics(life.telemetry, vllm_model_name=config.model_name if has_vllm_names else "")
        self._grammars = worker_grammars(config.model, config.revision)
        engine.runner.masks = StepMasks(self._grammars)
        runner = with_swaps(engine.runner, host_blocks) if host_blocks else engine.runner
        self._time_steps = partial(time_steps, engine, runner, config.max_num_seqs)
        self._steps = self._step_loop(self._scheduler(engine, limits, host_blocks), runner)
        engine.runner.on_written = self._steps.written
        self._canary = CanaryGeneration(
            self._steps.post, vocab_size=engine.model_info.vocab_size, timeout_s=canary_timeout_s(config)
        )
        self._watch = watch_over(
            self._steps, self._canary, life=life, clock=self._clock, end_work=self._end_work, owners=self._owners
        )
        self._transfer = WorkerTransfer(
            life=life,
            pool=engine.pool,
            table=engine.pool.layout,
            layout=engine.fingerprint,
            release=self._release,
            importer_waits=lambda ticket_id, wait: self._steps.post(commands.ImporterWaits(ticket_id, wait)),
            lease_prefix=self._lease_prefix,
            clock=self._clock,
        )
        handoff_ids = itertools.count(1)
        self._decode = self._decode_service(engine, limits, handoff_ids)
        self._prefill = self._prefill_part(engine, handoff_ids)
        imports = self._decode.imports
        self._link_check = self._transfer.link_check(Destination(imports, imports.new_id, self._num_free_blocks))
        self._heartbeats = Heartbeats(
            self._decode.beat,
            interval_s=config.heartbeat_s,
            num_steps=lambda: self._steps.progress.steps,
            watch=self._watch,
            service_times=self._service_times,
            publish=self._publish,
            links=lambda: link_speeds_to_wire(self._transfer.links.speeds()),
        )
        self._add_services()

    async def run(self, announce: Callable[..., None]) -> None:
        """Serve until the worker is asked to stop, then drain. Raises ConfigError, Fenced, Unhealthy, DrainIncomplete
        and InternalError."""
        self._life.phases.end("parts")
        self._fit.start(await asyncio.to_thread(self._time_steps))
        self._life.phases.end("step_times")
        await self._transfer.start()
        self._steps.start()
        self._set_role(self._life.role)
        tasks = [
            asyncio.create_task(self._heartbeats.run(), name="heartbeats"),
            asyncio.create_task(self._watch.canaries.run(), name="canaries"),
        ]
        profile, watch = self._transfer.profile(self._capacity, self._grammars.engine_id), self._watch.health.watch
        try:
            setters = {"max_queue": self._set_max_queue, "slo_tpot_ms": self._set_slo_tpot_ms}
            await self._life.live(
                profile, announce=announce, drain=self._drain, watch=watch, on_role=self._set_role, setters=setters
            )
        finally:
            for task in tasks:
                task.cancel()
            async with AsyncExitStack() as ending:  # in the reverse order; one that fails does not skip the others
                ending.push_async_callback(asyncio.to_thread, self._steps.stop, self._watch.health.stop_s)
                ending.push_async_callback(self._prefill.close_caches)
                ending.push_async_callback(self._transfer.close)
                ending.push_async_callback(self._life.end)
                ending.callback(self._transfer.end_idle_calls)
                ending.push_async_callback(self._decode.close)

    def _step_loop(self, scheduler: SequenceScheduler, runner: Runner) -> StepLoop[commands.Command, commands.Event]:
        return StepLoop[commands.Command, commands.Event](
            scheduler,
            runner,
            self._clock,
            self._life.on_loop(self._on_events),
            on_error=lambda error: _LOG.error("a step failed", exc_info=error),
            on_fatal=self._life.fatal,
            on_timed=self._on_timed,
        )

    def _scheduler(self, engine: Engine, limits: SchedulerLimits, host_blocks: HostBlocks | None) -> SequenceScheduler:
        life = self._life
        copy_s_per_block = host_blocks.copy_s_per_block() if host_blocks else None
        return SequenceScheduler(
            limits,
            new_chain=life.new_chain,
            wire_dtype=life.config.kv_wire_dtype,
            cost=PreemptionCost(copy_s_per_block, lambda num_tokens: self._compute_s(num_tokens, 0)),
            policy=make_policy(life.config.scheduling_policy),
            lengths=LengthPredictor(),
            new_drafter=drafter_factory(life.config, lambda: fixed_rows(engine)),
            times=lambda: self._fit.times,
        )

    def _prefill_part(self, engine: Engine, handoff_ids: Iterator[int]) -> PrefillPart:
        return PrefillPart(
            self._life,
            engine,
            self._steps,
            self._transfer,
            outstanding=self._decode.outstanding,
            compute_s=self._compute_s,
            handoff_ids=handoff_ids,
            grammars=self._grammars,
            refuse_if_unhealthy=self._watch.health.refuse_if_unhealthy,
            clock=self._clock,
        )

    def _decode_service(self, engine: Engine, limits: SchedulerLimits, handoff_ids: Iterator[int]) -> DecodeService:
        life = self._life
        return DecodeService(
            member=life.member,
            steps=self._steps,
            importer=self._transfer.importer,
            exporter=self._transfer.exporter,
            vocab_size=engine.model_info.vocab_size,
            limits=limits,
            handoff_ids=handoff_ids,
            hash_key=life.keys.hash_key,
            new_chain=life.new_chain,
            wire_dtype=life.config.kv_wire_dtype,
            stream_grace_s=life.config.stream_grace_s,
            grammars=self._grammars,
            refuse_if_unhealthy=self._watch.health.refuse_if_unhealthy,
            telemetry=life.telemetry,
            spans=StepSpans(life.spans) if life.spans is not None else None,
        )

    def _add_services(self) -> None:
        server = self._life.server.grpc
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self._prefill.service, server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self._decode, server)
        service = WorkerService(
            member=self._life.member,
            inspections=self._watch.inspections,
            more_figures=self._figures,
            request_drain=self._life.request_drain,
            set_role=self._life.set_role,
            check_link=self._link_check.measure,
            profile=StepProfiler(self._steps).profile,
            publish_cache_events=self._prefill.cache_events.subscribe,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)

    def _publish(self, inspected: commands.Inspected) -> None:
        self._metrics.publish(inspected, self._prefill.figures())
        self._metrics.publish_outlook(self._service_times(), *self._decode.outstanding.total())

    def _service_times(self) -> ServiceTimes | None:
        """Return how fast this worker computes; None before `run` has timed its first steps."""
        progress = self._steps.progress
        idle_s = self._clock.now_s() - progress.last_step_s if progress.busy_since_s is None else 0.0
        times = self._fit.times_after(idle_s)
        if times is None:
            return None
        times = replace(times, hand_off=self._transfer.links.hand_off)
        for model, error in times.relative_errors().items():
            self._life.telemetry.gauge("tandem_service_time_relative_error", error, model=model)
        return times

    def _compute_s(self, num_tokens: int, num_before: int) -> float:
        """Predict the seconds to compute a part of a prompt behind `num_before` tokens of it."""
        times = self._fit.times
        assert times is not None, "a job came before the first steps were timed"
        return times.prompt_s(num_tokens, num_before, self._life.config.max_prefill_tokens)

    async def _drain(self, grace_s: float) -> None:
        """Take no new work and return when the present work has ended or moved away. Raises DrainIncomplete."""
        prompts = self._prefill.drain(grace_s, num_frozen=lambda: self._decode.exports.num_tickets)
        outcomes = await asyncio.gather(prompts, self._decode.drain(grace_s), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def _set_role(self, role: Role) -> None:
        self._steps.post(commands.SetRole(role))
        self._life.describe(role)

    def _set_max_queue(self, max_queue: int) -> None:
        self._steps.post(commands.LimitQueue(max_queue))
        most = max_queue + self._life.config.max_num_seqs
        self._decode.limit_waiting_jobs(most)
        self._prefill.service.max_calls = most

    def _set_slo_tpot_ms(self, target_ms: float) -> None:
        limit = StepLimit(target_ms / 1000)
        self._steps.post(commands.LimitSteps(limit))
        self._life.register_step_target(limit)

    def _end_work(self, error: Unhealthy) -> None:
        """End every call and stream that a router has here with this error."""
        self._prefill.end_work(error)
        self._decode.end_work(error)

    def _release(self, ticket_id: bytes) -> None:
        """Free the blocks of a ticket that has no lease left."""
        self._decode.exports.release(ticket_id)
        self._prefill.released.set()

    async def _lease_prefix(self, ticket_id: bytes, block_hashes: tuple[bytes, ...], min_blocks: int) -> PrefixLeased:
        return await self._steps.ask(LeasePrefix(ticket_id, block_hashes, min_blocks))

    async def _num_free_blocks(self) -> int:
        return (await self._watch.inspections.inspect()).blocks["free"]

    def _on_timed(self, plan: StepPlan, time: StepTime) -> None:
        work = step_work(plan)
        if work is not None:
            self._fit.add(TimedStep(work, time.seconds))
            self._metrics.record_step(work, time)

    def _on_events(self, events: tuple[commands.Event, ...]) -> None:
        events = self._canary.take(self._steps.settle(events))
        self._prefill.service.on_events(events)
        self._decode.on_events(events)

    def _owners(self) -> Iterator[str]:
        """Yield the holders of blocks that live on the event loop."""
        for part in (self._canary, self._transfer, self._prefill, self._decode, self._link_check):
            yield from part.owners()

    def _figures(self) -> dict[str, float]:
        times = self._service_times()
        errors = times.relative_errors() if times is not None else {}
        parts = (self._transfer, self._watch.health, self._prefill, self._decode)
        figures = {name: figure for part in parts for name, figure in part.figures().items()}
        return figures | {f"service_time_error_{model}": error for model, error in errors.items()}


def _engine(config: WorkerConfig, ended: Callable[[str], None]) -> Engine:
    """Build the engine; `ended` receives the name of each phase at its end. Raises ConfigError and ModelRefused."""
    engine = build_engine(config, WireDtype(config.kv_wire_dtype), ended)
    return with_draft_model(config, engine) if config.speculation == "draft" else engine


def _limits(config: WorkerConfig, engine: Engine, host_blocks: HostBlocks | None) -> SchedulerLimits:
    return SchedulerLimits(
        num_blocks=engine.pool.num_blocks,
        block_size=config.block_size,
        max_model_len=engine.model_info.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_prefill_tokens=config.max_prefill_tokens,
        max_queue=config.max_queue,
        max_scored_tokens=max_scored_tokens(engine.model_info.vocab_size),
        watermark=config.watermark,
        num_swap_slots=host_blocks.num_slots if host_blocks else 0,
        lengths=LengthLimits(config.max_input_length, config.max_output_length),
        step_limit=StepLimit(config.slo_tpot_ms / 1000),
        prefix_eviction=config.prefix_eviction,
    )
