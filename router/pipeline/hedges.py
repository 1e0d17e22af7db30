"""Hedges at work: they begin when a worker is suspect, race with what waits for it, and are called off or take over.

Owns the tasks of hedges, which end with their request at the latest. Decides nothing; router/policies/hedging.py does.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from cluster.errors import WorkerLost
from cluster.observe.telemetry import Telemetry
from router.fleet.fleet import Fleet
from router.fleet.peer import Peer
from router.fleet.prefill_peer import PrefillPeer
from router.pipeline.failures import DECODE, PREFILL, AttemptFailed
from router.pipeline.pairing import Pairing
from router.policies.hedging import Action, HedgeBudget, Line, Race, RaceOutcome, decide
from router.request.choice import Choice
from router.request.live_request import LiveRequest

Answer = TypeVar("Answer")
GoOn = Callable[["Hedges", LiveRequest, Sequence[Choice]], Coroutine[Any, Any, None]]


class Overtaken(Exception):
    """A hedge has these choices now: whatever the line before it still holds is to be let go, and `end` awaited."""

    def __init__(self, leg: str, task: "asyncio.Task[None]", line: Line, failure: AttemptFailed | None) -> None:
        """`leg`: the suspect's. `failure`: of the line before, if it failed before the hedge had its first token."""
        super().__init__("a hedge goes on with these choices")
        self.name = f"{leg}_hedged"  # as ledgers know it
        self.failure = failure
        self._task = task
        self._line = line

    async def end(self) -> None:
        """Until every choice of the hedge has ended. Raises TandemError."""
        try:
            await self._task
        finally:
            self._line.is_over = True
            self._task.cancel()


class Hedging:
    """One router's."""

    def __init__(self, *, fleet: Fleet, pairing: Pairing, num_running: Callable[[], int], telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._pairing = pairing
        self._num_running = num_running
        self._telemetry = telemetry
        self._budget = HedgeBudget()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def of_request(self, go_on: GoOn) -> AsyncIterator["Hedges"]:
        """`go_on` completes choices from what the client has. No hedge outlives the block."""
        hedges = Hedges(self, go_on)
        try:
            yield hedges
        finally:
            await hedges.close()

    def action(self, live: LiveRequest, choices: Sequence[Choice], peer: Peer) -> Action:
        if not (num_missed := peer.num_missed):
            return Action.WAIT
        return decide(
            num_missed,
            is_replaceable=self._pairing.could_begin_elsewhere(live, choices, peer),
            may_hedge=self._budget.may_begin(self._num_running()),
        )

    def begin(self) -> None:
        self._budget.begin()

    def end(self, leg: str, outcome: str) -> None:
        """One hedge is decided; another may begin."""
        self._budget.end()
        self._telemetry.count("tandem_hedges_total", leg=leg, outcome=outcome)
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Waits until a worker is suspect or no longer, or a hedge has ended."""
        waits = [asyncio.ensure_future(wait) for wait in (self._fleet.changed(), self._changed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class _Hedge:
    """One, from its beginning until it is decided; after that its task is a line of work like any other."""

    def __init__(
        self, hedging: Hedging, leg: str, choices: Sequence[Choice], go_on: Callable[[Line], Coroutine[Any, Any, None]]
    ) -> None:
        self._hedging = hedging
        self._leg = leg
        self.is_failed = False  # by itself
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = Line()
        hedging.begin()
        self.race = Race(choices, line, self._on_end)
        self.task = asyncio.create_task(go_on(line), name="hedge")
        self.task.add_done_callback(self._on_task_done)

    async def call_off(self) -> bool:
        """Its workers are told to stop. False: it has taken over, and goes on."""
        self.race.call_off()
        if self.race.outcome is RaceOutcome.TAKEN_OVER:
            return False
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return True

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            self.is_failed = task.exception() is not None
        self.race.call_off()

    def _on_end(self) -> None:
        self._hedging.end(self._leg, "failed" if self.is_failed else str(self.race.outcome))
        if not self.decided.done():
            self.decided.set_result(None)


class Hedges:
    """One request's."""

    def __init__(self, hedging: Hedging, go_on: GoOn) -> None:
        self._hedging = hedging
        self._go_on = go_on
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def unless_overtaken(
        self, live: LiveRequest, choices: Sequence[Choice], peer: Peer, work: Coroutine[Any, Any, Answer]
    ) -> Answer:
        """What `work` gives, which waits for `peer` and has these choices of `live`. Raises what it raises, Overtaken,
        and AttemptFailed where the peer is given up."""
        working = asyncio.ensure_future(work)
        watch = _Watch(self._hedging, live, choices, peer, self._begin)
        try:
            while not working.done():
                await watch.look()
                await watch.until_changed(working)
                if watch.is_overtaken_after(working):
                    raise watch.overtaken
            return working.result()
        finally:
            await watch.call_off()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def _begin(self, live: LiveRequest, choices: Sequence[Choice], peer: Peer) -> _Hedge:
        def go_on(line: Line) -> Coroutine[Any, Any, None]:
            return self._go_on(self, live.hedged(line, besides=peer.member.id), choices)

        hedge = _Hedge(self._hedging, _leg(peer), choices, go_on)
        self._tasks.add(hedge.task)
        hedge.task.add_done_callback(self._tasks.discard)
        return hedge


class _Watch:
    """Over one worker, while choices wait for it."""

    def __init__(
        self,
        hedging: Hedging,
        live: LiveRequest,
        choices: Sequence[Choice],
        peer: Peer,
        begin: Callable[[LiveRequest, Sequence[Choice], Peer], _Hedge],
    ) -> None:
        self._hedging = hedging
        self._live = live
        self._choices = choices
        self._peer = peer
        self._begin = begin
        self._hedge: _Hedge | None = None
        self._has_failed = False  # a hedge, by itself: the next one would too
        self._failure: AttemptFailed | None = None

    @property
    def overtaken(self) -> Overtaken:
        assert self._hedge is not None, "nothing has taken over"
        return Overtaken(_leg(self._peer), self._hedge.task, self._hedge.race.hedge, self._failure)

    async def look(self) -> None:
        """Begins a hedge, or calls it off, as the worker answers. Raises AttemptFailed: it is given up."""
        if self._hedge is not None and (self._hedge.race.outcome is not None or not self._peer.num_missed):
            await self.call_off()
        if self._hedge is not None:
            return
        going = [choice for choice in self._choices if not choice.ended]
        if not going:
            return
        action = self._hedging.action(self._live, going, self._peer)
        if action is Action.GIVE_UP:
            member = self._peer.member
            error = WorkerLost(f"{member.role} worker {member.id} does not answer, and another one does")
            raise AttemptFailed(_leg(self._peer), member.id, error.reason, error)
        is_current = all(choice.line is self._live.line and choice.race is None for choice in going)
        if action is Action.HEDGE and is_current and not self._has_failed:
            self._live.waits_for_hedge()
            self._hedge = self._begin(self._live, going, self._peer)

    async def until_changed(self, working: "asyncio.Future[Any]") -> None:
        """Until there may be something new to see."""
        changed = asyncio.ensure_future(self._hedging.changed())
        try:
            waits = {working, changed} if self._hedge is None else {working, changed, self._hedge.decided}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    def is_overtaken_after(self, working: "asyncio.Future[Any]") -> bool:
        """The hedge is the current line: by a token of its own, or because `working` has failed before it had one."""
        if self._hedge is None:
            return False
        failure = working.exception() if working.done() and not working.cancelled() else None
        if isinstance(failure, AttemptFailed) and self._hedge.race.outcome is None:
            self._failure = failure
            self._hedge.race.take_over()
        return self._hedge.race.outcome is RaceOutcome.TAKEN_OVER

    async def call_off(self) -> None:
        """Nothing where there is no hedge, or it has taken over."""
        if self._hedge is not None and await self._hedge.call_off():
            self._has_failed |= self._hedge.is_failed
            self._hedge = None


def _leg(peer: Peer) -> str:
    return PREFILL if isinstance(peer, PrefillPeer) else DECODE
