"""The runner of a device that computes while the step thread goes on."""

from collections.abc import Iterable

import torch

from engine.forward import Forward
from engine.pool import KvPool
from engine.runner import ModelRunner, StartedStep
from engine.step import DrawnToken, StepPlan, StepResult


class LaunchingRunner(ModelRunner):
    """A Launcher: what it launched is waited for in `result`, before the next launch.

    Kernels of our own go to the calling thread's device, which is the first one until somebody says otherwise."""

    def __init__(self, forward: Forward, pool: KvPool) -> None:
        super().__init__(forward, pool)
        self._device = pool.device

    def launch(self, plan: StepPlan) -> StartedStep:
        return self.start(plan)

    def start(self, plan: StepPlan) -> StartedStep:
        with torch.cuda.device(self._device):
            return super().start(plan)

    def finish(self, plan: StepPlan, drawn: Iterable[DrawnToken], written: torch.cuda.Event | None) -> StepResult:
        with torch.cuda.device(self._device):
            return super().finish(plan, drawn, written)
