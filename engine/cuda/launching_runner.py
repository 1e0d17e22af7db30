"""The runner of a device that computes while the step thread continues."""

import torch

from engine.kv.pool import KvPool
from engine.scheduling.step import StepPlan, StepResult
from engine.steps.forward import Forward
from engine.steps.runner import ModelRunner, StartedStep


class LaunchingRunner(ModelRunner):
    """A Launcher: `result` waits for a launched step, in the order of the launches.

    Tandem's own kernels run on the calling thread's current device, which is the first GPU unless it was set.
    """

    def __init__(self, forward: Forward, pool: KvPool) -> None:
        super().__init__(forward, pool)
        self._device = pool.device

    def launch(self, plan: StepPlan) -> StartedStep:
        """Launch a step. If launching raises, wait until all enqueued work is done: the step's blocks are then freed
        and may be written by other streams."""
        try:
            return self.start(plan)
        except Exception:
            torch.cuda.current_stream(self._device).synchronize()
            raise

    def start(self, plan: StepPlan) -> StartedStep:
        with torch.cuda.device(self._device):
            return super().start(plan)

    def finish(self, started: StartedStep) -> StepResult:
        with torch.cuda.device(self._device):
            return super().finish(started)
