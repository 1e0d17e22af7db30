"""Canaries: short generations by which an idle worker checks that it still computes correctly.

A canary takes the same path as a request: the worker's scheduler, its steps and its kernels. It is greedy and alone in
its steps, so every canary must give the tokens of the first one; a device that computes something else is found before
a client notices. Requests that arrive meanwhile go first, and that canary's result is then ignored. This module owns
when the next canary is due, what the first one gave, and the events of those that run.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from enum import StrEnum

from cluster import holders
from cluster.clock import Clock
from cluster.messages import DecodeJob, MemberId, Sampling, SequenceStart, TokenStops
from cluster.observe.telemetry import Telemetry
from engine.scheduling import commands
from engine.steps.step_loop import Progress
from worker.health import WorkerHealth

_LOG = logging.getLogger("tandem.worker.canary")
_FINDER = "canary"
_NO_ROUTER = MemberId("canary", "here")
_NUM_TOKENS = 4
_PROMPT_TOKENS = 8  # with the tokens that follow, less than a block of the usual size: nothing of it is cached


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


class CanaryGeneration:
    """Runs one canary at a time, on the event loop. `take` removes its events before the services get those of the
    step thread."""

    def __init__(self, post: Callable[[commands.Command], None], *, vocab_size: int, timeout_s: float) -> None:
        self._post = post
        self._prompt = tuple(1 + place % (vocab_size - 1) for place in range(_PROMPT_TOKENS))
        self._timeout_s = timeout_s
        self._salt = secrets.token_hex(8)  # so that it shares no cached block with a request
        self._number = 0
        self._token_ids: list[int] = []
        self._answer: asyncio.Future[tuple[int, ...]] | None = None
        self.was_alone = True  # there was no other work since `begin`

    def begin(self, number: int) -> asyncio.Future[tuple[int, ...]]:
        """Start a canary. The future returns all its tokens."""
        self._number, self._token_ids, self.was_alone = number, [], True
        self._answer = asyncio.get_running_loop().create_future()
        self._post(
            commands.AdmitLocal(
                DecodeJob(
                    request_id=f"canary-{number}",
                    attempt=0,
                    router=_NO_ROUTER,
                    prompt_token_ids=self._prompt,
                    sampling=Sampling(),
                    stops=TokenStops(max_tokens=_NUM_TOKENS),
                    sequences=(SequenceStart(handle=number, seed=0),),
                    signed_ticket=None,
                    timeout_s=self._timeout_s,
                    cache_salt=self._salt,
                    is_batch=True,
                )
            )
        )
        return self._answer

    def end(self, number: int) -> None:
        """Remove what is left of the canary, whether or not it has ended."""
        self._post(commands.CancelSequences(_NO_ROUTER, frozenset({number})))
        self._answer = None

    def owners(self) -> Iterator[str]:
        """Yield the running canary, as a holder of blocks."""
        yield holders.sequence(_NO_ROUTER, self._number)

    def take(self, events: tuple[commands.Event, ...]) -> tuple[commands.Event, ...]:
        """Return the events that do not belong to a canary."""
        return tuple(left for event in events if (left := self._without_own(event)) is not None)

    def _without_own(self, event: commands.Event) -> commands.Event | None:
        match event:
            case commands.Started(router=router) | commands.Failed(router=router):
                if router == _NO_ROUTER:
                    return None
                self.was_alone = False
            case commands.ExportAccepted() | commands.Sealed() | commands.ExportFinished() | commands.ExportFailed():
                self.was_alone = False
            case commands.StepTokens(step, tokens):
                for token in tokens:
                    if token.router == _NO_ROUTER:
                        self._on_token(token)
                others = tuple(token for token in tokens if token.router != _NO_ROUTER)
                self.was_alone &= not others
                return commands.StepTokens(step, others) if others else None
        return event

    def _on_token(self, token: commands.SequenceToken) -> None:
        if self._answer is None or token.handle != self._number or self._answer.done():
            return
        self._token_ids.append(token.token.token_id)
        if token.token.finish_reason is not None:
            self._answer.set_result(tuple(self._token_ids))


class Canaries:
    def __init__(
        self,
        runner: CanaryGeneration,
        *,
        interval_s: float,
        timeout_s: float,
        retry_s: float,
        progress: Callable[[], Progress],
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
        self._has_failed = False

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
            self._has_failed = outcome is not Outcome.OK
            self._health.found(_FINDER, f"a canary generation {_PROBLEMS[outcome]}" if self._has_failed else "")
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
        if outcome in _PROBLEMS:
            _LOG.error("canary %d %s", self._number, _PROBLEMS[outcome])
        return outcome

    def _due_in_s(self) -> float:
        progress, now_s = self._progress(), self._clock.now_s()
        interval_s = self._retry_s if self._has_failed else self._interval_s
        if progress.busy_since_s is not None:
            return interval_s
        return progress.last_step_s + interval_s - now_s


_PROBLEMS = {
    Outcome.DIFFERS: "gave other tokens than the first one",
    Outcome.LATE: "did not end in time",
}
