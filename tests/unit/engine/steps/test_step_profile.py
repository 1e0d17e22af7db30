"""The bounds of a profile. tests/system/observe/test_profile.py takes one of a real worker."""

import asyncio

import pytest

from cluster.errors import InvalidRequest, Unavailable
from engine.steps.step_profile import StepProfiler, StepWatch


class _Steps:
    """A step loop without steps. It stores its watch."""

    def __init__(self) -> None:
        self.watches: list[StepWatch | None] = []

    def watch(self, watch: StepWatch | None) -> None:
        self.watches.append(watch)


@pytest.mark.parametrize(("num_steps", "timeout_s"), [(0, 1.0), (1001, 1.0), (5, 0.0), (5, 61.0), (5, float("nan"))])
async def test_a_profile_out_of_bounds_is_refused(num_steps: int, timeout_s: float) -> None:
    steps = _Steps()
    with pytest.raises(InvalidRequest):
        await StepProfiler(steps).profile(num_steps, timeout_s)
    assert steps.watches == []


@pytest.mark.slow  # the profiler loads for seconds
async def test_one_profile_is_taken_at_a_time_and_an_idle_worker_ends_it_at_its_timeout() -> None:
    steps = _Steps()
    profiler = StepProfiler(steps)
    first = asyncio.create_task(profiler.profile(5, 0.01))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await profiler.profile(5, 0.01)
    assert (await first).num_steps == 0
    assert isinstance(steps.watches[0], StepWatch) and steps.watches[-1] is None
    assert (await profiler.profile(5, 0.01)).trace.startswith(b"\x1f\x8b")
