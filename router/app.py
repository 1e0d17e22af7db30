"""Where the router's objects meet: registry, tokenization, fleet, pipeline, and the two servers."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from cluster.clock import MonotonicClock
from cluster.config import RouterConfig, echo
from cluster.errors import DrainIncomplete
from cluster.health import HealthPort
from cluster.identity import advertised_host, cluster_key, new_member_id
from cluster.lengths import LengthLimits
from cluster.logs import configure_logs
from cluster.member import DrainOutcome, Member, MemberState
from cluster.messages import Role
from cluster.registration import Registration
from cluster.registry import Registry
from cluster.scale_registry import ScaleTargets
from cluster.serving import GrpcServer, join_address, open_channel
from cluster.telemetry import Telemetry
from cluster.tls import load_tls
from cluster.watchdog import StuckLimits
from router.admission import Admission
from router.breakers import BreakerPolicy
from router.client_stalls import ClientStalls
from router.drains import Drains
from router.evacuation import Evacuation
from router.fleet import Fleet
from router.http_server import HttpServer
from router.migration import Migrations
from router.openai_api import build_app
from router.outbox import Outboxes
from router.patience import Patience
from router.pipeline import Pipeline, PipelineSettings
from router.placement import policy
from router.prefix_beliefs import PrefixBeliefs
from router.prefix_following import PrefixFollowing
from router.prefix_index import PrefixIndex
from router.prefix_memory import PrefixMemory
from router.running import running
from router.scaling import Scaling
from router.service import AdminService, ApiKeyInterceptor, InferenceService
from router.tokenization import Tokenization
from router.told_routers import told_routers
from tandem.v1 import admin_pb2_grpc, inference_pb2_grpc

_LOG = logging.getLogger("tandem.router")
_SERVICES = ("tandem.v1.Inference", "tandem.v1.Admin")
_STOP_GRACE_S = 1.0
_SETTLE_S = 3.0
_FIGURES_S = 1.0
_SPARE_CALLS = 4096  # and HTTP connections: probes, operators, idle ones, and those that are being refused


async def run(config: RouterConfig, *, stop: asyncio.Event, announce: Callable[..., None]) -> None:
    """Serves until `stop` is set, then drains. Raises ConfigError, RegistryUnavailable, Fenced, DrainIncomplete."""
    configure_logs(config.log_level, config.log_format)
    router = _Router(config, stop)
    _LOG.info("starting", extra={"member": str(router.member.id), "settings": echo(config)})
    await router.registry.ping()
    await router.serve(announce)


class _Router:
    """The parts that know each other; built whole, before anything starts."""

    def __init__(self, config: RouterConfig, stop: asyncio.Event) -> None:
        self._config = config
        self._stop = stop
        self._drained: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        telemetry, clock, host = Telemetry(), MonotonicClock(), advertised_host(config)
        tls = load_tls(config, host)
        self._telemetry = telemetry
        self._outboxes = Outboxes(max_tokens=config.max_buffered_tokens)
        self.registry = Registry(url=config.redis, cluster_name=config.cluster_name, lease_s=config.member_lease_s)
        tokenization = Tokenization.load(
            config.model,
            served_model_name=config.served_model_name,
            max_model_len=config.max_model_len,
            lengths=LengthLimits(config.max_input_length, config.max_output_length),
        )
        for note in tokenization.model_info.notes:
            _LOG.warning(note)
        self._http = HttpServer(host=config.host, port=config.port, tls=tls)
        self._grpc = GrpcServer(
            service_names=_SERVICES,
            telemetry=telemetry,
            max_message_bytes=config.max_message_bytes,
            interceptors=[ApiKeyInterceptor(config.api_key)] if config.api_key else [],
            credentials=tls.public_credentials() if tls is not None else None,
            max_calls=2 * config.max_live_requests + _SPARE_CALLS,  # far more than are live: each is told why
        )
        loop_limits = StuckLimits(config.loop_timeout_s, config.stuck_exit_s)
        self._health = HealthPort(self._grpc.status, host=config.host, port=config.health_port, limits=loop_limits)
        self._health_address = join_address(host, self._health.port)
        self.member = Member(
            id=new_member_id(config, Role.ROUTER),
            role=Role.ROUTER,
            address=join_address(host, self._grpc.bind(config.host, config.grpc_port)),
            http_address=join_address(host, self._http.port),
            model=config.model_name,
        )
        memory, index = PrefixMemory(), PrefixIndex()
        self._prefix_index = index
        self._fleet = Fleet(
            router=self.member,
            membership=self.registry,
            connect=partial(open_channel, tls=tls),
            patience=Patience(silence_s=config.member_lease_s, grace_s=config.stream_grace_s),
            telemetry=telemetry,
            follow_prefixes=PrefixFollowing(index, memory).follow,
        )
        placement = policy(config.placement)
        migrations = Migrations(router=self.member.id, fleet=self._fleet, policy=placement, telemetry=telemetry)
        self._evacuation = Evacuation(fleet=self._fleet, migrations=migrations)
        self._pipeline = Pipeline(
            router=self.member.id,
            tokenization=tokenization,
            admission=Admission(config.max_live_requests),
            policy=placement,
            fleet=self._fleet,
            migrations=migrations,
            prefixes=PrefixBeliefs(self._fleet, memory, index, cluster_key(config)),
            outboxes=self._outboxes,
            key=cluster_key(config),
            settings=PipelineSettings(
                request_timeout_s=config.request_timeout_s,
                max_attempts=config.max_attempts,
                breakers=BreakerPolicy(failures=config.breaker_failures, max_pause_s=config.breaker_max_pause_s),
            ),
            clock=clock,
            telemetry=telemetry,
        )
        self._app = build_app(
            pipeline=self._pipeline,
            tokenization=tokenization,
            telemetry=telemetry,
            ready=lambda: self._pipeline.is_ready,
            api_key=config.api_key,
            max_message_bytes=config.max_message_bytes,
            client_stall_s=config.client_stall_s,
        )
        inference = InferenceService(
            pipeline=self._pipeline,
            tokenization=tokenization,
            stalls=ClientStalls(config.client_stall_s, telemetry),
            told_routers=lambda: told_routers(self.member, self._fleet.members()),
        )
        self._scaling = Scaling(ScaleTargets(self.registry))
        drains = Drains(
            router=self.member.id,
            fleet=self._fleet,
            connect=partial(open_channel, tls=tls),
            stop=stop,
            drained=self._drained,
        )
        admin = AdminService(
            pipeline=self._pipeline, fleet=self._fleet, migrations=migrations, drains=drains, scaling=self._scaling
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, self._grpc.grpc)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, self._grpc.grpc)

    async def serve(self, announce: Callable[..., None]) -> None:
        """Returns after a drain; raises DrainIncomplete when that was too short, Fenced when somebody newer has its
        name."""
        registration = Registration(self.registry, self.member)
        http_stop = asyncio.Event()
        try:
            await self._grpc.start()
            self._health.start()
            await registration.join()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._fleet.run(), name="fleet"),
                    tasks.create_task(self._evacuation.run(), name="evacuation"),
                    tasks.create_task(self._scaling.run(), name="scale target"),
                    tasks.create_task(registration.keep(), name="keep registration"),
                    tasks.create_task(self._follow_readiness(), name="readiness"),
                    tasks.create_task(self._publish_figures(), name="figures"),
                ]
                serving = self._http.serve(
                    self._app,
                    max_connections=2 * self._config.max_live_requests + _SPARE_CALLS,
                    telemetry=self._telemetry,
                    stop=http_stop,
                    grace_s=_STOP_GRACE_S,
                )
                tasks.create_task(serving, name="HTTP")
                async with running(self._stop.wait()) as stopped:
                    async with running(self._fleet.settle(_SETTLE_S)) as settled:
                        await asyncio.wait((stopped, settled), return_when=asyncio.FIRST_COMPLETED)
                    if not self._stop.is_set():
                        await registration.set_state(MemberState.READY)
                        announce(
                            http=self.member.http_address,
                            grpc=self.member.address,
                            health=self._health_address,
                            member=self.member.id,
                        )
                    await stopped
                telling = registration.set_state(MemberState.DRAINING)  # the registry may not answer
                background.append(tasks.create_task(telling, name="tell the registry"))
                num_left = await self._drain()
                http_stop.set()
                for task in background:
                    task.cancel()
            if num_left:
                raise DrainIncomplete(
                    f"{num_left} request(s) were left after {self._config.drain_grace_s:g} s; clients that know another"
                    " router resume them there; give it more --drain-grace-s"
                )
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            self._health.stop()
            await self._grpc.stop(_STOP_GRACE_S)
            await registration.leave()
            await self.registry.close()

    async def _drain(self) -> int:
        """No new request; those that are live may end. Answers how many were left, which are told to go elsewhere."""
        self._pipeline.refuse_new()
        await self._grpc.set_ready(False)
        _LOG.info("draining", extra={"live_requests": self._pipeline.num_live})
        try:
            async with asyncio.timeout(self._config.drain_grace_s):
                await self._pipeline.drain()
        except TimeoutError:
            num_left = self._pipeline.num_live
            _LOG.warning("drain ended with requests left", extra={"live_requests": num_left})
            self._drained.set_result(DrainOutcome.INCOMPLETE)
            self._pipeline.end_all()
            return num_left
        self._drained.set_result(DrainOutcome.DRAINED)
        return 0

    async def _follow_readiness(self) -> None:
        """The health service says what /ready says."""
        while True:
            await self._grpc.set_ready(self._pipeline.is_ready)
            await self._fleet.changed()

    async def _publish_figures(self) -> None:
        """What changes too often, or by itself, to be told at every change."""
        while True:
            self._telemetry.gauge("tandem_buffered_tokens", self._outboxes.num_tokens)
            self._telemetry.gauge("tandem_prefix_index_blocks", len(self._prefix_index))
            self._telemetry.gauge("tandem_registry_age_seconds", self.registry.age_s)
            await asyncio.sleep(_FIGURES_S)
