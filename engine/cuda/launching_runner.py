"""The runner of a device that computes while the step thread goes on."""

import torch

from engine.kv.pool import KvPool
from engine.scheduling.step import StepPlan, StepResult
from engine.steps.forward import Forward
from engine.steps.runner import ModelRunner, StartedStep


class LaunchingRunner(ModelRunner):
    """A Launcher: what it launched is waited for in `result`, in the order of the launches.

    Kernels of our own go to the calling thread's device, which is the first one until somebody says otherwise."""

    def __init__(self, forward: Forward, pool: KvPool) -> None:
        super().__init__(forward, pool)
        self._device = pool.device

    def launch(self, plan: StepPlan) -> StartedStep:
        """Where it raises, what was enqueued is done: its blocks are freed, and given to writers of other streams."""
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
