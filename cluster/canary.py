"""A few tokens that an idle worker makes for nobody, to know that it still can.

A canary takes the way of every request: the worker's own scheduler, its steps, its kernels. It is greedy and alone in
its steps, so its tokens are those of the first one; a device that computes something else is found before a client
finds it. What its worker was asked to do meanwhile goes first, and then the canary says nothing. Owns when the next one
is due and what the first one gave; whoever runs it (`Flight`) knows the worker.
"""

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from cluster.clock import Clock
from cluster.observe.telemetry import Telemetry
from cluster.worker_health import StepProgress, WorkerHealth

NUM_TOKENS = 4
PROMPT_TOKENS = 8  # with the tokens that follow, less than a block of the usual size: nothing of it is kept
_LOG = logging.getLogger("tandem.worker.canary")
_FINDER = "canary"


class Outcome(StrEnum):
    OK = "ok"
    DIFFERS = "differs"
    LATE = "late"
    DISTURBED = "disturbed"  # others' work shared its steps, or went first: it proves nothing


def prompt_of(vocab_size: int) -> tuple[int, ...]:
    return tuple(1 + place % (vocab_size - 1) for place in range(PROMPT_TOKENS))


class CanaryJudge:
    """Pure."""

    def __init__(self) -> None:
        self._expected: tuple[int, ...] | None = None

    def judge(self, token_ids: tuple[int, ...] | None, *, was_alone: bool) -> Outcome:
        """`token_ids` None: it did not end in time."""
        if not was_alone:
            return Outcome.DISTURBED
        if token_ids is None:
            return Outcome.LATE
        if self._expected is None:
            self._expected = token_ids
        return Outcome.OK if token_ids == self._expected else Outcome.DIFFERS


class Flight(Protocol):
    """One worker's way of running canaries. On the event loop."""

    @property
    def was_alone(self) -> bool:
        """Nobody else's work was seen since `begin`."""
        ...

    def begin(self, number: int) -> asyncio.Future[tuple[int, ...]]:
        """Its tokens, when it has all."""
        ...

    def end(self, number: int) -> None:
        """Nobody waits for it any more, whether or not it has ended: nothing of it stays."""
        ...


class Canaries:
    def __init__(
        self,
        flight: Flight,
        *,
        interval_s: float,
        timeout_s: float,
        retry_s: float,
        progress: Callable[[], StepProgress],
        health: WorkerHealth,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        """One is due when no step has run for `interval_s`; `retry_s` after one that went wrong."""
        self._flight = flight
        self._interval_s, self._timeout_s, self._retry_s = interval_s, timeout_s, retry_s
        self._progress = progress
        self._health = health
        self._clock = clock
        self._telemetry = telemetry
        self._judge = CanaryJudge()
        self._number = 0
        self._is_unwell = False

    async def run(self) -> None:
        """Until it is cancelled; for ever idle without an interval."""
        if not self._interval_s:
            return
        while True:
            wait_s = self._due_in_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await self.fly()

    async def fly(self) -> Outcome:
        """One canary, and another where the first was wrong: somebody may have come in between unseen."""
        outcome = await self._fly_once()
        if outcome is Outcome.DIFFERS:
            outcome = await self._fly_once()
        if outcome is not Outcome.DISTURBED:
            self._is_unwell = outcome is not Outcome.OK
            self._health.found(_FINDER, f"a canary generation {_SAYS[outcome]}" if self._is_unwell else "")
        return outcome

    async def _fly_once(self) -> Outcome:
        self._number += 1
        token_ids = None
        try:
            async with asyncio.timeout(self._timeout_s):
                token_ids = await self._flight.begin(self._number)
        except TimeoutError:
            pass
        finally:
            was_alone = self._flight.was_alone
            self._flight.end(self._number)
        outcome = self._judge.judge(token_ids, was_alone=was_alone)
        self._telemetry.count("tandem_canaries_total", outcome=outcome)
        if outcome in _SAYS:
            _LOG.error("canary %d %s", self._number, _SAYS[outcome])
        return outcome

    def _due_in_s(self) -> float:
        progress, now_s = self._progress(), self._clock.now_s()
        interval_s = self._retry_s if self._is_unwell else self._interval_s
        if progress.busy_since_s is not None:
            return interval_s
        return progress.last_step_s + interval_s - now_s


_SAYS = {
    Outcome.DIFFERS: "gave other tokens than the first one",
    Outcome.LATE: "did not end in time",
}
