"""Runs hedges: starts one when a worker is suspect, and cancels it or lets it take over.

Owns the tasks of hedges, which end with their request at the latest. router/policies/hedging.py makes the decisions.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from cluster.errors import Overloaded
from cluster.observe.telemetry import Telemetry
from router.fleet.fleet import Fleet
from router.fleet.peer import Peer
from router.pipeline.failures import AttemptFailed, failure_of
from router.pipeline.worker_choice import WorkerChoice
from router.policies.hedging import Action, Execution, HedgeBudget, Race, RaceOutcome, decide
from router.request.admitted_request import AdmittedRequest
from router.request.choice import Choice
from router.running import ChangeSignal, end, first_done

Answer = TypeVar("Answer")
GoOn = Callable[["Hedges", AdmittedRequest, Sequence[Choice]], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class PendingLeg:
    """A leg that waits for its worker."""

    name: str  # as failures.py names it
    peer: Peer

    def failure_of(self, error: BaseException | None) -> AttemptFailed | None:
        """Return the failure of this leg that an error of the work means; None if another attempt would not help."""
        return failure_of(self.name, self.peer.member.id, error)


class Overtaken(Exception):
    """A hedge has taken over these choices: release the resources of the former execution, then await `end`."""

    def __init__(
        self, leg: str, task: "asyncio.Task[None]", execution: Execution, failure: AttemptFailed | None
    ) -> None:
        """`leg`: of the suspect worker. `failure`: of the former execution, if it failed before the hedge took over."""
        super().__init__("a hedge has taken over these choices")
        self.name = f"{leg}_hedged"  # as the ledger lists it
        self.failure = failure
        self._task = task
        self._execution = execution

    async def end(self) -> None:
        """Wait until every choice of the hedge has ended. Raises TandemError."""
        try:
            await self._task
        finally:
            self._execution.is_over = True
            self._task.cancel()


class Hedging:
    """The hedges of one router, and their common budget."""

    def __init__(
        self, *, fleet: Fleet, worker_choice: WorkerChoice, num_running: Callable[[], int], telemetry: Telemetry
    ) -> None:
        self._fleet = fleet
        self._worker_choice = worker_choice
        self._num_running = num_running
        self._telemetry = telemetry
        self._budget = HedgeBudget()
        self._ended = ChangeSignal()  # of any hedge

    def of_request(self, go_on: GoOn) -> "Hedges":
        """Return the hedges of one request, for `async with`: they end with the block. `go_on` completes choices from
        their committed tokens."""
        return Hedges(self, go_on)

    def action(
        self, admitted: AdmittedRequest, choices: Sequence[Choice], pending: PendingLeg, *, may_hedge: bool
    ) -> Action:
        """Decide what happens to choices that wait for this leg. `may_hedge`: as far as they are concerned."""
        if not (num_missed := pending.peer.num_missed):
            return Action.WAIT
        return decide(
            num_missed,
            is_replaceable=self._worker_choice.can_run_elsewhere(admitted, choices, pending.name),
            may_hedge=may_hedge and self._budget.may_begin(self._num_running()),
        )

    def begin(self) -> None:
        self._budget.begin()

    def end(self, leg: str, outcome: str) -> None:
        """Record that a hedge is decided: another one may start."""
        self._budget.end()
        self._telemetry.count("tandem_hedges_total", leg=leg, outcome=outcome)
        self._ended.set()

    @property
    def changes(self) -> tuple[ChangeSignal, ChangeSignal]:
        """Return the signals of a worker that becomes suspect or answers again, and of a hedge that ends."""
        return self._fleet.changes, self._ended


class _Hedge:
    """A hedge until it is decided. After that its task is an execution like any other."""

    def __init__(
        self,
        hedging: Hedging,
        leg: str,
        choices: Sequence[Choice],
        go_on: Callable[[Execution], Coroutine[Any, Any, None]],
    ) -> None:
        self._hedging = hedging
        self._leg = leg
        self.failure: BaseException | None = None  # by itself, not because it was cancelled
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        execution = Execution()
        hedging.begin()
        self.race = Race(choices, execution, self._on_end)
        self.task = asyncio.create_task(go_on(execution), name="hedge")
        self.task.add_done_callback(self._on_task_done)

    async def call_off(self) -> bool:
        """Cancel the hedge on its workers. Returns False if it has taken over."""
        self.race.call_off()
        if self.race.outcome is RaceOutcome.TAKEN_OVER:
            return False
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return True

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            self.failure = task.exception()
        self.race.call_off()

    def _on_end(self) -> None:
        self._hedging.end(self._leg, "failed" if self.failure is not None else str(self.race.outcome))
        if not self.decided.done():
            self.decided.set_result(None)


class Hedges:
    """The hedges of one request."""

    def __init__(self, hedging: Hedging, go_on: GoOn) -> None:
        self._hedging = hedging
        self._go_on = go_on
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await end(*self._tasks)

    async def unless_overtaken(
        self,
        admitted: AdmittedRequest,
        choices: Sequence[Choice],
        pending: PendingLeg,
        work: "Coroutine[Any, Any, Answer] | asyncio.Task[Answer]",
    ) -> Answer:
        """Return the result of `work`, for which these choices wait and which waits for the worker of `pending`.

        Raises the errors of `work`, Overtaken, and AttemptFailed when the worker has missed too many health checks.
        """
        working = asyncio.ensure_future(work)
        watch = _Watch(self._hedging, admitted, choices, pending, self._begin)
        try:
            while not working.done():
                await watch.look()
                await watch.until_changed(working)
                if watch.is_overtaken_after(working):
                    raise watch.overtaken
            return working.result()
        finally:
            await watch.call_off()
            await end(working)

    def _begin(self, admitted: AdmittedRequest, choices: Sequence[Choice], pending: PendingLeg) -> _Hedge:
        def go_on(execution: Execution) -> Coroutine[Any, Any, None]:
            return self._go_on(self, admitted.hedged(execution, besides=pending.peer.member.id), choices)

        hedge = _Hedge(self._hedging, pending.name, choices, go_on)
        self._tasks.add(hedge.task)
        hedge.task.add_done_callback(self._tasks.discard)
        return hedge


class _Watch:
    """Watches one worker while choices wait for it."""

    def __init__(
        self,
        hedging: Hedging,
        admitted: AdmittedRequest,
        choices: Sequence[Choice],
        pending: PendingLeg,
        begin: Callable[[AdmittedRequest, Sequence[Choice], PendingLeg], _Hedge],
    ) -> None:
        self._hedging = hedging
        self._admitted = admitted
        self._choices = choices
        self._pending = pending
        self._begin = begin
        self._hedge: _Hedge | None = None
        self._hedge_failure: BaseException | None = None  # the next hedge would fail too
        self._failure: AttemptFailed | None = None

    @property
    def overtaken(self) -> Overtaken:
        assert self._hedge is not None, "nothing has taken over"
        return Overtaken(self._pending.name, self._hedge.task, self._hedge.race.hedge, self._failure)

    async def look(self) -> None:
        """Start or cancel a hedge according to the worker's health. Raises AttemptFailed when the worker counts as
        lost.
        """
        if self._hedge is not None and (self._hedge.race.outcome is not None or not self._pending.peer.num_missed):
            await self.call_off()
        if self._hedge is not None:
            return
        going = [choice for choice in self._choices if not choice.ended]
        if not going or isinstance(self._hedge_failure, Overloaded):  # workers that are full would refuse it again
            return
        is_current = all(choice.execution is self._admitted.execution and choice.race is None for choice in going)
        may_hedge = is_current and self._hedge_failure is None
        action = self._hedging.action(self._admitted, going, self._pending, may_hedge=may_hedge)
        if action is Action.GIVE_UP:
            peer = self._pending.peer
            error = peer.loss("does not answer, and another one does")
            raise AttemptFailed(self._pending.name, peer.member.id, error.reason, error)
        if action is Action.HEDGE:
            self._admitted.waits_for_hedge()
            self._hedge = self._begin(self._admitted, going, self._pending)

    async def until_changed(self, working: "asyncio.Future[Any]") -> None:
        """Wait until the worker, a hedge or the work may have changed."""
        decided = () if self._hedge is None else (self._hedge.decided,)
        await first_done(working, *decided, changes=self._hedging.changes)

    def is_overtaken_after(self, working: "asyncio.Future[Any]") -> bool:
        """Return whether the hedge is current: it has a token, or `working` failed before it had one."""
        if self._hedge is None:
            return False
        error = working.exception() if working.done() and not working.cancelled() else None
        if self._hedge.race.outcome is None and (failure := self._pending.failure_of(error)) is not None:
            self._failure = failure
            self._hedge.race.take_over()
        return self._hedge.race.outcome is RaceOutcome.TAKEN_OVER

    async def call_off(self) -> None:
        """Cancel the hedge. It has no effect without a hedge, or if the hedge has taken over."""
        if self._hedge is not None and await self._hedge.call_off():
            self._admitted.continues_without_hedge()
            self._hedge_failure = self._hedge_failure or self._hedge.failure
            self._hedge = None
