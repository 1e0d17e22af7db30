"""Performs operators' commands: drain a member, change a worker's role, or the number of workers of each role.

A worker or another router is drained by a call to it, this router by its own stop event. The drained member reports the
outcome of its drain; a member that ends without a report is lost. The process that runs the workers follows the scale
target by itself.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import grpc

from cluster.errors import InvalidRequest, NotFound, RegistryUnavailable
from cluster.member import Member, MemberState
from cluster.messages import MemberId, Role
from cluster.protocol.received import checked
from cluster.registry.scale_registry import ScaleTargets
from cluster.registry.scale_target import ScaleTarget
from cluster.serving.rpc_errors import error_from_rpc
from router.fleet.fleet import Fleet
from router.policies.candidates import WorkerLoad
from tandem.enum_words import DRAIN_OUTCOMES, MEMBER_ROLES
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tandem.v1 import admin_pb2, admin_pb2_grpc

_LOG = logging.getLogger("tandem.router.drains")
_ASK_S = 5.0  # for the acknowledgement of a call that does not wait
_EXPORT_S = 60.0  # for a profiler to start, and to write its trace
_LEAVE_S = 10.0  # from the end of its work until its registration has ended
_LOST = "lost"


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """The call of an operator: its timeout, and the metadata (such as the API key) to forward to another router."""

    timeout_s: float | None
    metadata: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class DrainResult:
    member: MemberId
    outcome: str = ""  # drained, incomplete or lost; empty: the caller did not wait


@dataclass(frozen=True, slots=True)
class RoleChange:
    member: MemberId
    former: Role


class MemberCommands:
    def __init__(
        self,
        *,
        router: MemberId,
        fleet: Fleet,
        connect: Callable[[str], grpc.aio.Channel],
        stop: asyncio.Event,
        drained: asyncio.Future[str],
    ) -> None:
        """`stop` drains and ends this router; `drained` gets the outcome of that drain."""
        self._router = router
        self._fleet = fleet
        self._connect = connect
        self._stop = stop
        self._drained = drained
        self._changing_role = asyncio.Lock()

    async def drain(self, name: str, operator: OperatorCall, *, wait: bool) -> DrainResult:
        """Drain a member, named by its id or "id@incarnation". With `wait`, return after the member has left.

        Raises NotFound, and the error of a call that does not reach the member.
        """
        member = self._member(name)
        _LOG.info("an operator drains a member", extra={"drained": str(member.id), "wait": wait})
        self._warn_of_empty_pool(member)
        if member.id == self._router:
            self._stop.set()
            return DrainResult(member.id, await asyncio.shield(self._drained) if wait else "")
        outcome = await self._ask(member, operator, wait=wait)
        if wait:
            await self._until_gone(member.id)
        return DrainResult(member.id, outcome)

    def _warn_of_empty_pool(self, member: Member) -> None:
        """Log that a pool will be empty. Unlike the change of a role, a drain of its last worker is not refused: it is
        how such a pool is restarted and upgraded, and the process that runs the worker replaces it."""
        role, fields = member.role, {"drained": str(member.id)}
        if role.decodes and _is_last(member, self._fleet.decode_loads()):
            _LOG.warning("no other worker decodes: requests wait until one does, or for their deadlines", extra=fields)
        elif role.prefills and _is_last(member, self._fleet.prefill_loads()):
            _LOG.warning("no other prefill worker is there: workers that decode compute the prompts", extra=fields)

    async def set_role(self, name: str, role: Role) -> RoleChange:
        """Change the role of a worker, named as by `drain`. The worker registers it, and moves the scale target in the
        same step, so a router that ends in between leaves nothing half done. Returns when this router knows the new
        role. Raises NotFound, InvalidRequest, and the error of a call that does not reach the worker."""
        member = self._member(name)
        if not member.role.is_worker:
            raise InvalidRequest(f"{member.id.id} is a router; only workers have a role that can be changed")
        async with self._changing_role:  # the second of two changes looks at the fleet after the first one
            return await self._change_role(member, role)

    async def _change_role(self, member: Member, role: Role) -> RoleChange:
        # The registry refuses the last worker too, also if two routers ask at once; but there, unlike here, a worker
        # that has died counts until its registration has missed a renewal.
        if not role.decodes and _is_last(member, self._fleet.decode_loads()):
            raise InvalidRequest(
                f"{member.id.id} is the last worker that decodes; give another worker the role decode or both first"
            )
        async with self._connect(member.address) as channel:
            request = worker_pb2.SetRoleRequest(role=MEMBER_ROLES.number(role))
            try:
                answer = checked(await worker_pb2_grpc.WorkerStub(channel).SetRole(request, timeout=_ASK_S))
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from error
        former = Role(MEMBER_ROLES.word(answer.former_role))
        _LOG.info("an operator changes a role", extra={"worker": str(member.id), "former_role": former, "role": role})
        if not await self._until_none(lambda known: known.id == member.id and known.role is not role, _ASK_S):
            _LOG.info("a new role is not registered yet", extra={"worker": str(member.id), "role": role})
        return RoleChange(member.id, former)

    async def profile(self, name: str, num_steps: int, timeout_s: float) -> tuple[MemberId, int, bytes]:
        """Profile steps of a worker, named as by `drain`. Returns the worker, the number of steps and the trace. Raises
        NotFound, InvalidRequest, and the error of a call that does not reach the worker."""
        member = self._member(name)
        if not member.role.is_worker:
            raise InvalidRequest(f"{member.id.id} is a router; only workers have steps that can be profiled")
        _LOG.info("an operator profiles a worker", extra={"worker": str(member.id), "num_steps": num_steps})
        request = worker_pb2.ProfileStepsRequest(num_steps=num_steps, timeout_s=timeout_s)
        async with self._connect(member.address) as channel:
            asking = worker_pb2_grpc.WorkerStub(channel).ProfileSteps(request, timeout=timeout_s + _EXPORT_S)
            try:
                answer = checked(await asking)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from error
        return member.id, answer.num_steps, answer.trace

    def _member(self, name: str) -> Member:
        members = self._fleet.members()
        found = next((member for member in members if name in (member.id.id, str(member.id))), None)
        if found is None:
            known = ", ".join(sorted(member.id.id for member in members)) or "none"
            raise NotFound(f"no member {name!r} is in this cluster; there are: {known}")
        return found

    async def _ask(self, member: Member, operator: OperatorCall, *, wait: bool) -> str:
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
        """Wait until the member is not registered any more. A member that was killed stays registered until its TTL
        ends, so this waits for `_LEAVE_S` at most."""
        if not await self._until_none(lambda known: known.id == member_id, _LEAVE_S):
            _LOG.info("a drained member is still registered", extra={"drained": str(member_id)})

    async def _until_none(self, such: Callable[[Member], bool], timeout_s: float) -> bool:
        """Wait until the registry has no such member. Returns False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(map(such, self._fleet.members())):
                    await self._fleet.changed()
        except TimeoutError:
            return False
        return True


def _is_last(member: Member, loads: Sequence[WorkerLoad]) -> bool:
    """Return whether none of these workers is another one."""
    return all(load.member == member.id for load in loads)


async def _ask_worker(channel: grpc.aio.Channel, operator: OperatorCall, *, wait: bool) -> str:
    request = worker_pb2.DrainWorkerRequest(wait=wait)
    timeout_s = operator.timeout_s if wait else _ASK_S
    answer = await worker_pb2_grpc.WorkerStub(channel).DrainWorker(request, timeout=timeout_s)
    return DRAIN_OUTCOMES.word(checked(answer).outcome)


async def _ask_router(channel: grpc.aio.Channel, member_id: MemberId, operator: OperatorCall, *, wait: bool) -> str:
    request = admin_pb2.DrainRequest(member_id=str(member_id), wait=wait)
    timeout_s = operator.timeout_s if wait else _ASK_S
    answer = await admin_pb2_grpc.AdminStub(channel).Drain(request, timeout=timeout_s, metadata=operator.metadata)
    return DRAIN_OUTCOMES.label(answer.outcome)


class ScaleTargetView:
    """The scale target as this router last read it. While the registry is unreachable, the last known target is
    kept."""

    def __init__(self, targets: ScaleTargets, on_change: Callable[[ScaleTarget | None], None]) -> None:
        self._targets = targets
        self._on_change = on_change
        self._changed = asyncio.Event()
        self.target: ScaleTarget | None = None  # as it was known last

    async def run(self) -> None:
        """Follow the target until cancelled."""
        async with aclosing(self._targets.watch()) as targets:
            async for target in targets:
                self._update(target)

    async def set(self, wanted: Mapping[Role, int]) -> ScaleTarget:
        """Change the size of each pool in `wanted`. Raises InvalidRequest, Unavailable, RegistryUnavailable."""
        target = await self._targets.set(wanted)
        self._update(target)
        return target

    async def read(self) -> ScaleTarget | None:
        """Return the target as it is now, or as it was known last while the registry is unreachable."""
        with suppress(RegistryUnavailable):
            self._update(await self._targets.read())
        return self.target

    async def changed(self) -> None:
        await self._changed.wait()

    def _update(self, target: ScaleTarget | None) -> None:
        if target != self.target:
            self.target = target
            self._on_change(target)
            self._changed.set()
            self._changed = asyncio.Event()


def target_to_wire(target: ScaleTarget | None) -> admin_pb2.ScaleTarget | None:
    if target is None:
        return None
    return admin_pb2.ScaleTarget(
        prefill=target.prefill,
        decode=target.decode,
        colocated=target.colocated,
        version=target.version,
        follower=target.follower,
        reached=target.reached,
        problem=target.problem,
        counts_roles=target.counts_roles,
    )
