"""A worker's health: its problems, their publication, and the exit of a worker that does not recover.

The step thread is checked every `look_s`. While there is a problem the worker is unhealthy: the health service and the
registry report it, new work is refused, and calls and streams of routers end with Unhealthy, so that routers continue
their requests on other workers. A worker whose problem does not disappear within `exit_s` exits. worker/watchdog.py
decides whether a step is stuck. This module never touches a sequence.
"""

import asyncio
import logging
from collections.abc import Callable

from cluster.clock import Clock
from cluster.errors import Unhealthy
from cluster.observe.logs import stack_of
from cluster.observe.stand_still import StandStill, StuckLimits, Verdict
from cluster.observe.telemetry import Telemetry
from cluster.registry.registration import Registration
from cluster.serving.serving import GrpcServer
from engine.scheduling import commands
from engine.steps.step_loop import Progress, StepLoop
from worker.watchdog import StepSight, StepWatchdog

_LOG = logging.getLogger("tandem.worker.health")
_STEP = "step"
_STOP_S = 10.0


class WorkerHealth:
    """Makes the worker unhealthy, healthy again, or ends its process. Runs on the event loop. `end_work` ends every
    call and stream of a router on this worker with the given error."""

    def __init__(
        self,
        *,
        server: GrpcServer,
        steps: StepLoop[commands.Command, commands.Event],
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
        self._unhealthy = StandStill(limits.look_s)
        self._problems: dict[str, str] = {}  # by the check that found them
        self._changed = asyncio.Event()

    @property
    def step_s(self) -> float:
        """The duration of the running step so far; 0 if no step runs."""
        busy_since_s = self._steps.progress.busy_since_s
        return 0.0 if busy_since_s is None else max(0.0, self._clock.now_s() - busy_since_s)

    @property
    def stop_s(self) -> float:
        """The timeout for the end of the step thread; 0 if it is unhealthy, because a stuck thread will not end."""
        return 0.0 if self._problems else _STOP_S

    @property
    def problem(self) -> str:
        """The present problems; empty if there are none."""
        return "; ".join(self._problems.values())

    def refuse_if_unhealthy(self) -> None:
        """Raise Unhealthy if there is a problem."""
        if self._problems:
            raise Unhealthy(self.problem)

    def figures(self) -> dict[str, float]:
        return {"step_s": self.step_s, "longest_step_s": self._steps.progress.longest_step_s}

    def found(self, finder: str, problem: str) -> None:
        """Record the present problem that one check found; an empty one clears it."""
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
        """Check the step thread until cancelled. Raises Unhealthy if the worker must restart, and Fenced."""
        publishing = asyncio.create_task(self._publish(registration), name="publish health")
        try:
            while True:
                self._look()
                done, _ = await asyncio.wait((publishing,), timeout=self._limits.look_s)
                if done:
                    publishing.result()  # raises
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

    def _look(self) -> None:
        """Check the step thread once. Raises Unhealthy if the worker must restart."""
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
        unhealthy_s = self._unhealthy.look(1 if self._problems else None, self._clock.now_s())
        if verdict is Verdict.HOPELESS or unhealthy_s >= self._limits.exit_s:
            _LOG.critical("the worker is stuck and does not recover: %s", self.problem)
            raise Unhealthy(self.problem)

    def _begin_of_step_problem(self, progress: Progress) -> None:
        stood_s = self._watchdog.stood_s
        where = stack_of(self._steps.thread_id)
        _LOG.error("step %d has run for %.1f s: %s\n%s", progress.steps, stood_s, progress.work, where)
        self.found(_STEP, f"step {progress.steps} has run for more than {stood_s:.1f} s: {progress.work}")

    def _end_of_step_problem(self) -> None:
        if _STEP in self._problems:
            _LOG.warning("the step that was stuck has ended; the worker is healthy again")
            self.found(_STEP, "")

    async def _publish(self, registration: Registration) -> None:
        """Publish every change to the health service and the registry. A registry that does not answer delays only
        this."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._server.set_problem(self.problem)
            await registration.set_unhealthy(bool(self._problems))
