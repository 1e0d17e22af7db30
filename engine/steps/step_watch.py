"""The hooks that a step loop calls around its steps while they are profiled."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from engine.scheduling.step import Feeding, Launched, Launcher, StepPlan, StepResult


class StepWatch:
    """Counts steps. The step thread calls `began` and `stepped`; any thread may wait for `ended`."""

    def __init__(self, num_steps: int, around: Callable[[StepPlan], AbstractContextManager[object]]) -> None:
        """`around`: entered on the step thread while the host works on a step."""
        self.around = around
        self.ended = threading.Event()
        self.num_ended = 0
        self._num_steps = num_steps

    def stepped(self) -> None:
        """Count a step that has ended, up to the number that was asked for."""
        if self.num_ended < self._num_steps:
            self.num_ended += 1
        if self.num_ended == self._num_steps:
            self.ended.set()


@dataclass(frozen=True, slots=True)
class WatchedLauncher:
    """A launcher that enters the watch around its work."""

    launcher: Launcher
    watch: StepWatch

    def run(self, plan: StepPlan) -> StepResult:
        with self.watch.around(plan):
            return self.launcher.run(plan)

    def launch(self, plan: StepPlan) -> Launched:
        with self.watch.around(plan):
            launched = self.launcher.launch(plan)
        # A step whose tokens stay on the device is returned as it is: the loop asks it whether it feeds the next one.
        return launched if isinstance(launched, Feeding) else _WatchedStep(launched, plan, self.watch)


@dataclass(frozen=True, slots=True)
class _WatchedStep:
    launched: Launched
    plan: StepPlan
    watch: StepWatch

    def result(self) -> StepResult:
        with self.watch.around(self.plan):
            return self.launched.result()
