"""A router's life as a member of its cluster: served, registered, ready, draining, gone.

Owns the order of these steps, and the tasks that run beside the requests. What a request meets is the pipeline's.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI

from cluster.errors import DrainIncomplete
from cluster.member import DrainOutcome, Member, MemberState
from cluster.observe.health import HealthPort
from cluster.observe.telemetry import Telemetry
from cluster.registry.registration import Registration
from cluster.registry.registry import Registry
from cluster.serving.serving import GrpcServer, join_address
from cluster.settings.config import RouterConfig
from router.drain.evacuation import Evacuation
from router.drain.scaling import Scaling
from router.fleet.fleet import Fleet
from router.http.server import HttpServer
from router.pipeline.pipeline import Pipeline
from router.policies.prefix_index import PrefixIndex
from router.request.outbox import Outboxes
from router.running import running

_LOG = logging.getLogger("tandem.router")
_STOP_GRACE_S = 1.0
_SETTLE_S = 3.0
_FIGURES_S = 1.0
_SPARE_CALLS = 4096  # probes, operators, idle connections, and those that are being refused


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a router is reached; bound before anything is served."""

    http: HttpServer
    grpc: GrpcServer
    health: HealthPort
    host: str  # under which others reach them


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """What lives: built whole by router/app.py."""

    config: RouterConfig
    stop: asyncio.Event
    drained: asyncio.Future[str]  # what became of the drain, for those who asked for it
    member: Member
    registry: Registry
    telemetry: Telemetry
    ports: Ports
    app: FastAPI
    pipeline: Pipeline
    fleet: Fleet
    evacuation: Evacuation
    scaling: Scaling
    outboxes: Outboxes
    prefix_index: PrefixIndex


def max_calls(config: RouterConfig) -> int:
    """Of gRPC at once, and HTTP connections: far more than are live, as each that is refused is told why."""
    return 2 * config.max_live_requests + _SPARE_CALLS


class RouterLife:
    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._ports = parts.ports
        self._fleet = parts.fleet
        self._pipeline = parts.pipeline

    async def serve(self, announce: Callable[..., None]) -> None:
        """Returns after a drain; raises DrainIncomplete when that was too short, Fenced when somebody newer has its
        name."""
        registration = Registration(self._parts.registry, self._parts.member)
        try:
            await self._ports.grpc.start()
            self._ports.health.start()
            await registration.join_unless(self._parts.stop)
            num_left = await self._live(registration, announce)
            if num_left:
                raise DrainIncomplete(
                    f"{num_left} request(s) were left after {self._config.drain_grace_s:g} s; clients that know another"
                    " router resume them there; give it more --drain-grace-s"
                )
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            self._ports.health.stop()
            await self._ports.grpc.stop(_STOP_GRACE_S)
            await registration.leave()
            await self._parts.registry.close()

    async def _live(self, registration: Registration, announce: Callable[..., None]) -> int:
        """Until it was asked to stop and has drained. Answers how many requests were left."""
        http_stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._fleet.run(), name="fleet"),
                tasks.create_task(self._parts.evacuation.run(), name="evacuation"),
                tasks.create_task(self._parts.scaling.run(), name="scale target"),
                tasks.create_task(registration.keep(), name="keep registration"),
                tasks.create_task(self._follow_readiness(), name="readiness"),
                tasks.create_task(self._publish_figures(), name="figures"),
            ]
            tasks.create_task(self._serve_http(http_stop), name="HTTP")
            await self._until_stopped(registration, announce)
            telling = registration.set_state(MemberState.DRAINING)  # the registry may not answer
            background.append(tasks.create_task(telling, name="tell the registry"))
            num_left = await self._drain()
            http_stop.set()
            for task in background:
                task.cancel()
        return num_left

    async def _serve_http(self, stop: asyncio.Event) -> None:
        await self._ports.http.serve(
            self._parts.app,
            max_connections=max_calls(self._config),
            telemetry=self._parts.telemetry,
            stop=stop,
            grace_s=_STOP_GRACE_S,
        )

    async def _until_stopped(self, registration: Registration, announce: Callable[..., None]) -> None:
        """Ready once the fleet has settled."""
        async with running(self._parts.stop.wait()) as stopped:
            async with running(self._fleet.settle(_SETTLE_S)) as settled:
                await asyncio.wait((stopped, settled), return_when=asyncio.FIRST_COMPLETED)
            if not self._parts.stop.is_set():
                await registration.set_state(MemberState.READY)
                announce(
                    http=self._parts.member.http_address,
                    grpc=self._parts.member.address,
                    health=join_address(self._ports.host, self._ports.health.port),
                    member=self._parts.member.id,
                )
            await stopped

    async def _drain(self) -> int:
        """No new request; those that are live may end. Answers how many were left, which are told to go elsewhere."""
        self._pipeline.refuse_new()
        await self._ports.grpc.set_ready(False)
        _LOG.info("draining", extra={"live_requests": self._pipeline.num_live})
        try:
            async with asyncio.timeout(self._config.drain_grace_s):
                await self._pipeline.drain()
        except TimeoutError:
            num_left = self._pipeline.num_live
            _LOG.warning("drain ended with requests left", extra={"live_requests": num_left})
            self._parts.drained.set_result(DrainOutcome.INCOMPLETE)
            self._pipeline.end_all()
            return num_left
        self._parts.drained.set_result(DrainOutcome.DRAINED)
        return 0

    async def _follow_readiness(self) -> None:
        """The health service says what /ready says."""
        while True:
            await self._ports.grpc.set_ready(self._pipeline.is_ready)
            await self._fleet.changed()

    async def _publish_figures(self) -> None:
        """What changes too often, or by itself, to be told at every change."""
        while True:
            self._parts.telemetry.gauge("tandem_buffered_tokens", self._parts.outboxes.num_tokens)
            self._parts.telemetry.gauge("tandem_prefix_index_blocks", len(self._parts.prefix_index))
            self._parts.telemetry.gauge("tandem_registry_age_seconds", self._parts.registry.age_s)
            await asyncio.sleep(_FIGURES_S)
