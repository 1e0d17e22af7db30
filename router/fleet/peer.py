"""The connection of this router to one incarnation of one worker.

Owns the count of this router's work there and the worker's health: a failed call makes it suspect at once, silence
after a while, and a direct health check clears or loses it. Every call has a deadline and ends early when the worker is
lost.
"""

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import grpc

from cluster.errors import Cancelled, QueueFull, TandemError, Unavailable, Unhealthy, WorkerLost
from cluster.member import Member
from cluster.observe.telemetry import Telemetry
from cluster.protocol.received import checked
from cluster.service_times import ServiceTimes
from cluster.serving.rpc_errors import error_from_rpc
from router.fleet.supervision import WorkerTimeouts, answers, refuses_connections
from router.policies.work_ahead import PromptBacklog
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

_CHECK_S = 1.0
_LATE_S = 0.5  # a timeout that fires this much late shows that this router itself was stopped or busy
_CHECK_PAUSE_S = 0.2
_LONGEST_CHECK_S = 2.5  # a longer check shows that this router itself was stopped
_LEAST_WAIT_S = 0.001  # the rest may be less than the clock's resolution
_LAPSED_CHECK_S = 1.0
OWN_CALL_S = 5.0  # for calls of the router itself, which belong to no request

Answer = TypeVar("Answer")


class Peer(ABC):
    """The common part of PrefillPeer and DecodePeer."""

    def __init__(
        self,
        member: Member,
        channel: grpc.aio.Channel,
        *,
        timeouts: WorkerTimeouts,
        on_change: Callable[[], None],
        telemetry: Telemetry,
    ) -> None:
        self.member = member
        self.kv_format = sys.intern(repr(member.fingerprint))
        self.trusted = True
        self.assigned = 0  # sequences that this router has there
        self.backlog = PromptBacklog()
        self.drain_deadline_s: float | None = None  # by the event loop's clock; None: it stays
        self._channel = channel
        self._timeouts = timeouts
        self._on_change = on_change
        self._telemetry = telemetry
        self._registered = True
        self._worker = worker_pb2_grpc.WorkerStub(channel)
        self._suspected = asyncio.Event()
        self._lost = asyncio.Event()
        self._num_missed = 0  # health checks, in a row
        self._asked_s = 0.0  # when the last missed check began
        self._missed_s = 0.0  # when it last missed a health check, silent or not
        self._lost_detail = ""
        self._answered_s = asyncio.get_running_loop().time()

    @property
    def heard_s(self) -> float:
        """When the worker last sent anything, by the event loop's clock."""
        return self._answered_s

    @property
    @abstractmethod
    def service_times(self) -> ServiceTimes | None:
        """How fast the worker computes, from its last heartbeat; None before it has measured anything."""

    @property
    def silent_s(self) -> float:
        return asyncio.get_running_loop().time() - self.heard_s

    @property
    def num_missed(self) -> int:
        """How many health checks the worker has missed in a row since it became silent; 0 once it has sent anything."""
        return self._num_missed if self.heard_s <= self._asked_s else 0

    def suspect(self) -> None:
        """A call failed: give the worker no new work until a health check has passed."""
        self.trusted = False
        self._suspected.set()

    def mark_draining(self, grace_s: float) -> None:
        """Record that the worker accepts no new work and keeps its present work for `grace_s`."""
        self.drain_deadline_s = max(self.drain_deadline_s or 0.0, asyncio.get_running_loop().time() + grace_s)
        self._on_change()

    def set_registered(self, registered: bool) -> None:
        """Record whether the worker is registered. One that is not is checked repeatedly until it is registered or
        lost."""
        self._registered = registered
        if not registered:
            self.suspect()

    def fail_calls(self, detail: str) -> None:
        """End every call in progress with WorkerLost."""
        self._lost_detail = detail
        self._lost.set()

    async def run(self) -> str:
        """Check the worker's health until it is lost, or has left and has no work of this router. Returns the
        reason."""
        while True:
            await self._until_suspected()
            self._suspected.clear()
            problem = await self._check_until_sure()
            if problem is not None:
                return problem
            if self._num_missed:
                self._num_missed = 0
                self._telemetry.count("tandem_false_suspicions_total", role=self.member.role)
            if self._registered:
                self.trusted = True
                self._on_change()
            elif self.assigned == 0:
                return "it left"
            else:
                asyncio.get_running_loop().call_later(_LAPSED_CHECK_S, self._suspected.set)

    async def inspect(self) -> worker_pb2.InspectResponse:
        """Return the worker's own figures. Raises TandemError."""
        asking = self._worker.Inspect(worker_pb2.InspectRequest(), timeout=OWN_CALL_S)
        inspected: worker_pb2.InspectResponse = await self._unless_lost(asking)
        return checked(inspected)

    async def _until_suspected(self) -> None:
        """Wait until a call has failed, or the worker was silent and missed a health check."""
        while not self._suspected.is_set():
            left_s = self._timeouts.health_check_after_s - self.silent_s
            if left_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(left_s, _LEAST_WAIT_S)):
                        await self._suspected.wait()
            elif not await self._answers(self._timeouts.health_check_timeout_s):
                self._missed()
                self.suspect()

    async def _check_until_sure(self) -> str | None:
        """Repeat the health check. Returns None once the worker answers, else why it is lost."""
        loop = asyncio.get_running_loop()
        left_s = self._timeouts.recovery_timeout_s
        while True:
            began_s, limit_s = loop.time(), self._timeouts.health_check_timeout_s if self._num_missed else _CHECK_S
            if await self._answers(min(limit_s, max(0.0, left_s))) or (self._num_missed and not self.num_missed):
                return None
            if await refuses_connections(self.member.address):
                return "its address refuses connections"
            if self._num_missed:
                self._missed()
            left_s -= min(loop.time() - began_s, _LONGEST_CHECK_S)
            if left_s <= 0:
                return f"it did not answer for {self._timeouts.recovery_timeout_s:g} s"
            await asyncio.sleep(min(_CHECK_PAUSE_S, left_s))
            left_s -= _CHECK_PAUSE_S

    async def _answers(self, timeout_s: float) -> bool:
        """Return whether the worker answers. The check is repeated if this router itself was stopped while it
        waited."""
        loop = asyncio.get_running_loop()
        while True:
            asked_s = loop.time()
            if await answers(self._channel, timeout_s):
                self._answered_s = loop.time()
                return True
            if loop.time() - asked_s <= timeout_s + _LATE_S:
                self._missed_s = asked_s
                return False

    def _missed(self) -> None:
        """Record that the silent worker missed a health check."""
        self._num_missed = self.num_missed + 1
        self._asked_s = self._missed_s
        self._on_change()

    @contextmanager
    def assign(self, num_sequences: int) -> Iterator[None]:
        """Count sequences as work of this router at the worker, until the block is left."""
        self.assigned += num_sequences
        try:
            yield
        finally:
            self.assigned -= num_sequences

    async def _unless_lost(self, answer: Awaitable[Answer]) -> Answer:
        """Await an answer of the worker. Raises WorkerLost when the worker is lost first, and the error of a failed
        call."""
        work = asyncio.ensure_future(answer)
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait((work, lost), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or (work.cancelled() and self._lost.is_set()):  # the channel closes with the peer
                raise self._worker_lost()
            result = work.result()
            self._answered_s = asyncio.get_running_loop().time()
            return result
        except grpc.aio.AioRpcError as rpc_error:
            raise self._judged(error_from_rpc(rpc_error)) from rpc_error
        finally:
            work.cancel()
            lost.cancel()

    def _worker_lost(self) -> WorkerLost:
        return WorkerLost(f"{self.member.role} worker {self.member.id} is lost: {self._lost_detail}")

    def _judged(self, error: TandemError) -> TandemError:
        """A call that failed in the network, or that the worker cut off, makes it suspect; a refusal does not. The
        retry time of a full queue is kept for requests that have not asked the worker yet."""
        if isinstance(error, QueueFull):
            self.backlog.record_full_queue(error.retry_after_s, asyncio.get_running_loop().time())
        if isinstance(error, Unhealthy):
            self.suspect()
        if isinstance(error, Cancelled) or type(error) is Unavailable:
            self.suspect()
            return WorkerLost(f"{self.member.role} worker {self.member.id} does not answer: {error.message}")
        return error
