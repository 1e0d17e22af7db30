"""Operators' drains: any member is asked to finish its work and leave, through whichever router they reached.

Owns no member: a worker and another router are asked by a call, this router by its own stop. Who waits hears what
became of the work from the member itself; one that ends without a word is lost.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from cluster.errors import NotFound
from cluster.member import Member, MemberState
from cluster.messages import MemberId, Role
from cluster.protocol.received import checked
from cluster.serving.rpc_errors import error_from_rpc
from router.fleet.fleet import Fleet
from tandem.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc

_LOG = logging.getLogger("tandem.router.drains")
_ASK_S = 5.0  # to hear that it was asked
_LEAVE_S = 10.0  # from the end of its work until it is registered no more
_LOST = "lost"


@dataclass(frozen=True, slots=True)
class Operator:
    """Whoever asks: until when, and what another router wants to see of them, such as its API key."""

    timeout_s: float | None
    metadata: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Drained:
    member: MemberId
    outcome: str = ""  # drained, incomplete or lost; empty: nobody waited


class Drains:
    def __init__(
        self,
        *,
        router: MemberId,
        fleet: Fleet,
        connect: Callable[[str], grpc.aio.Channel],
        stop: asyncio.Event,
        drained: asyncio.Future[str],
    ) -> None:
        """`stop` ends this router after its drain; `drained` is what became of that."""
        self._router = router
        self._fleet = fleet
        self._connect = connect
        self._stop = stop
        self._drained = drained

    async def drain(self, name: str, operator: Operator, *, wait: bool) -> Drained:
        """`name`: an id, or "id@incarnation". With `wait`: until the member has left. Raises NotFound, and what keeps a
        member from being asked."""
        member = self._member(name)
        _LOG.info("an operator drains a member", extra={"drained": str(member.id), "wait": wait})
        if member.id == self._router:
            self._stop.set()
            return Drained(member.id, await asyncio.shield(self._drained) if wait else "")
        outcome = await self._ask(member, operator, wait=wait)
        if wait:
            await self._until_gone(member.id)
        return Drained(member.id, outcome)

    def _member(self, name: str) -> Member:
        members = self._fleet.members()
        found = next((member for member in members if name in (member.id.id, str(member.id))), None)
        if found is None:
            known = ", ".join(sorted(member.id.id for member in members)) or "none"
            raise NotFound(f"no member {name!r} is in this cluster; there are: {known}")
        return found

    async def _ask(self, member: Member, operator: Operator, *, wait: bool) -> str:
        async with self._connect(member.address) as channel:
            try:
                if member.role is Role.ROUTER:
                    return await _ask_router(channel, member.id, operator, wait=wait)
                return await _ask_worker(channel, operator, wait=wait)
            except grpc.aio.AioRpcError as error:
                if wait and error.code() is grpc.StatusCode.UNAVAILABLE and not self._is_ready(member.id):
                    return _LOST
                raise error_from_rpc(error) from error

    def _is_ready(self, member_id: MemberId) -> bool:
        return any(member.id == member_id and member.state is MemberState.READY for member in self._fleet.members())

    async def _until_gone(self, member_id: MemberId) -> None:
        """Its lease lapses where it could not end it; whoever waits need not wait for that."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                while any(member.id == member_id for member in self._fleet.members()):
                    await self._fleet.changed()
        except TimeoutError:
            _LOG.info("a drained member is still registered", extra={"drained": str(member_id)})


async def _ask_worker(channel: grpc.aio.Channel, operator: Operator, *, wait: bool) -> str:
    request = worker_pb2.DrainWorkerRequest(wait=wait)
    timeout_s = operator.timeout_s if wait else _ASK_S
    answer = await worker_pb2_grpc.WorkerStub(channel).DrainWorker(request, timeout=timeout_s)
    return str(checked(answer).outcome)


async def _ask_router(channel: grpc.aio.Channel, member_id: MemberId, operator: Operator, *, wait: bool) -> str:
    request = admin_pb2.DrainRequest(member_id=str(member_id), wait=wait)
    timeout_s = operator.timeout_s if wait else _ASK_S
    answer = await admin_pb2_grpc.AdminStub(channel).Drain(request, timeout=timeout_s, metadata=operator.metadata)
    return str(answer.outcome)
