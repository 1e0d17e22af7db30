"""The step thread as callbacks of its process: the turns of the production loop.

A step takes its time, commands are applied when the loop would apply them, events leave in order. A step reads and
writes at its end, the latest moment at which an early write of another would show; a step that was planned while
another ran begins when that one ends. A step that announces blocks of exports to importers computes at any moment
before its end, and may still fail at its end.
"""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from engine.scheduling.step import StepPlan, StepResult
from engine.steps.step_loop import StepInFlight, StepLoop
from tests.chaos.simulated.machine.loop import SimulatedLoop, current

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")

_WAKE_S = 0.0005  # at most, until a posted command is looked at


class SimulatedStepLoop(StepLoop[CommandT, EventT]):
    _turning: asyncio.TimerHandle | None = None
    _until: asyncio.TimerHandle | None = None
    _is_stepping = _has_ended = False

    @property
    def is_alive(self) -> bool:
        return not self._has_ended

    def start(self) -> None:
        self._soon()

    def post(self, command: CommandT) -> None:
        super().post(command)
        self._soon()

    def stop(self, timeout_s: float = 10.0) -> bool:
        self._finish_thread()
        return True

    def _finish_thread(self) -> None:
        self._has_ended = True
        self._questions.end()

    def _soon(self) -> None:
        if self._turning is None and not self._is_stepping and not self._has_ended:
            loop = _loop()
            self._turning = loop.call_later(loop.soon_s(_WAKE_S), self._take_turn)

    def _take_turn(self) -> None:
        self._turning = None
        if self._is_stepping or self._has_ended:
            return
        if self._until is not None:
            self._until.cancel()
        try:
            if not self._take_commands(0.0):
                self._finish_thread()
                return
            wait_s = self._turn()
        except Exception as error:  # noqa: BLE001 -- as the thread does
            self._finish_thread()
            self._on_fatal(error)
            return
        if wait_s and not self._is_stepping:
            self._until = _loop().call_later(wait_s, self._take_turn)

    def _step(self, plan: StepPlan, now_s: float) -> None:
        """Begin a step. `_come_down` computes it."""
        self._is_stepping = True
        self._begin(plan, now_s)
        self._fly(self._launch(plan))

    def _fly(self, in_flight: StepInFlight) -> None:
        following = self._launch_behind(in_flight)
        self._let_go()
        num_tokens = sum(len(chunk.token_ids) for chunk in in_flight.plan.chunks)
        loop = _loop()
        hangs_s, current().hangs_in_step_s = current().hangs_in_step_s, 0.0
        if hangs_s:
            current().hangs.set()
        takes_s = loop.soon_s(current().step_s) + num_tokens * current().token_s + hangs_s
        if in_flight.plan.announces and self._held is None:  # a device that only launches announces nothing
            computes_s = min(takes_s, loop.soon_s(takes_s))
            loop.call_later(computes_s, self._compute, in_flight, following, takes_s - computes_s)
        else:
            loop.call_later(takes_s, self._come_down, in_flight, following)

    def _compute(self, in_flight: StepInFlight, following: StepInFlight | None, left_s: float) -> None:
        """Compute a step, which announces what it has written, `left_s` before its end."""
        if self._has_ended:
            return
        launched = in_flight.launched
        computed = launched if isinstance(launched, Exception) else _Computed(launched.result())
        _loop().call_later(left_s, self._come_down, StepInFlight(in_flight.plan, computed), following)

    def _come_down(self, in_flight: StepInFlight, following: StepInFlight | None) -> None:
        if self._has_ended:
            return
        fails = current().fails_in_step or _loop().is_refused_memory()
        current().fails_in_step = False
        if fails:
            in_flight = StepInFlight(in_flight.plan, RuntimeError("the device failed in this step"))
        try:
            going_on = self._land(in_flight, following)
            if going_on is not None:
                self._fly(going_on)
                return
        except Exception as error:  # noqa: BLE001 -- as above
            self._finish_thread()
            self._on_fatal(error)
            return
        self._is_stepping = False
        self._soon()


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step in flight whose result is known."""

    computed: StepResult

    def result(self) -> StepResult:
        return self.computed


def _loop() -> SimulatedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop
