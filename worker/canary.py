"""Canaries: short generations by which an idle worker checks that it still computes correctly.

A canary takes the same path as a request: the worker's scheduler, its steps and its kernels. It is greedy and alone in
its steps, so every canary must give the tokens of the first one; a device that computes something else is found before
a client notices. Requests that arrive meanwhile go first, and that canary's result is then ignored. This module owns
when the next canary is due and what the first one gave; `CanaryGeneration` runs them.
"""

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum

from cluster.clock import Clock
from cluster.observe.telemetry import Telemetry
from worker.canary_generation import CanaryGeneration
from worker.health import StepProgress, WorkerHealth

_LOG = logging.getLogger("tandem.worker.canary")
_FINDER = "canary"


class Outcome(StrEnum):
    OK = "ok"
    DIFFERS = "differs"
    LATE = "late"
    DISTURBED = "disturbed"  # other work shared its steps or delayed it, so the result is ignored


class CanaryJudge:
    """Compares the tokens of every canary with those of the first one. Pure."""

    def __init__(self) -> None:
        self._expected: tuple[int, ...] | None = None

    def judge(self, token_ids: tuple[int, ...] | None, *, was_alone: bool) -> Outcome:
        """Return the outcome of a canary. `token_ids` is None if it timed out."""
        if not was_alone:
            return Outcome.DISTURBED
        if token_ids is None:
            return Outcome.LATE
        if self._expected is None:
            self._expected = token_ids
        return Outcome.OK if token_ids == self._expected else Outcome.DIFFERS


class Canaries:
    def __init__(
        self,
        runner: CanaryGeneration,
        *,
        interval_s: float,
        timeout_s: float,
        retry_s: float,
        progress: Callable[[], StepProgress],
        health: WorkerHealth,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        """A canary is due after `interval_s` without a step, or `retry_s` after one that was late or differed. Each
        times out after `timeout_s`."""
        self._runner = runner
        self._interval_s, self._timeout_s, self._retry_s = interval_s, timeout_s, retry_s
        self._progress = progress
        self._health = health
        self._clock = clock
        self._telemetry = telemetry
        self._judge = CanaryJudge()
        self._number = 0
        self._is_unwell = False

    async def run(self) -> None:
        """Run canaries until cancelled. Returns at once if `interval_s` is 0."""
        if not self._interval_s:
            return
        while True:
            wait_s = self._due_in_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await self.fly()

    async def fly(self) -> Outcome:
        """Run a canary, and a second one if the first differed: an unnoticed request may have shared its steps."""
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
                token_ids = await self._runner.begin(self._number)
        except TimeoutError:
            pass
        finally:
            was_alone = self._runner.was_alone
            self._runner.end(self._number)
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
