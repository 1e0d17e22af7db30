"""What is wrong with a worker, who is told, and when it ends because of it.

Looks at the step thread as often as its limits ask for. A problem makes the worker unhealthy: the health service and
the registry say so, new work is refused, and the routers hear, at once and by name, that what they have here must go on
elsewhere. When the problem is gone the worker is back; a problem that stays ends it. Owns the problems; decides by
cluster/observe/watchdog.py and never touches a sequence.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from cluster.clock import Clock
from cluster.errors import Unhealthy
from cluster.observe.stacks import stack_of
from cluster.observe.telemetry import Telemetry
from cluster.observe.watchdog import StandStill, StepSight, StepWatchdog, StuckLimits, Verdict
from cluster.registry.registration import Registration
from cluster.serving.serving import GrpcServer

_LOG = logging.getLogger("tandem.worker.health")
_STEP = "step"
_STOP_S = 10.0


class StepProgress(Protocol):
    """What engine.steps.step_loop.Progress says, as far as it is needed here."""

    @property
    def steps(self) -> int: ...

    @property
    def busy_since_s(self) -> float | None: ...

    @property
    def last_step_s(self) -> float: ...

    @property
    def longest_step_s(self) -> float: ...

    @property
    def work(self) -> str: ...


class StepThread(Protocol):
    """engine.steps.step_loop.StepLoop."""

    @property
    def progress(self) -> StepProgress: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def thread_id(self) -> int | None: ...


class WorkerHealth:
    """On the event loop. `end_work` ends, with the error it is given, every call and stream that a router has here."""

    def __init__(
        self,
        *,
        server: GrpcServer,
        steps: StepThread,
        limits: StuckLimits,  # of a step
        clock: Clock,
        telemetry: Telemetry,
        end_work: Callable[[Unhealthy], None],
    ) -> None:
        self._server = server
        self._steps = steps
        self._limits = limits
        self._clock = clock
        self._telemetry = telemetry
        self._end_work = end_work
        self._watchdog = StepWatchdog(limits)
        self._unwell = StandStill(limits.look_s)
        self._problems: dict[str, str] = {}  # by what found them
        self._changed = asyncio.Event()

    @property
    def step_s(self) -> float:
        """How long the present step has been running; 0: none is."""
        busy_since_s = self._steps.progress.busy_since_s
        return 0.0 if busy_since_s is None else max(0.0, self._clock.now_s() - busy_since_s)

    @property
    def stop_s(self) -> float:
        """How long to wait for the step thread's end: one that is stuck would be waited for in vain."""
        return 0.0 if self._problems else _STOP_S

    @property
    def problem(self) -> str:
        """Empty: none."""
        return "; ".join(self._problems.values())

    def refuse_if_unhealthy(self) -> None:
        """Raises Unhealthy."""
        if self._problems:
            raise Unhealthy(self.problem)

    def figures(self) -> dict[str, float]:
        return {"step_s": self.step_s, "longest_step_s": self._steps.progress.longest_step_s}

    def found(self, finder: str, problem: str) -> None:
        """One finder's present word; empty: nothing is wrong any more."""
        was_healthy = not self._problems
        if problem:
            self._problems[finder] = problem
        else:
            self._problems.pop(finder, None)
        self._changed.set()
        if was_healthy and self._problems:
            self._telemetry.count("tandem_unhealthy_total", finder=finder)
            self._end_work(Unhealthy(self.problem))

    async def watch(self, registration: Registration) -> None:
        """Until it is cancelled. Raises Unhealthy when only a restart can help, and Fenced."""
        telling = asyncio.create_task(self._tell(registration), name="tell of health")
        try:
            while True:
                self._look()
                done, _ = await asyncio.wait((telling,), timeout=self._limits.look_s)
                if done:
                    telling.result()  # raises
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    def _look(self) -> None:
        """Raises Unhealthy."""
        progress = self._steps.progress
        sight = StepSight(
            is_alive=self._steps.is_alive,
            is_busy=progress.busy_since_s is not None,
            steps=progress.steps,
            longest_step_s=progress.longest_step_s,
        )
        verdict = self._watchdog.look(sight, self._clock.now_s())
        if not sight.is_alive:
            self.found(_STEP, "the step thread has ended")
        elif verdict is Verdict.WELL:
            self._end_of_step_problem()
        elif _STEP not in self._problems:
            self._begin_of_step_problem(progress)
        unwell_s = self._unwell.look(1 if self._problems else None, self._clock.now_s())
        if verdict is Verdict.HOPELESS or unwell_s >= self._limits.exit_s:
            _LOG.critical("the worker is stuck and does not recover: %s", self.problem)
            raise Unhealthy(self.problem)

    def _begin_of_step_problem(self, progress: StepProgress) -> None:
        stood_s = self._watchdog.stood_s
        where = stack_of(self._steps.thread_id)
        _LOG.error("step %d has run for %.1f s: %s\n%s", progress.steps, stood_s, progress.work, where)
        self.found(_STEP, f"step {progress.steps} has run for more than {stood_s:.1f} s: {progress.work}")

    def _end_of_step_problem(self) -> None:
        if _STEP in self._problems:
            _LOG.warning("the step has ended after all; the worker is healthy again")
            self.found(_STEP, "")

    async def _tell(self, registration: Registration) -> None:
        """A registry that does not answer delays only its own news."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._server.set_problem(self.problem)
            await registration.set_unhealthy(bool(self._problems))
