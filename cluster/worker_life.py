"""A worker's life as a member of its cluster: bound, registered, ready, draining, gone. The same for both pools.

Owns its place in the cluster (name, key, address, registration, server) and the order of these steps. What it serves
and what draining means is the worker's own.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from cluster.config import WorkerConfig, echo
from cluster.errors import InternalError
from cluster.health import HealthPort
from cluster.identity import advertised_host, cluster_key, new_member_id
from cluster.logs import configure_logs
from cluster.member import Capacity, Member, MemberState
from cluster.messages import LayoutFingerprint, Role
from cluster.registration import Registration
from cluster.registry import Registry
from cluster.serving import GrpcServer, join_address, open_channel
from cluster.telemetry import Telemetry
from cluster.tls import load_tls
from cluster.watchdog import StuckLimits

_LOG = logging.getLogger("tandem.worker")
_STOP_GRACE_S = 1.0


class WorkerLife:
    """Made first: what is wrong with flags, port, key or Redis shows before seconds go into loading a model."""

    def __init__(self, config: WorkerConfig, *, role: Role, service_names: Sequence[str], stop: asyncio.Event) -> None:
        """Raises ConfigError."""
        configure_logs(config.log_level, config.log_format)
        self.config = config
        self.role = role
        self.member = new_member_id(config, role)
        self.key = cluster_key(config)
        self.telemetry = Telemetry()
        self.host = advertised_host(config)
        self.tls = load_tls(config, self.host)
        self.connect = partial(open_channel, tls=self.tls)  # to other members, by address
        self.server = GrpcServer(
            service_names=service_names,
            telemetry=self.telemetry,
            credentials=self.tls.member_credentials() if self.tls is not None else None,
        )
        self.address = join_address(self.host, self.server.bind(config.host, config.port))
        loop_limits = StuckLimits(config.loop_timeout_s, config.stuck_exit_s)
        self._health = HealthPort(self.server.status, host=config.host, port=config.health_port, limits=loop_limits)
        self._registry = Registry(url=config.redis, cluster_name=config.cluster_name, lease_s=config.member_lease_s)
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._fatal: asyncio.Future[None] = self._loop.create_future()
        _LOG.info("starting", extra={"member": str(self.member), "settings": echo(config)})

    async def check_registry(self) -> None:
        """Raises RegistryUnavailable."""
        await self._registry.ping()

    def fatal(self, error: Exception) -> None:
        """The worker cannot go on. Any thread may say so."""
        self._loop.call_soon_threadsafe(self._set_fatal, error)

    def request_drain(self) -> None:
        self._stop.set()

    async def live(
        self,
        *,
        fingerprint: LayoutFingerprint,
        capacity: Capacity,
        transports: Sequence[str],
        announce: Callable[..., None],
        drain: Callable[[], Awaitable[None]],
        watch: Callable[[Registration], Coroutine[Any, Any, None]],
    ) -> None:
        """Returns after a drain; raises Fenced when somebody newer has this name, InternalError when the worker broke,
        ConfigError when it does not fit into the cluster."""
        registration = Registration(self._registry, self._as_member(fingerprint, capacity, transports))
        await self.server.start()
        self._health.start()
        await registration.join()
        keep = asyncio.create_task(registration.keep(), name="keep registration")
        watching = asyncio.create_task(watch(registration), name="watch over health")
        stopped = asyncio.create_task(self._stop.wait(), name="wait for stop")
        try:
            await registration.set_state(MemberState.READY)
            await self.server.set_ready(True)
            announce(grpc=self.address, health=join_address(self.host, self._health.port), member=self.member)
            ends: tuple[asyncio.Future[Any], ...] = (keep, watching, stopped, self._fatal)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in (keep, watching, self._fatal):
                if end.done():
                    end.result()  # raises
            await self._drain(registration, drain)
        finally:
            stopped.cancel()
            keep.cancel()
            watching.cancel()
            await registration.leave()
            await self._registry.close()

    async def end(self) -> None:
        """Ends the server; the calls that are left have a moment."""
        self._health.stop()
        await self.server.stop(_STOP_GRACE_S)

    async def _drain(self, registration: Registration, drain: Callable[[], Awaitable[None]]) -> None:
        await self.server.set_ready(False)
        await registration.set_state(MemberState.DRAINING)
        _LOG.info("draining")
        try:
            async with asyncio.timeout(self.config.drain_grace_s):
                await drain()
        except TimeoutError:
            _LOG.warning("drain ended with work left", extra={"grace_s": self.config.drain_grace_s})

    def _as_member(self, fingerprint: LayoutFingerprint, capacity: Capacity, transports: Sequence[str]) -> Member:
        return Member(
            id=self.member,
            role=self.role,
            address=self.address,
            model=self.config.model_name,
            fingerprint=fingerprint,
            transports=tuple(transports),
            capacity=capacity,
        )

    def _set_fatal(self, error: Exception) -> None:
        if not self._fatal.done():
            _LOG.error("the worker cannot go on", exc_info=error)
            self._fatal.set_exception(InternalError(f"the worker cannot go on: {error}"))
