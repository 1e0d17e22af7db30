"""The parts that the workers of both roles have, and the order in which they start and end.

This module joins step thread, watch and transfer. A role adds its scheduler, its service and its canary
(`prefill_app.py`, `decode_app.py`).
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from cluster.clock import MonotonicClock
from cluster.errors import Unhealthy
from cluster.member import Capacity
from cluster.service_times import ServiceTimes
from engine.build import Engine
from engine.scheduling.cache_commands import LeasePrefix, PrefixLeased
from engine.scheduling.step import Runner, Scheduler, StepPlan
from engine.steps.step_loop import StepLoop
from engine.timing.service_time_fit import ServiceTimeFit, TimedStep, step_work
from engine.timing.steps_at_load import time_steps
from worker.canary import CanaryRunner
from worker.heartbeats import Heartbeats
from worker.life import WorkerLife
from worker.transfer import WorkerTransfer
from worker.watch import canary_timeout_s, watch_over

_LOG = logging.getLogger("tandem.worker")

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


class RoleCanary(CanaryRunner, Protocol[EventT]):
    """The role's canary runner, which removes the events of its canaries from those of the step thread."""

    def take(self, events: tuple[EventT, ...]) -> tuple[EventT, ...]: ...

    def owners(self) -> Iterator[str]: ...


class RoleCanaryType(Protocol[EventT]):
    def __call__(self, post: Callable[[Any], None], *, vocab_size: int, timeout_s: float) -> RoleCanary[EventT]: ...


class WorkerApp(ABC, Generic[CommandT, EventT]):
    """A worker, built completely before any part starts. A subclass builds its service and heartbeats after these
    parts."""

    heartbeats: Heartbeats

    def __init__(
        self,
        life: WorkerLife,
        engine: Engine,
        scheduler: Scheduler[CommandT, EventT],
        runner: Runner,
        canary_type: RoleCanaryType[EventT],
    ) -> None:
        self.life = life
        self.clock = MonotonicClock()
        self.steps = StepLoop[CommandT, EventT](
            scheduler,
            runner,
            self.clock,
            life.on_loop(self._on_events),
            on_error=lambda error: _LOG.error("a step failed", exc_info=error),
            on_fatal=life.fatal,
            on_timed=self._on_timed,
        )
        self._fit = ServiceTimeFit()
        self._time_steps = partial(time_steps, engine, runner, life.config.max_num_seqs)
        self._canary = canary_type(
            self.steps.post, vocab_size=engine.model_info.vocab_size, timeout_s=canary_timeout_s(life.config)
        )
        self.watch = watch_over(
            self.steps, self._canary, life=life, clock=self.clock, end_work=self.end_work, owners=self._all_owners
        )
        self.transfer = WorkerTransfer(
            life=life,
            pool=engine.pool,
            table=engine.pool.layout,
            layout=engine.fingerprint,
            release=self.release,
            lease_prefix=self._lease_prefix,
            clock=self.clock,
        )

    def service_times(self) -> ServiceTimes | None:
        """Return how fast this worker computes; None before `run` has timed its first steps."""
        progress = self.steps.progress
        idle_s = self.clock.now_s() - progress.last_step_s if progress.busy_since_s is None else 0.0
        times = self._fit.times_after(idle_s)
        if times is None:
            return None
        times = replace(times, hand_off=self.transfer.links.hand_off)
        for model, error in times.relative_errors().items():
            self.life.telemetry.gauge("tandem_service_time_relative_error", error, model=model)
        return times

    @abstractmethod
    def on_events(self, events: tuple[EventT, ...]) -> None:
        """Apply the events that neither answer a question nor belong to a canary."""

    @abstractmethod
    def owners(self) -> Iterator[str]:
        """Yield the holders of blocks that live in the role's objects on the event loop."""

    @abstractmethod
    def release(self, ticket_id: bytes) -> None:
        """Free the blocks of a ticket that has no lease left."""

    @abstractmethod
    def end_work(self, error: Unhealthy) -> None:
        """End every call and stream that a router has here with this error."""

    @abstractmethod
    async def drain(self, grace_s: float) -> None:
        """Take no new work and return when the present work has ended or moved away. Raises DrainIncomplete."""

    @abstractmethod
    async def close_calls(self) -> None:
        """End the calls and streams that are left, before the server ends."""

    async def close_caches(self) -> None:
        """Close what outlives the transfer."""

    async def run(self, capacity: Capacity, announce: Callable[..., None]) -> None:
        """Serve until the worker is asked to stop, then drain. Raises ConfigError, Fenced, Unhealthy, DrainIncomplete
        and InternalError."""
        self._fit.start(await asyncio.to_thread(self._time_steps))
        await self.transfer.start()
        self.steps.start()
        tasks = [
            asyncio.create_task(self.heartbeats.run(), name="heartbeats"),
            asyncio.create_task(self.watch.canaries.run(), name="canaries"),
        ]
        try:
            await self.life.live(
                self.transfer.profile(capacity), announce=announce, drain=self.drain, watch=self.watch.health.watch
            )
        finally:
            for task in tasks:
                task.cancel()
            async with AsyncExitStack() as ending:  # in the reverse order; one that fails does not skip the others
                ending.push_async_callback(asyncio.to_thread, self.steps.stop, self.watch.health.stop_s)
                ending.push_async_callback(self.close_caches)
                ending.push_async_callback(self.transfer.close)
                ending.push_async_callback(self.life.end)
                ending.callback(self.transfer.end_idle_calls)
                ending.push_async_callback(self.close_calls)

    async def _lease_prefix(self, ticket_id: bytes, block_hashes: tuple[bytes, ...], min_blocks: int) -> PrefixLeased:
        return await self.steps.ask(LeasePrefix(ticket_id, block_hashes, min_blocks))

    def _on_timed(self, plan: StepPlan, seconds: float) -> None:
        work = step_work(plan)
        if work is not None:
            self._fit.add(TimedStep(work, seconds))

    def _on_events(self, events: tuple[EventT, ...]) -> None:
        self.on_events(self._canary.take(self.steps.settle(events)))

    def _all_owners(self) -> Iterator[str]:
        yield from self._canary.owners()
        yield from self.transfer.owners()
        yield from self.owners()
