"""Tests when a step counts as stuck: after its limit if the watchdog ran throughout, and never because the whole
process was stopped."""

import pytest

from cluster.observe.stalls import StallLimits, StallState, StallTimer, StepSnapshot, StepWatchdog

_LIMITS = StallLimits(timeout_s=10.0, exit_s=5.0)


class Watched:
    """A watchdog that polls at regular intervals until a given time."""

    def __init__(self) -> None:
        self.dog = StepWatchdog(_LIMITS)
        self.now_s = 100.0

    def until(self, seconds: float, snapshot: StepSnapshot) -> StallState:
        state = self.dog.poll(snapshot, self.now_s)
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += _LIMITS.poll_s
            state = self.dog.poll(snapshot, self.now_s)
        return state


def step(number: int = 7, *, longest_step_s: float = 0.1) -> StepSnapshot:
    return StepSnapshot(is_alive=True, is_busy=True, steps=number, longest_step_s=longest_step_s)


IDLE = StepSnapshot(is_alive=True, is_busy=False, steps=7, longest_step_s=0.1)


def test_a_step_is_stuck_after_its_limit_and_ends_the_process_after_the_grace() -> None:
    watched = Watched()
    assert watched.until(9.0, step()) is StallState.RUNNING
    assert watched.until(2.0, step()) is StallState.STUCK
    assert watched.until(2.0, step()) is StallState.STUCK
    assert watched.until(3.0, step()) is StallState.DEAD


def test_a_stuck_step_that_ends_makes_the_worker_healthy() -> None:
    watched = Watched()
    assert watched.until(12.0, step(7)) is StallState.STUCK
    assert watched.until(0.0, step(8)) is StallState.RUNNING
    assert watched.until(9.0, step(8)) is StallState.RUNNING


def test_a_stuck_step_does_not_raise_the_limit_of_later_steps() -> None:
    watched = Watched()
    assert watched.until(12.0, step(7)) is StallState.STUCK
    assert watched.until(9.0, step(8, longest_step_s=12.5)) is StallState.RUNNING
    assert watched.until(2.0, step(8, longest_step_s=12.5)) is StallState.STUCK


def test_many_short_steps_do_not_count_as_one_long_step() -> None:
    watched = Watched()
    assert {watched.until(3.0, step(number)) for number in range(1, 20)} == {StallState.RUNNING}


def test_a_thread_without_work_may_wait_for_ever() -> None:
    assert Watched().until(1000.0, IDLE) is StallState.RUNNING


def test_the_first_step_may_compile() -> None:
    watched = Watched()
    assert watched.until(49.0, step(0)) is StallState.RUNNING
    assert watched.until(2.0, step(0)) is StallState.STUCK


@pytest.mark.parametrize(("longest_step_s", "limit_s"), [(3.0, 10.0), (6.0, 18.0), (200.0, 30.0)])
def test_a_worker_of_long_steps_may_take_longer_within_bounds(longest_step_s: float, limit_s: float) -> None:
    watched = Watched()
    assert watched.until(limit_s - 1.0, step(longest_step_s=longest_step_s)) is StallState.RUNNING
    assert watched.until(2.0, step(longest_step_s=longest_step_s)) is StallState.STUCK


def test_a_process_that_was_stopped_is_well_when_it_continues() -> None:
    watched = Watched()
    assert watched.until(3.0, step()) is StallState.RUNNING
    watched.now_s += 3600.0
    assert watched.until(4.0, step()) is StallState.RUNNING
    assert watched.until(4.0, step()) is StallState.STUCK, "what was seen before and after counts"


@pytest.mark.parametrize("before", [step(7), IDLE])
def test_a_step_during_which_the_process_was_stopped_does_not_raise_the_limit(before: StepSnapshot) -> None:
    watched = Watched()
    watched.until(3.0, before)
    watched.now_s += 3600.0
    watched.until(0.0, step(7))
    assert watched.until(9.0, step(8, longest_step_s=3601.0)) is StallState.RUNNING
    assert watched.until(2.0, step(8, longest_step_s=3601.0)) is StallState.STUCK
    watched.until(0.0, step(9, longest_step_s=3601.0))
    assert watched.until(17.0, step(10, longest_step_s=4000.0)) is StallState.RUNNING, "that one was seen"


def test_a_dead_step_thread_is_hopeless_at_once() -> None:
    assert Watched().until(0.0, StepSnapshot(False, False, 7, 0.1)) is StallState.DEAD


def test_a_counter_without_a_value_is_not_stalled() -> None:
    timer = StallTimer(poll_s=1.0)
    assert timer.poll(3, 50.0) == 0.0
    assert timer.poll(3, 51.0) == 1.0
    assert timer.poll(4, 52.0) == 0.0
    assert timer.poll(None, 53.0) == 0.0
    assert timer.poll(None, 54.0) == 0.0
