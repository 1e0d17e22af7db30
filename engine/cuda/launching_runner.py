"""The runner of a device that computes while the step thread goes on."""

from engine.runner import ModelRunner, StartedStep
from engine.step import StepPlan


class LaunchingRunner(ModelRunner):
    """A Launcher: what it launched is waited for in `result`, before the next launch."""

    def launch(self, plan: StepPlan) -> StartedStep:
        return self.start(plan)
