"""The thread that owns the device, the scheduler and, through it, the block pool.

Commands arrive through `post` and events leave through `emit`; nothing else is shared. Scheduler and runner are called
by this thread only, in the order that `engine.scheduling.step.Scheduler` defines. With nothing to compute it sleeps on
its inbox until a command arrives or a deadline passes; it never polls. The inbox itself has no bound: every turn
empties it, and the scheduler refuses work beyond its limits.

A device that computes on its own (`engine.scheduling.step.Launcher`) does not wait for the event loop: a step's events
are emitted once the next step is launched, because a thread that they wake takes the interpreter from this thread.
Order and number of events do not change.

If the scheduler can plan ahead (`engine.scheduling.step.PlanningAhead`) and a step's tokens stay on the device
(`Feeding`), the next step is planned and launched while one runs, so that the device does not wait for the host between
them. A command that cannot be applied while a step runs waits for its end, and so do all commands after it; no step is
launched before they are applied. Otherwise scheduler and pool are not touched until the step has ended.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from cluster.clock import Clock
from engine.scheduling.step import (
    Feeding,
    Launched,
    Launcher,
    PlanningAhead,
    Question,
    Runner,
    Scheduler,
    StepPlan,
    StepResult,
)
from engine.steps.questions import Questions
from engine.steps.step_profile import StepWatch, WatchedLauncher

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
T = TypeVar("T")
AnswerT = TypeVar("AnswerT")


class _Stop(Enum):
    STOP = auto()


@dataclass(frozen=True, slots=True)
class Progress:
    """The loop's progress, for heartbeats and the watchdog. Times are by the loop's clock."""

    steps: int  # computed or failed
    last_step_s: float  # end of the last one; before the first, the time when the loop was created
    busy_since_s: float | None = None  # start of the step that is running now
    longest_step_s: float = 0.0
    plan: StepPlan | None = None  # of the step that is running now

    @property
    def work(self) -> str:
        """Describe the running step for logs."""
        if self.plan is None:
            return "no step"
        chunks = self.plan.chunks
        longest = max((chunk.end for chunk in chunks), default=0)
        num_moved = len(self.plan.copies) + len(self.plan.swaps_out) + len(self.plan.swaps_in)
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        return (
            f"a step of {len(chunks)} sequences and {num_tokens} tokens, the longest sequence of {longest},"
            f" with {num_moved} blocks copied"
        )


@dataclass(frozen=True, slots=True)
class _AtOnce:
    """Adapts a runner that computes on this thread to the Launcher interface."""

    runner: Runner

    def run(self, plan: StepPlan) -> StepResult:
        return self.runner.run(plan)

    def launch(self, plan: StepPlan) -> Launched:
        return _Later(self.runner, plan)


@dataclass(frozen=True, slots=True)
class _Later:
    runner: Runner
    plan: StepPlan

    def result(self) -> StepResult:
        return self.runner.run(self.plan)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a step by part; the parts sum to `seconds`. The plan of a step that was launched after another
    one took no time of its own."""

    seconds: float
    plan_s: float
    run_s: float  # pack, forward and draw
    complete_s: float


@dataclass(frozen=True, slots=True, eq=False)
class StepInFlight:
    """A launched step, or the error that its launch raised. Used by the loop alone."""

    plan: StepPlan
    launched: Launched | Exception
    plan_s: float = 0.0

    @property
    def can_feed(self) -> bool:
        return isinstance(self.launched, Feeding) and self.launched.can_feed


class StepLoop(Generic[CommandT, EventT]):
    """The step thread's loop.

    It calls `emit`, `on_error`, `on_fatal` and `on_timed` on its own thread, so they must only pass their arguments on.
    `on_error` is called after a step raised: its sequences have ended, and the loop continues. `on_fatal` is called
    after the scheduler raised, which means that an invariant is broken, or after `emit` raised: the loop has ended.
    `on_timed` is called after a step has succeeded, with the time from its planning to its end, or from the end of the
    step before it if it was launched after that one.
    """

    def __init__(
        self,
        scheduler: Scheduler[CommandT, EventT],
        runner: Runner,
        clock: Clock,
        emit: Callable[[tuple[EventT, ...]], None],
        *,
        on_error: Callable[[Exception], None],
        on_fatal: Callable[[Exception], None],
        on_timed: Callable[[StepPlan, StepTime], None] = lambda plan, time: None,
    ) -> None:
        self._scheduler = scheduler
        self._ahead = scheduler if isinstance(scheduler, PlanningAhead) else None
        self._unwatched: Launcher = runner if isinstance(runner, Launcher) else _AtOnce(runner)
        self._launcher: Launcher = self._unwatched
        self._clock = clock
        self._emit = emit
        self._on_error = on_error
        self._on_fatal = on_fatal
        self._on_timed = self._on_timed_unwatched = on_timed
        self._held: list[tuple[EventT, ...]] | None = [] if isinstance(runner, Launcher) else None  # None: none is held
        self._inbox: SimpleQueue[CommandT | _Stop] = SimpleQueue()
        self._kept: CommandT | _Stop | None = None  # taken from the inbox, to be applied when no step is running
        self._broken: Exception | None = None  # the error that `written` raised
        self._questions = Questions(self.post)
        self._progress = Progress(0, clock.now_s())
        # A daemon, so that a step that hangs in the device does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    @property
    def progress(self) -> Progress:
        """Return the loop's progress; any thread may call it."""
        return self._progress

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def thread_id(self) -> int | None:
        """The step thread's id, or None before the start."""
        return self._thread.ident

    def start(self) -> None:
        self._thread.start()

    def post(self, command: CommandT) -> None:
        """Put a command into the inbox. Any thread may call it; it never blocks. Commands posted after the end are
        ignored."""
        self._inbox.put(command)

    async def ask(self, question: Question[AnswerT]) -> AnswerT:
        """Post a question and return its answer. Runs on the event loop, which must pass every tuple of events through
        `settle`. Raises the error with which the scheduler refuses it, and Unavailable when the loop ends before."""
        return await self._questions.ask(question)

    def settle(self, events: tuple[EventT, ...]) -> tuple[EventT, ...]:
        """Give the answers among these events to the callers of `ask` and return the other events. Runs on the event
        loop."""
        return self._questions.settle(events)

    def written(self) -> None:
        """Announce the blocks that importers may read already, while the step computes its tokens. The runner calls it
        on this thread, when the KV of a step that `announces` is in the pool. Raises nothing; an error of the scheduler
        ends the loop with the step."""
        plan = self._progress.plan
        assert plan is not None, "no step runs"
        try:
            self._hand_over(self._scheduler.written(plan))
        except Exception as error:  # noqa: BLE001 - it may pass no frame of compiled code
            self._broken = error

    def watch(self, watch: StepWatch | None) -> None:
        """Let the loop call `watch` around its steps from now on; None: no longer. One thread may call it at a time.
        A step that is running is not watched."""
        on_timed = self._on_timed_unwatched
        if watch is None:
            self._launcher, self._on_timed = self._unwatched, on_timed
            return

        def timed(plan: StepPlan, time: StepTime) -> None:
            on_timed(plan, time)
            watch.stepped()

        self._launcher, self._on_timed = WatchedLauncher(self._unwatched, watch), timed

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the loop after the running step. Returns False if it still runs after `timeout_s`."""
        self._inbox.put(_Stop.STOP)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            wait_s: float | None = 0.0
            while self._take_commands(wait_s):
                wait_s = self._turn()
            self._let_go()
        except Exception as error:  # noqa: BLE001 - any error ends the thread, and the worker must know
            self._on_fatal(error)
        finally:
            self._questions.end()

    def _take_commands(self, wait_s: float | None) -> bool:
        """Apply all commands of the inbox; wait up to `wait_s` for the first (None: without limit). Returns False when
        it is time to stop."""
        try:
            command = self._next_command(wait_s)
            while not isinstance(command, _Stop):
                self._hand_over(self._scheduler.apply(command, self._clock.now_s()))
                command = self._next_command(0.0)
        except Empty:
            return True
        return False

    def _take_commands_under_way(self, ahead: PlanningAhead[CommandT, EventT]) -> bool:
        """Apply the commands that need not wait for the running step. Returns False if one must wait."""
        try:
            while self._kept is None:
                command = self._inbox.get_nowait()
                if isinstance(command, _Stop) or not ahead.may_apply(command):
                    self._kept = command
                else:
                    self._hand_over(self._scheduler.apply(command, self._clock.now_s()))
        except Empty:
            return True
        return False

    def _next_command(self, wait_s: float | None) -> CommandT | _Stop:
        """Return the next command. Raises Empty."""
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        return self._inbox.get(timeout=wait_s) if wait_s != 0.0 else self._inbox.get_nowait()

    def _turn(self) -> float | None:
        """Compute one step if there is one. Returns how long the loop may sleep, or 0."""
        now_s = self._clock.now_s()
        events, deadline_s = self._scheduler.reap(now_s)
        self._hand_over(events)
        events, plan = self._scheduler.plan(now_s)
        self._hand_over(events)
        if plan is not None:
            self._step(plan, now_s)
            return 0.0
        self._let_go()
        return None if deadline_s is None else max(0.0, deadline_s - now_s)

    def _step(self, plan: StepPlan, now_s: float) -> None:
        """Compute this step and those planned ahead after it, without a gap."""
        self._begin(plan, now_s)
        in_flight: StepInFlight | None = self._launch(plan, self._clock.now_s() - now_s)
        while in_flight is not None:
            following = self._launch_behind(in_flight)
            self._let_go()
            in_flight = self._land(in_flight, following)

    def _launch_behind(self, in_flight: StepInFlight) -> StepInFlight | None:
        """Launch the next step while this one runs. Returns None if this one must end first."""
        ahead = self._ahead
        if ahead is None or not in_flight.can_feed or not ahead.may_plan_ahead:
            return None
        if not self._take_commands_under_way(ahead):
            return None
        now_s = self._clock.now_s()
        self._hand_over(self._scheduler.reap(now_s)[0])
        events, plan = ahead.plan_ahead(now_s)
        self._hand_over(events)
        return None if plan is None else self._launch(plan)

    def _launch(self, plan: StepPlan, plan_s: float = 0.0) -> StepInFlight:
        return StepInFlight(plan, _tried(lambda: self._launcher.launch(plan)), plan_s)

    def _land(self, in_flight: StepInFlight, following: StepInFlight | None) -> StepInFlight | None:
        """Wait for a step to end and return the step then running. If it failed, the step launched after it is waited
        for too, since no step is planned after that one."""
        is_well = self._end(in_flight, following)
        if following is None or is_well:
            return following
        self._end(following, None)
        return None

    def _end(self, in_flight: StepInFlight, following: StepInFlight | None) -> bool:
        """Wait for a step and record its outcome; `following` is the step that runs after it. Returns False if the step
        failed."""
        launched = in_flight.launched
        result = launched if isinstance(launched, Exception) else _tried(launched.result)
        computed_s = self._clock.now_s()
        if self._broken is not None:
            raise self._broken
        if isinstance(result, Exception):
            self._on_error(result)
            events = self._scheduler.fail(in_flight.plan, result, computed_s)
        else:
            events = self._scheduler.complete(in_flight.plan, result, computed_s)
        self._hand_over(events)
        before, ended_s = self._progress, self._clock.now_s()
        assert before.busy_since_s is not None
        step_s = ended_s - before.busy_since_s
        longest_s = max(before.longest_step_s, step_s)
        if not isinstance(result, Exception):
            run_s = computed_s - before.busy_since_s - in_flight.plan_s
            self._on_timed(in_flight.plan, StepTime(step_s, in_flight.plan_s, run_s, ended_s - computed_s))
        self._progress = Progress(
            steps=before.steps + 1,
            last_step_s=ended_s,
            busy_since_s=None if following is None else ended_s,
            longest_step_s=longest_s,
            plan=None if following is None else following.plan,
        )
        return not isinstance(result, Exception)

    def _begin(self, plan: StepPlan, now_s: float) -> None:
        self._progress = replace(self._progress, busy_since_s=now_s, plan=plan)

    def _hand_over(self, events: tuple[EventT, ...]) -> None:
        if events and self._held is not None:
            self._held.append(events)
        elif events:
            self._emit(events)

    def _let_go(self) -> None:
        for events in self._held or ():
            self._emit(events)
        if self._held:
            self._held.clear()


def _tried(call: Callable[[], T]) -> T | Exception:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - a model may raise anything; it ends this step's sequences
        return error
