"""What every worker answers about itself: its blocks and figures, and the request to leave.

Owns the inspections under way. The step thread runs check() and answers; nothing here looks into a pool.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace

import grpc

from cluster.errors import Unavailable
from cluster.member import DrainOutcome
from cluster.messages import Inspect, Inspected, MemberId
from cluster.protocol.received import checked
from tandem.v1 import worker_pb2, worker_pb2_grpc

_INSPECTION_TIMEOUT_S = 30.0


class Inspections:
    """Questions to the step thread, and their answers. `post` reaches it; `on_inspected` brings what it said. `owners`
    names the holders of blocks that live on the event loop (cluster/holders.py); each releases its blocks before its
    name goes."""

    def __init__(self, post: Callable[[Inspect], None], owners: Callable[[], Iterable[str]]) -> None:
        self._post = post
        self._owners = owners
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Inspected]] = {}

    async def inspect(self, timeout_s: float = _INSPECTION_TIMEOUT_S) -> Inspected:
        """Raises Unavailable when the step thread does not answer: it is stuck in a step, or dead."""
        inspection_id = next(self._ids)
        answer: asyncio.Future[Inspected] = asyncio.get_running_loop().create_future()
        self._waiting[inspection_id] = answer
        self._post(Inspect(inspection_id))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the step thread did not answer within {timeout_s} s") from None
        finally:
            del self._waiting[inspection_id]

    async def examine(self) -> Inspected:
        """As `inspect`, and blocks that no living owner holds are a violation.

        The answer comes behind every earlier event of the step thread, so an owner that is not alive by then has posted
        its release, or never will. The second answer comes behind that release."""
        first = await self.inspect()
        suspects = first.holders.difference(self._owners())
        if not suspects or first.violation:
            return first
        second = await self.inspect()
        orphans = (suspects & second.holders).difference(self._owners())
        if not orphans or second.violation:
            return second
        return replace(second, violation=f"no living owner holds the blocks of {', '.join(sorted(orphans))}")

    def on_inspected(self, event: Inspected) -> None:
        answer = self._waiting.get(event.inspection_id)
        if answer is not None and not answer.done():
            answer.set_result(event)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """`more_figures` adds what the event loop knows: hand-offs, leases, streams. `measure_pair` times the ways from
    another worker's memory to this one's; None: this one imports nothing. `follow_prefixes` tells what changes in the
    prefix cache; None: nobody is told."""

    def __init__(
        self,
        *,
        member: MemberId,
        inspections: Inspections,
        more_figures: Callable[[], dict[str, float]],
        request_drain: Callable[[], Awaitable[DrainOutcome]],
        measure_pair: Callable[[worker_pb2.MeasurePairRequest], Awaitable[worker_pb2.MeasurePairResponse]]
        | None = None,
        follow_prefixes: Callable[[worker_pb2.FollowPrefixesRequest], AsyncIterator[worker_pb2.PrefixNews]]
        | None = None,
    ) -> None:
        self._measure_pair = measure_pair
        self._follow_prefixes = follow_prefixes
        self._member = member
        self._inspections = inspections
        self._more_figures = more_figures
        self._request_drain = request_drain

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
        return worker_pb2.DrainWorkerResponse(outcome=await drained if checked(request).wait else "")

    async def MeasurePair(
        self, request: worker_pb2.MeasurePairRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.MeasurePairResponse:
        if self._measure_pair is None:
            raise Unavailable(f"{self._member} imports no KV; ask a decode worker")
        return await self._measure_pair(checked(request))

    async def FollowPrefixes(
        self, request: worker_pb2.FollowPrefixesRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.PrefixNews]:
        if self._follow_prefixes is None:
            raise Unavailable(f"{self._member} tells nobody of its prefixes; ask a prefill worker")
        async for news in self._follow_prefixes(checked(request)):
            yield news
