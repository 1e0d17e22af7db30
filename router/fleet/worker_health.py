"""The health of one incarnation of one worker, as this router sees it, and its drain.

A failed call makes the worker suspect at once, silence after a while, and a direct health check clears or loses it.
Each health check goes to two other workers too: if none of them answers either, the silence may be this router's own
fault (router/policies/hedging.py). Every call has a deadline and ends early when the worker is lost.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import grpc

from cluster.errors import (
    AllWorkersSilent,
    Cancelled,
    Draining,
    QueueFull,
    TandemError,
    Unavailable,
    Unhealthy,
    WorkerLost,
)
from cluster.member import Member
from cluster.messages import NO_TENANT, TenantShare
from cluster.serving.rpc_errors import error_from_rpc
from router.fleet.supervision import check_health, refuses_connections
from router.fleet.worker_stream import RouterSide
from router.policies.hedging import Silence
from router.policies.prediction.work_ahead import PromptBacklog
from router.running import running

LEFT = "it left"  # why a router ends its connection to a worker that has no work and is not registered
_CHECK_S = 1.0
_LATE_S = 0.5  # a timeout that fires this much late shows that this router itself was stopped or busy
_CHECK_PAUSE_S = 0.2
_LONGEST_CHECK_S = 2.5  # a longer check shows that this router itself was stopped
_LEAST_WAIT_S = 0.001  # the rest may be less than the clock's resolution
_LAPSED_CHECK_S = 1.0
_NUM_OTHERS_ASKED = 2

Answer = TypeVar("Answer")


class WorkerHealth(ABC):
    """The health of one worker. `trusted`: the worker may get new work. `num_cleared`: how often a health check has
    cleared it of a suspicion. `backlog` stores for how long the worker reported its queue as full.
    """

    def __init__(
        self,
        member: Member,
        channel: grpc.aio.Channel,
        side: RouterSide,
        others: "Callable[[], Sequence[WorkerHealth]]",
    ) -> None:
        """`others` returns the other connected workers, those first from which this router received messages last."""
        self.member = member
        self.trusted = True
        self.num_cleared = 0
        self.backlog = PromptBacklog()
        self.drain_deadline_s: float | None = None  # by the event loop's clock; None: it stays
        self._channel = channel
        self._timeouts = side.timeouts
        self._others = others
        self._on_change = side.on_change
        self._telemetry = side.telemetry
        self._registered = True
        self._suspected = asyncio.Event()
        self._is_lost = False
        self._calls: set[asyncio.Timeout] = set()  # in progress
        self._silence = Silence()
        self._lost_detail = ""
        self._answered_s = asyncio.get_running_loop().time()

    @property
    def heard_s(self) -> float:
        """Return the time when the worker last sent anything, by the event loop's clock."""
        return self._answered_s

    @property
    @abstractmethod
    def assigned(self) -> int:
        """Return the number of sequences that this router has there, with those of prompts that the worker exports."""

    @property
    def silent_s(self) -> float:
        return asyncio.get_running_loop().time() - self.heard_s

    @property
    def num_missed(self) -> int:
        """Return the number of consecutive health checks that the worker has missed since it became silent; 0 once it
        has sent anything.
        """
        return self._silence.num_missed(self.heard_s)

    @property
    def is_draining(self) -> bool:
        """Return whether the worker has announced that it will leave."""
        return self.drain_deadline_s is not None

    def suspect(self) -> None:
        """Give the worker no new work until a health check has passed, because a call failed."""
        self._suspected.set()
        if self.trusted:  # a failed call of each request there is one change
            self.trusted = False
            self._on_change()

    def mark_draining(self, grace_s: float) -> None:
        """Record that the worker accepts no new work and keeps its present work for `grace_s`."""
        self.drain_deadline_s = max(self.drain_deadline_s or 0.0, asyncio.get_running_loop().time() + grace_s)
        self._on_change()

    def set_registered(self, registered: Member | None) -> None:
        """Record the worker as it is registered now, perhaps with another role. One that is not registered (None) is
        checked repeatedly until it is registered or lost."""
        self._registered = registered is not None
        if registered is None:
            self.suspect()
        else:
            if registered.role is not self.member.role:
                self.backlog.forget_recent()
            self.member = registered

    def fail_calls(self, detail: str) -> None:
        """End every call in progress with the error of `loss`."""
        self._lost_detail = detail
        if not self._is_lost:
            self._is_lost = True
            for call in self._calls:
                call.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> str:
        """Check the worker's health until it is lost, or has left and has no work of this router. Returns the
        reason."""
        while True:
            is_silent = await self._until_suspected()
            self._suspected.clear()
            problem = await self._check_until_sure(is_silent)
            if problem is not None:
                return problem
            silence, self._silence = self._silence, Silence()
            if silence.num_counted:
                self._telemetry.count("tandem_false_suspicions_total", role=self.member.role)
            if self._suspected.is_set():
                continue  # a call failed since the check began, and the answer may be older: ask again
            self.trusted = self._registered
            self.num_cleared += 1
            self._on_change()
            if self._registered:
                continue
            if self.assigned == 0:
                return LEFT
            asyncio.get_running_loop().call_later(_LAPSED_CHECK_S, self._suspected.set)

    async def ask(self, timeout_s: float) -> None:
        """Check this worker's health once, for comparison with another worker that is silent. No answer has no
        effect.
        """
        if not (await check_health(self._channel, timeout_s)).problem:
            self._answered_s = asyncio.get_running_loop().time()

    def loss(self, problem: str) -> TandemError:
        """Return the error of work that the worker no longer serves: Draining if the worker has reported its drain,
        AllWorkersSilent if this router may be cut off from all workers, else WorkerLost."""
        message = f"{self.member.role} worker {self.member.id} {problem}"
        if self.is_draining:
            return Draining(f"{message}; it was draining")
        is_own = not self._silence.continues(self.heard_s) or self._silence.is_of_worker(self._another_sent_s())
        return WorkerLost(message) if is_own else AllWorkersSilent(message)

    async def _until_suspected(self) -> bool:
        """Wait until a call has failed, or the worker was silent and missed a health check. Returns whether it was
        silent."""
        is_silent = False
        while not self._suspected.is_set():
            left_s = self._timeouts.health_check_after_s - self.silent_s
            if left_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(left_s, _LEAST_WAIT_S)):
                        await self._suspected.wait()
            elif not await self._answers(self._timeouts.health_check_timeout_s):
                is_silent = True
                self._count_missed()
                self.suspect()
        return is_silent

    async def _check_until_sure(self, is_silent: bool) -> str | None:
        """Repeat the health check. Returns None once the worker answers, else why it is lost. `is_silent`: the worker
        is suspect because it sent nothing, so any message counts as an answer, and every missed check is counted. After
        a failed call, missed checks are counted once `suspicion_after_s` have passed without a message."""
        loop = asyncio.get_running_loop()
        left_s = self._timeouts.recovery_timeout_s
        while True:
            began_s = loop.time()
            if await self._answers(min(self._check_timeout_s(), max(0.0, left_s))):
                return None
            if is_silent and not self._silence.continues(self.heard_s):
                return None
            if await refuses_connections(self.member.address):
                return "its address refuses connections"
            if is_silent or self.silent_s >= self._timeouts.suspicion_after_s:
                self._count_missed()
            left_s -= min(loop.time() - began_s, _LONGEST_CHECK_S)
            if left_s <= 0:
                return f"it did not answer for {self._timeouts.recovery_timeout_s:g} s"
            await asyncio.sleep(min(_CHECK_PAUSE_S, left_s))
            left_s -= _CHECK_PAUSE_S

    def _check_timeout_s(self) -> float:
        """Return the timeout of the next check: until the worker's silence makes it suspect, within bounds."""
        until_silent_s = self._timeouts.suspicion_after_s - self.silent_s
        return max(self._timeouts.health_check_timeout_s, min(_CHECK_S, until_silent_s))

    async def _answers(self, timeout_s: float) -> bool:
        """Return whether the worker answers. Others are asked at the same time. The check is repeated if this router
        itself was stopped while it waited."""
        loop = asyncio.get_running_loop()
        while True:
            asked_s = loop.time()
            async with running(self._ask_others(timeout_s)):
                check = await check_health(self._channel, timeout_s)
            if not check.problem:
                self._answered_s = loop.time()
                return True
            if loop.time() - asked_s <= timeout_s + _LATE_S:
                record = self._silence.record_timeout if check.timed_out else self._silence.record_failure
                record(asked_s, sent_s=self.heard_s)
                return False

    async def _ask_others(self, timeout_s: float) -> None:
        asked = self._others()[:_NUM_OTHERS_ASKED]
        # The connection of one of them may close in the meantime, which does not concern this worker.
        await asyncio.gather(*(other.ask(timeout_s) for other in asked), return_exceptions=True)

    def _another_sent_s(self) -> float:
        """Return when this router last received anything from another worker."""
        return max((other.heard_s for other in self._others()), default=-math.inf)

    def _count_missed(self) -> None:
        """Count the health check that the silent worker has just missed, unless this router may be cut off."""
        self._silence.count(self._another_sent_s())
        self._on_change()

    async def _unless_lost(self, answer: Awaitable[Answer], tenant: TenantShare = NO_TENANT) -> Answer:
        """Await an answer of the worker. `tenant`: whose work the call brings. Raises the error of `loss` when the
        worker is lost first, and the error of a failed call."""
        if self._is_lost:
            asyncio.ensure_future(answer).cancel()  # before it starts
            raise self._gone()
        task = asyncio.current_task()
        assert task is not None
        num_cancels, until_lost = task.cancelling(), asyncio.timeout(None)
        try:
            async with until_lost:
                self._calls.add(until_lost)
                result = await answer
            self._answered_s = asyncio.get_running_loop().time()
            return result
        except grpc.aio.AioRpcError as rpc_error:
            raise self._judged(error_from_rpc(rpc_error), tenant) from rpc_error
        except (TimeoutError, asyncio.CancelledError) as ended:
            if self._is_lost and task.cancelling() == num_cancels:  # or the channel closed first, with the peer
                raise self._gone() from ended
            raise
        finally:
            self._calls.discard(until_lost)

    def _gone(self) -> TandemError:
        return self.loss(f"is lost: {self._lost_detail}")

    def _judged(self, error: TandemError, tenant: TenantShare) -> TandemError:
        """Return the error of a failed call. A network failure, or a call that the worker cut off, makes the worker
        suspect; a refusal does not. The retry delay of a full queue is stored for later requests of the tenant.
        """
        if isinstance(error, QueueFull):
            self.backlog.record_full_queue(tenant.label, error.retry_after_s, asyncio.get_running_loop().time())
        if isinstance(error, Unhealthy):
            self.suspect()
        if isinstance(error, Cancelled) or type(error) is Unavailable:
            self.suspect()
            return self.loss(f"does not answer: {error.message}")
        return error
