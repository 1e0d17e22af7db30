"""Profiles of steps: where host and device spend their time, as a Chrome trace, which https://ui.perfetto.dev opens.

A profile runs while the worker serves. It records the names of operations, kernels and steps, never a value, a shape or
a text. The step loop enters a `StepWatch` around its steps only while a profile is taken, so it pays nothing otherwise.
"""

import asyncio
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster.errors import InvalidRequest, Unavailable
from cluster.messages import MAX_PROFILE_BYTES, MAX_PROFILE_S, MAX_PROFILED_STEPS
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


class Watchable(Protocol):
    """A step loop."""

    def watch(self, watch: StepWatch | None) -> None:
        """Let the loop call `watch` around its steps from now on; None: no longer."""
        ...


@dataclass(frozen=True, slots=True)
class StepProfile:
    """`trace`: JSON of Chrome's trace events, compressed with gzip."""

    num_steps: int
    trace: bytes


class StepProfiler:
    """Takes profiles of one step loop, one at a time."""

    def __init__(self, steps: Watchable) -> None:
        self._steps = steps
        self._is_busy = False

    async def profile(self, num_steps: int, timeout_s: float) -> StepProfile:
        """Profile this many steps, or those of `timeout_s` if there are fewer. Runs on the event loop.

        Raises InvalidRequest if it is out of bounds or the trace is larger than MAX_PROFILE_BYTES, and Unavailable if a
        profile is being taken. A caller that leaves does not end the profile.
        """
        if not 1 <= num_steps <= MAX_PROFILED_STEPS:
            raise InvalidRequest(f"a profile has 1 to {MAX_PROFILED_STEPS} steps, not {num_steps}", param="steps")
        if not 0 < timeout_s <= MAX_PROFILE_S:
            raise InvalidRequest(f"a profile takes at most {MAX_PROFILE_S:g} s, not {timeout_s:g}", param="timeout_s")
        if self._is_busy:
            raise Unavailable("this worker takes a profile already; ask again when it has ended")
        self._is_busy = True
        loop = asyncio.get_running_loop()
        profiled: asyncio.Future[StepProfile] = loop.create_future()

        def end(give: Callable[[], None]) -> None:
            self._is_busy = False
            if not profiled.done():
                give()

        def run() -> None:
            with suppress(RuntimeError):  # the event loop has ended
                try:
                    profile = self._record(num_steps, timeout_s)
                except Exception as error:  # noqa: BLE001 - its caller receives it
                    raised = error
                    loop.call_soon_threadsafe(end, lambda: profiled.set_exception(raised))
                else:
                    loop.call_soon_threadsafe(end, lambda: profiled.set_result(profile))

        # A thread that nothing waits for: the profiler starts and ends on it, and the worker's end does not wait.
        threading.Thread(target=run, name="profile", daemon=True).start()
        return await profiled

    def _record(self, num_steps: int, timeout_s: float) -> StepProfile:
        # Imported with the first profile: the profiler loads the device's tracing libraries.
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile, record_function

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        config = _ExperimentalConfig(profile_all_threads=True)  # the steps run on another thread
        watch = StepWatch(num_steps, lambda plan: record_function(_name(plan)))
        profiler = profile(activities=activities, experimental_config=config)
        profiler.start()
        try:
            self._steps.watch(watch)
            watch.ended.wait(timeout_s)
        finally:
            self._steps.watch(None)
            profiler.stop()
        return StepProfile(watch.num_ended, _exported(profiler.export_chrome_trace))


def _exported(export: Callable[[str], None]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tandem-profile-") as folder:
        file = Path(folder) / "trace.json.gz"
        export(str(file))
        if (num_bytes := file.stat().st_size) > MAX_PROFILE_BYTES:
            raise InvalidRequest(
                f"the profile has {num_bytes} bytes, more than {MAX_PROFILE_BYTES}; ask for fewer steps", param="steps"
            )
        return file.read_bytes()


def _name(plan: StepPlan) -> str:
    num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
    return f"step: {len(plan.chunks)} sequences, {num_tokens} tokens"
