"""One task per worker: it connects, has the worker served as long as it answers, and begins again after a pause.

Owns the tasks and their channels. A task ends when nobody wants its worker any more; an error of our own costs a pause
that grows, never the worker.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator

import grpc

from cluster.member import Member
from cluster.messages import MemberId
from router.fleet.direct_check import silence

_LOG = logging.getLogger("tandem.router.supervision")
_PAUSE_S = 0.2
_MAX_PAUSE_S = 5.0

Serve = Callable[[Member, grpc.aio.Channel], Awaitable[str]]


class Supervisors:
    """Iterates over the workers that have one."""

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
        """`serve` returns why the worker was lost."""
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
        """It may have come back just as its task ended: no news of it would follow."""
        del self._tasks[member.id]
        if not task.cancelled() and self._is_wanted(member.id):
            self.supervise(member, serve)

    async def _serve_while_wanted(self, member: Member, serve: Serve) -> None:
        told, num_failures = "", 0
        while self._is_wanted(member.id):
            try:
                told = await self._serve_once(member, serve, told)
                num_failures = 0
            except Exception:  # noqa: BLE001 -- whatever it was, the cluster keeps its worker
                num_failures += 1
                _LOG.exception("supervision failed", extra={"worker": str(member.id), "failures": num_failures})
            await asyncio.sleep(min(self._pause_s * 2.0 ** min(num_failures, 30), _MAX_PAUSE_S))

    async def _serve_once(self, member: Member, serve: Serve, told: str) -> str:
        """Why it does not answer, which is told once; empty if it did."""
        channel = self._connect(member.address)
        try:
            reason = await silence(channel)
            if reason and reason != told:
                _LOG.warning("worker does not answer", extra={"worker": str(member.id), "reason": reason})
            if not reason:
                detail = await serve(member, channel)
                _LOG.warning("worker lost", extra={"worker": str(member.id), "detail": detail})
            return reason
        finally:
            await channel.close()
