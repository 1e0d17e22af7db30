"""Detects whether workers are alive: timeouts, direct health checks, and one supervising task per worker.

A supervisor connects to its worker, serves it while it answers, and connects again after a pause. The task ends when
the worker is no longer registered. An internal error lengthens the pause and never loses the worker.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.member import Member
from cluster.messages import MemberId
from cluster.observe.health import LIVENESS
from router.fleet.membership import ABSENCE_S
from tandem.channel import explained

# Shares of heartbeat_timeout_s. With the default of 5 s and a heartbeat every second, a worker is asked when two
# heartbeats are missing, and is suspect half a second later.
_ASK_SHARE = 0.4
_ANSWER_SHARE = 0.1
_LEAST_ANSWER_S = 0.25  # a machine that is only busy may take as long
_TIMEOUT_S = 1.0
_LOG = logging.getLogger("tandem.router.supervision")
_PAUSE_S = 0.2
_MAX_PAUSE_S = 5.0
Serve = Callable[[Member, grpc.aio.Channel], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """The timeouts after which this router checks, suspects and drops a silent worker. docs/failover.md lists the
    timeouts of each stage.

    `heartbeat_timeout_s`: a stream without any message for this long is broken. `recovery_timeout_s`: a worker whose
    stream broke may reconnect within this time, and a suspect worker may miss health checks for this time. `absence_s`:
    a worker whose registration ended may be registered again within this time.
    """

    heartbeat_timeout_s: float
    recovery_timeout_s: float
    absence_s: float = ABSENCE_S

    @property
    def health_check_after_s(self) -> float:
        """Return the silence, in seconds, after which a worker's health is checked."""
        return self.heartbeat_timeout_s * _ASK_SHARE

    @property
    def health_check_timeout_s(self) -> float:
        """Return the seconds within which a worker must answer a health check, or else it is suspect and gets no new
        work.
        """
        return max(self.heartbeat_timeout_s * _ANSWER_SHARE, _LEAST_ANSWER_S)

    @property
    def suspicion_after_s(self) -> float:
        """Return the silence, in seconds, after which a worker is suspect: it has missed a health check."""
        return self.health_check_after_s + self.health_check_timeout_s

    @property
    def call_timeout_s(self) -> float:
        """Return the timeout in seconds of calls in which the worker computes nothing."""
        return self.heartbeat_timeout_s + self.recovery_timeout_s


@dataclass(frozen=True, slots=True)
class HealthCheck:
    problem: str  # empty: the worker answered, and is alive
    timed_out: bool = False  # nothing came back, not even a broken connection


async def check_health(channel: grpc.aio.Channel, timeout_s: float = _TIMEOUT_S) -> HealthCheck:
    """Ask the worker's gRPC server whether the worker is alive. Its registration states whether it accepts new work."""
    check = health_pb2_grpc.HealthStub(channel).Check
    try:
        answer = await check(health_pb2.HealthCheckRequest(service=LIVENESS), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return HealthCheck("")  # of a version without this service, which answers nevertheless
        problem = explained(error.details() or error.code().name)
        return HealthCheck(problem, timed_out=error.code() is grpc.StatusCode.DEADLINE_EXCEEDED)
    is_alive = answer.status == health_pb2.HealthCheckResponse.SERVING
    return HealthCheck("" if is_alive else "it reports that it is unhealthy")


async def refuses_connections(address: str) -> bool:
    """Return whether the host refuses connections to this port: the process that owned it has ended. A timeout proves
    nothing."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False


class Supervisors:
    """The supervising tasks, one per worker. Iterates over the workers that have one."""

    def __init__(
        self,
        *,
        connect: Callable[[str], grpc.aio.Channel],
        is_wanted: Callable[[MemberId], bool],
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._connect = connect
        self._is_wanted = is_wanted
        self._pause_s = pause_s
        self._tasks: dict[MemberId, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[MemberId]:
        return iter(self._tasks)

    def __contains__(self, member: MemberId) -> bool:
        return member in self._tasks

    def supervise(self, member: Member, serve: Serve) -> None:
        """Supervise a worker. `serve` returns when the worker is lost, and logs why."""
        task = self._tasks[member.id] = asyncio.create_task(
            self._serve_while_wanted(member, serve), name=f"supervise {member.id}"
        )
        task.add_done_callback(lambda ended: self._on_ended(member, serve, ended))

    def cancel(self, member: MemberId) -> None:
        self._tasks[member].cancel()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _on_ended(self, member: Member, serve: Serve, task: asyncio.Task[None]) -> None:
        """Supervise the worker again if it registered just as its task ended: no other event would report it."""
        del self._tasks[member.id]
        if not task.cancelled() and self._is_wanted(member.id):
            self.supervise(member, serve)

    async def _serve_while_wanted(self, member: Member, serve: Serve) -> None:
        logged, num_failures, has_served = "", 0, False
        while self._is_wanted(member.id):
            try:
                reason = await self._serve_once(member, serve)
                if reason and reason != logged:
                    level = logging.INFO if has_served else logging.WARNING  # `serve` has logged that it is lost
                    fields = {"worker": str(member.id), "reason": reason}
                    _LOG.log(level, "the worker does not answer", extra=fields)
                has_served, logged, num_failures = has_served or not reason, reason, 0
            except Exception:  # noqa: BLE001 -- whatever it was, the cluster keeps its worker
                num_failures += 1
                _LOG.exception(
                    "the supervision of a worker failed", extra={"worker": str(member.id), "failures": num_failures}
                )
            await asyncio.sleep(min(self._pause_s * 2.0 ** min(num_failures, 30), _MAX_PAUSE_S))

    async def _serve_once(self, member: Member, serve: Serve) -> str:
        """Connect and serve the worker once. Returns why it does not answer, empty if it did."""
        channel = self._connect(member.address)
        try:
            reason = (await check_health(channel)).problem
            if not reason:
                await serve(member, channel)
            return reason
        finally:
            await channel.close()
