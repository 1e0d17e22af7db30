"""The step thread without a thread: the production loop's own turns, as callbacks of its process.

The contract is the same: a step takes its time, commands are applied when the loop would, events leave in their order.
A step reads and writes at its end, the latest moment at which what another wrote too early would show; one that was
planned while another ran begins when that one ends.
"""

import asyncio
from typing import TypeVar

from engine.scheduling.step import StepPlan
from engine.steps.step_loop import Flight, StepLoop
from tests.chaos.simulated.loop import SimulatedLoop, current

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
        self._has_ended = True
        return True

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
                self._has_ended = True
                return
            wait_s = self._turn()
        except Exception as error:  # noqa: BLE001 -- as the thread does
            self._has_ended = True
            self._on_fatal(error)
            return
        if wait_s and not self._is_stepping:
            self._until = _loop().call_later(wait_s, self._take_turn)

    def _step(self, plan: StepPlan, now_s: float) -> None:
        """Begins; `_come_down` computes."""
        self._is_stepping = True
        self._begin(plan, now_s)
        self._fly(self._launch(plan))

    def _fly(self, flight: Flight) -> None:
        following = self._launch_behind(flight)
        self._let_go()
        num_tokens = sum(len(chunk.token_ids) for chunk in flight.plan.chunks)
        loop = _loop()
        hangs_s, current().hangs_in_step_s = current().hangs_in_step_s, 0.0
        if hangs_s:
            current().hangs.set()
        takes_s = loop.soon_s(current().step_s) + num_tokens * current().token_s + hangs_s
        loop.call_later(takes_s, self._come_down, flight, following)

    def _come_down(self, flight: Flight, following: Flight | None) -> None:
        if self._has_ended:
            return
        fails = current().fails_in_step or _loop().is_refused_memory()
        current().fails_in_step = False
        if fails:
            flight = Flight(flight.plan, RuntimeError("the device failed in this step"))
        try:
            going_on = self._land(flight, following)
            if going_on is not None:
                self._fly(going_on)
                return
        except Exception as error:  # noqa: BLE001 -- as above
            self._has_ended = True
            self._on_fatal(error)
            return
        self._is_stepping = False
        self._soon()


def _loop() -> SimulatedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop
