"""The gRPC service of every worker: inspection of its blocks and figures, link checks, profiles, and the requests to
drain and to change its role.

The step thread runs check() and answers; this module never accesses a block pool.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace

import grpc

from cluster.errors import Unavailable
from cluster.member import DrainOutcome
from cluster.messages import MemberId, Role
from cluster.protocol.received import checked
from engine.scheduling.commands import Inspect, Inspected
from engine.steps.questions import Asked
from engine.steps.step_profile import StepProfile
from tandem.enum_words import DRAIN_OUTCOMES, MEMBER_ROLES
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

_INSPECTION_TIMEOUT_S = 30.0


class Inspections:
    """Requests the blocks and figures of the step thread. `owners` returns the names of the holders of blocks among the
    objects of the event loop (cluster/holders.py); each posts the release of its blocks before its name disappears.
    """

    def __init__(self, steps: Asked, owners: Callable[[], Iterable[str]]) -> None:
        self._steps = steps
        self._owners = owners
        self._ids = itertools.count()

    async def inspect(self, timeout_s: float = _INSPECTION_TIMEOUT_S) -> Inspected:
        """Ask the step thread for an inspection. Raises Unavailable after `timeout_s`, or if the thread has ended."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._steps.ask(Inspect(next(self._ids)))
        except TimeoutError:
            raise Unavailable(f"the step thread did not answer within {timeout_s} s") from None

    async def examine(self) -> Inspected:
        """Inspect, and report blocks that no living owner holds as a violation.

        The answer arrives after every earlier event of the step thread, so an owner that is not alive by then has
        posted its release or never will. The second answer arrives after that release was applied."""
        first = await self.inspect()
        suspects = first.holders.difference(self._owners())
        if not suspects or first.violation:
            return first
        second = await self.inspect()
        orphans = (suspects & second.holders).difference(self._owners())
        if not orphans or second.violation:
            return second
        return replace(second, violation=f"no living owner holds the blocks of {', '.join(sorted(orphans))}")


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """The service of a worker. `more_figures` adds the figures of the event loop: hand-offs, leases, streams.
    `check_link` times the transports from another worker's memory to this worker's. `publish_cache_events` serves one
    subscription.
    """

    def __init__(
        self,
        *,
        member: MemberId,
        inspections: Inspections,
        more_figures: Callable[[], dict[str, float]],
        request_drain: Callable[[], Awaitable[DrainOutcome]],
        set_role: Callable[[Role], Awaitable[Role]],
        check_link: Callable[[worker_pb2.CheckLinkRequest], Awaitable[worker_pb2.CheckLinkResponse]],
        profile: Callable[[int, float], Awaitable[StepProfile]],
        publish_cache_events: Callable[[worker_pb2.SubscribeCacheEventsRequest], AsyncIterator[worker_pb2.CacheEvents]],
    ) -> None:
        self._check_link = check_link
        self._profile = profile
        self._publish_cache_events = publish_cache_events
        self._member = member
        self._inspections = inspections
        self._more_figures = more_figures
        self._request_drain = request_drain
        self._set_role = set_role

    async def Inspect(
        self, request: worker_pb2.InspectRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.InspectResponse:
        inspected = await self._inspections.examine()
        return worker_pb2.InspectResponse(
            member=str(self._member),
            blocks=inspected.blocks,
            figures=inspected.figures | self._more_figures(),
            violation=inspected.violation,
        )

    async def DrainWorker(
        self, request: worker_pb2.DrainWorkerRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.DrainWorkerResponse:
        drained = self._request_drain()
        outcome = await drained if checked(request).wait else ""
        return worker_pb2.DrainWorkerResponse(outcome=DRAIN_OUTCOMES.number(outcome))

    async def SetRole(
        self, request: worker_pb2.SetRoleRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.SetRoleResponse:
        former = await self._set_role(Role(MEMBER_ROLES.word(checked(request).role)))
        return worker_pb2.SetRoleResponse(former_role=MEMBER_ROLES.number(former))

    async def CheckLink(
        self, request: worker_pb2.CheckLinkRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.CheckLinkResponse:
        return await self._check_link(checked(request))

    async def ProfileSteps(
        self, request: worker_pb2.ProfileStepsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.ProfileStepsResponse:
        asked = checked(request)
        profile = await self._profile(asked.num_steps, asked.timeout_s)
        return worker_pb2.ProfileStepsResponse(num_steps=profile.num_steps, trace=profile.trace)

    async def SubscribeCacheEvents(
        self, request: worker_pb2.SubscribeCacheEventsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.CacheEvents]:
        async for message in self._publish_cache_events(checked(request)):
            yield message
