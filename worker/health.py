"""A worker's health: its problems, their publication, and the exit of a worker that does not recover.

The step thread is checked every `poll_s`. While there is a problem the worker is unhealthy: the health service and the
registry report it, new work is refused, and calls and streams of routers end with Unhealthy, so that routers continue
their requests on other workers. A worker whose problem does not disappear within `exit_s` exits.
cluster/observe/stalls.py decides whether a step is stuck. This module never touches a sequence.

Canaries: short generations by which an idle worker checks that it still computes correctly.

A canary takes the same path as a request: the worker's scheduler, its steps and its kernels. It is greedy and alone in
its steps, so every canary must give the tokens of the first one; a device that computes something else is found before
a client notices. Requests that arrive meanwhile go first, and that canary's result is then ignored. This module owns
the time of the next canary, the result of the first one, and the events of those that run.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from enum import StrEnum

from cluster import holders
from cluster.clock import Clock
from cluster.errors import Unhealthy
from cluster.messages import DecodeJob, MemberId, Sampling, SequenceStart, TokenStops
from cluster.observe.logs import stack_of
from cluster.observe.stalls import StallLimits, StallState, StallTimer, StepSnapshot, StepWatchdog
from cluster.observe.telemetry import Telemetry
from cluster.registry.registration import Registration
from cluster.serving.serving import GrpcServer
from engine.scheduling import commands
from engine.steps.step_loop import Progress, StepLoop

_LOG = logging.getLogger("tandem.worker.health")
_CANARY_LOG = logging.getLogger("tandem.worker.canary")
_STEP = "step"
_STOP_S = 10.0
_CANARY = "canary"
_NO_ROUTER = MemberId("canary", "here")
_NUM_TOKENS = 4
_PROMPT_TOKENS = 8  # with the tokens that follow, less than a block of the usual size: nothing of it is cached


class WorkerHealth:
    """Makes the worker unhealthy, healthy again, or ends its process. Runs on the event loop. `end_work` ends every
    call and stream of a router on this worker with the given error."""

    def __init__(
        self,
        *,
        server: GrpcServer,
        steps: StepLoop[commands.Command, commands.Event],
        limits: StallLimits,  # of a step
        clock: Clock,
        telemetry: Telemetry,
        end_work: Callable[[Unhealthy], None],
    ) -> None:
        self._server = server
        self._steps = steps
        self._limits = limits
        self._clock = clock
        self._telemetry = telemetry
        self._end_work = end_work
        self._watchdog = StepWatchdog(limits)
        self._unhealthy = StallTimer(limits.poll_s)
        self._problems: dict[str, str] = {}  # by the check that found them
        self._changed = asyncio.Event()

    @property
    def step_s(self) -> float:
        """Return the seconds for which the present step has run; 0 if no step runs."""
        busy_since_s = self._steps.progress.busy_since_s
        return 0.0 if busy_since_s is None else max(0.0, self._clock.now_s() - busy_since_s)

    @property
    def stop_s(self) -> float:
        """The timeout for the end of the step thread; 0 if it is unhealthy, because a stuck thread will not end."""
        return 0.0 if self._problems else _STOP_S

    @property
    def problem(self) -> str:
        """Return the present problems; empty if there are none."""
        return "; ".join(self._problems.values())

    def refuse_if_unhealthy(self) -> None:
        """Raise Unhealthy if there is a problem."""
        if self._problems:
            raise Unhealthy(self.problem)

    def figures(self) -> dict[str, float]:
        return {"step_s": self.step_s, "longest_step_s": self._steps.progress.longest_step_s}

    def found(self, finder: str, problem: str) -> None:
        """Record the present problem that one check found; an empty one clears it."""
        was_healthy = not self._problems
        if problem:
            self._problems[finder] = problem
        else:
            self._problems.pop(finder, None)
        self._changed.set()
        if was_healthy and self._problems:
            self._telemetry.count("tandem_unhealthy_total", finder=finder)
            self._end_work(Unhealthy(self.problem))

    async def watch(self, registration: Registration) -> None:
        """Check the step thread until cancelled. Raises Unhealthy if the worker must restart, and Fenced."""
        publishing = asyncio.create_task(self._publish(registration), name="publish health")
        try:
            while True:
                self._check_steps()
                done, _ = await asyncio.wait((publishing,), timeout=self._limits.poll_s)
                if done:
                    publishing.result()  # raises
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

    def _check_steps(self) -> None:
        """Check the step thread once. Raises Unhealthy if the worker must restart."""
        progress = self._steps.progress
        snapshot = StepSnapshot(
            is_alive=self._steps.is_alive,
            is_busy=progress.busy_since_s is not None,
            steps=progress.steps,
            longest_step_s=progress.longest_step_s,
        )
        state = self._watchdog.poll(snapshot, self._clock.now_s())
        if not snapshot.is_alive:
            self.found(_STEP, "the step thread has ended")
        elif state is StallState.RUNNING:
            self._end_of_step_problem()
        elif _STEP not in self._problems:
            self._begin_of_step_problem(progress)
        unhealthy_s = self._unhealthy.poll(1 if self._problems else None, self._clock.now_s())
        if state is StallState.DEAD or unhealthy_s >= self._limits.exit_s:
            _LOG.critical("the worker is stuck and does not recover: %s", self.problem)
            raise Unhealthy(self.problem)

    def _begin_of_step_problem(self, progress: Progress) -> None:
        stalled_s = self._watchdog.stalled_s
        where = stack_of(self._steps.thread_id)
        _LOG.error("step %d has run for %.1f s: %s\n%s", progress.steps, stalled_s, progress.work, where)
        self.found(_STEP, f"step {progress.steps} has run for more than {stalled_s:.1f} s: {progress.work}")

    def _end_of_step_problem(self) -> None:
        if _STEP in self._problems:
            _LOG.warning("the step that was stuck has ended; the worker is healthy again")
            self.found(_STEP, "")

    async def _publish(self, registration: Registration) -> None:
        """Publish every change to the health service and the registry. A registry that does not answer delays only
        this."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._server.set_problem(self.problem)
            await registration.set_unhealthy(bool(self._problems))


class CanaryOutcome(StrEnum):
    OK = "ok"
    DIFFERS = "differs"
    LATE = "late"
    DISTURBED = "disturbed"  # other work shared its steps or delayed it, so the result is ignored


class CanaryJudge:
    """Compares the tokens of every canary with those of the first one. Pure."""

    def __init__(self) -> None:
        self._expected: tuple[int, ...] | None = None

    def judge(self, token_ids: tuple[int, ...] | None, *, was_alone: bool) -> CanaryOutcome:
        """Return the outcome of a canary. `token_ids` is None if it timed out."""
        if not was_alone:
            return CanaryOutcome.DISTURBED
        if token_ids is None:
            return CanaryOutcome.LATE
        if self._expected is None:
            self._expected = token_ids
        return CanaryOutcome.OK if token_ids == self._expected else CanaryOutcome.DIFFERS


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
        """Start a canary and return a future of all its tokens."""
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
        """Remove the canary from the step thread, whether or not it has ended."""
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

    async def fly(self) -> CanaryOutcome:
        """Run a canary, and a second one if the first differed: an unnoticed request may have shared its steps."""
        outcome = await self._fly_once()
        if outcome is CanaryOutcome.DIFFERS:
            outcome = await self._fly_once()
        if outcome is not CanaryOutcome.DISTURBED:
            self._has_failed = outcome is not CanaryOutcome.OK
            self._health.found(_CANARY, f"a canary {_PROBLEMS[outcome]}" if self._has_failed else "")
        return outcome

    async def _fly_once(self) -> CanaryOutcome:
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
            _CANARY_LOG.error("canary %d %s", self._number, _PROBLEMS[outcome])
        return outcome

    def _due_in_s(self) -> float:
        progress, now_s = self._progress(), self._clock.now_s()
        interval_s = self._retry_s if self._has_failed else self._interval_s
        if progress.busy_since_s is not None:
            return interval_s
        return progress.last_step_s + interval_s - now_s


_PROBLEMS = {
    CanaryOutcome.DIFFERS: "generated other tokens than the first canary",
    CanaryOutcome.LATE: "did not end in time",
}
