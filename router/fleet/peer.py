"""One incarnation of one worker, as this router speaks with it.

Owns how much of this router's work is there, and whether the worker is trusted: a failed call makes it suspect at once,
silence after a while; a direct check clears or loses it. Every call carries a deadline, and ends early when the worker
is lost.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import grpc

from cluster.errors import Cancelled, QueueFull, TandemError, Unavailable, Unhealthy, WorkerLost
from cluster.member import Member
from cluster.observe.telemetry import Telemetry
from cluster.protocol.received import checked
from cluster.serving.rpc_errors import error_from_rpc
from router.fleet.backlog import Backlog
from router.fleet.direct_check import answers, nobody_listens
from router.fleet.patience import Patience
from tandem.v1 import worker_pb2, worker_pb2_grpc

_CHECK_S = 1.0
_LATE_S = 0.5  # an answer that is given up so much later than it should be: this router was stopped or busy itself
_CHECK_PAUSE_S = 0.2
_LONGEST_CHECK_S = 2.5  # what takes longer is this router's own time
_LEAST_WAIT_S = 0.001  # what is left may be less than a clock's last digit
_LAPSED_CHECK_S = 1.0
OWN_CALL_S = 5.0  # for calls of the router's own, which belong to no request

Answer = TypeVar("Answer")


class Peer:
    """What prefill and decode workers have in common."""

    def __init__(
        self,
        member: Member,
        channel: grpc.aio.Channel,
        *,
        patience: Patience,
        on_change: Callable[[], None],
        telemetry: Telemetry,
    ) -> None:
        self.member = member
        self.pairing = sys.intern(repr(member.fingerprint))
        self.trusted = True
        self.assigned = 0  # sequences that this router has there
        self.backlog = Backlog()
        self.leaves_at_s: float | None = None  # by the event loop's clock; None: it stays
        self._channel = channel
        self._patience = patience
        self._on_change = on_change
        self._telemetry = telemetry
        self._registered = True
        self._worker = worker_pb2_grpc.WorkerStub(channel)
        self._doubt = asyncio.Event()
        self._lost = asyncio.Event()
        self._num_missed = 0  # answers, in a row
        self._asked_s = 0.0  # when it was asked for the last of them
        self._missed_s = 0.0  # when it was last asked in vain, silent or not
        self._lost_detail = ""
        self._answered_s = asyncio.get_running_loop().time()

    @property
    def heard_s(self) -> float:
        """When it last said something, by the event loop's clock."""
        return self._answered_s

    @property
    def silent_s(self) -> float:
        return asyncio.get_running_loop().time() - self.heard_s

    @property
    def num_missed(self) -> int:
        """Answers that it has missed since it was silent; none once it has said anything."""
        return self._num_missed if self.heard_s <= self._asked_s else 0

    def doubt(self) -> None:
        """Something failed directly: no new work until a check has passed."""
        self.trusted = False
        self._doubt.set()

    def leave(self, grace_s: float) -> None:
        """It said that it takes no new work, and for how long it still has what it was given."""
        self.leaves_at_s = max(self.leaves_at_s or 0.0, asyncio.get_running_loop().time() + grace_s)
        self._on_change()

    def set_registered(self, registered: bool) -> None:
        """Its lease may have lapsed: then it is looked at again and again, until it is back or lost."""
        self._registered = registered
        if not registered:
            self.doubt()

    def lose(self, detail: str) -> None:
        """Every call in progress ends with WorkerLost."""
        self._lost_detail = detail
        self._lost.set()

    async def run(self) -> str:
        """Until the worker is lost, or has left and nothing of this router is there any more; returns why."""
        while True:
            await self._until_in_doubt()
            self._doubt.clear()
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
                asyncio.get_running_loop().call_later(_LAPSED_CHECK_S, self._doubt.set)

    async def inspect(self) -> worker_pb2.InspectResponse:
        """Raises TandemError."""
        asking = self._worker.Inspect(worker_pb2.InspectRequest(), timeout=OWN_CALL_S)
        inspected: worker_pb2.InspectResponse = await self._unless_lost(asking)
        return checked(inspected)

    async def _until_in_doubt(self) -> None:
        """Somebody could not reach it; or it has said nothing for a while, was asked, and does not answer."""
        while not self._doubt.is_set():
            left_s = self._patience.ask_after_s - self.silent_s
            if left_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(left_s, _LEAST_WAIT_S)):
                        await self._doubt.wait()
            elif not await self._answers(self._patience.answer_s):
                self._missed()
                self.doubt()

    async def _check_until_sure(self) -> str | None:
        """None: it answers. Else why it is lost."""
        loop = asyncio.get_running_loop()
        left_s = self._patience.grace_s
        while True:
            began_s, limit_s = loop.time(), self._patience.answer_s if self._num_missed else _CHECK_S
            if await self._answers(min(limit_s, max(0.0, left_s))) or (self._num_missed and not self.num_missed):
                return None
            if await nobody_listens(self.member.address):
                return "nobody listens at its address any more"
            if self._num_missed:
                self._missed()
            left_s -= min(loop.time() - began_s, _LONGEST_CHECK_S)
            if left_s <= 0:
                return f"it did not answer for {self._patience.grace_s:g} s"
            await asyncio.sleep(min(_CHECK_PAUSE_S, left_s))
            left_s -= _CHECK_PAUSE_S

    async def _answers(self, timeout_s: float) -> bool:
        """Asked again where this router was stopped itself while it waited."""
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
        """It was silent, and asked in vain."""
        self._num_missed = self.num_missed + 1
        self._asked_s = self._missed_s
        self._on_change()

    @contextmanager
    def assign(self, num_sequences: int) -> Iterator[None]:
        self.assigned += num_sequences
        try:
            yield
        finally:
            self.assigned -= num_sequences

    async def _unless_lost(self, answer: Awaitable[Answer]) -> Answer:
        """Raises WorkerLost, and what the call's status says."""
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
        """A call that did not get through, or that the worker cut off, makes it suspect; a refusal does not. What a
        full queue says of when to come back is kept for those who have not asked yet."""
        if isinstance(error, QueueFull):
            self.backlog.refused(error.retry_after_s, asyncio.get_running_loop().time())
        if isinstance(error, Unhealthy):
            self.doubt()
        if isinstance(error, Cancelled) or type(error) is Unavailable:
            self.doubt()
            return WorkerLost(f"{self.member.role} worker {self.member.id} does not answer: {error.message}")
        return error
