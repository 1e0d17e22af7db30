"""Where the router's objects meet: registry, tokenization, fleet, pipeline, and the two servers. What they then do:
router/life.py."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI

from cluster.clock import MonotonicClock
from cluster.identity import advertised_host, cluster_key, new_member_id
from cluster.member import Member
from cluster.messages import Role
from cluster.observe.health import HealthPort
from cluster.observe.logs import configure_logs
from cluster.observe.telemetry import Telemetry
from cluster.observe.watchdog import StuckLimits
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import ScaleTargets
from cluster.serving.serving import MAX_MESSAGE_BYTES, GrpcServer, join_address, open_channel
from cluster.serving.tls import ClusterTls, load_tls
from cluster.settings.config import RouterConfig, echo
from cluster.settings.lengths import LengthLimits
from router.drain.drains import Drains
from router.drain.evacuation import Evacuation
from router.drain.scaling import Scaling
from router.fleet.fleet import Fleet
from router.fleet.patience import Patience
from router.fleet.prefix_beliefs import PrefixBeliefs
from router.fleet.prefix_following import PrefixFollowing
from router.fleet.told_routers import told_routers
from router.grpc_api.client_stalls import ClientStalls
from router.grpc_api.service import AdminService, ApiKeyInterceptor, InferenceService
from router.http.openai_api import build_app
from router.http.server import HttpServer
from router.life import Ports, RouterLife, RouterParts, max_calls
from router.pipeline.migration import Migrations
from router.pipeline.pipeline import Pipeline, PipelineSettings
from router.policies.admission import Admission
from router.policies.breakers import BreakerPolicy
from router.policies.placement import policy
from router.policies.prefix_index import PrefixIndex
from router.policies.prefix_memory import PrefixMemory
from router.request.message_sizes import MessageLimits
from router.request.outbox import Outboxes
from router.text.tokenization import Tokenization
from tandem.v1 import admin_pb2_grpc, inference_pb2_grpc

_LOG = logging.getLogger("tandem.router")
_SERVICES = ("tandem.v1.Inference", "tandem.v1.Admin")


async def run(config: RouterConfig, *, stop: asyncio.Event, announce: Callable[..., None]) -> None:
    """Serves until `stop` is set, then drains. Raises ConfigError, RegistryUnavailable, Fenced, DrainIncomplete."""
    configure_logs(config.log_level, config.log_format)
    parts = _Router(config, stop).parts()
    _LOG.info("starting", extra={"member": str(parts.member.id), "settings": echo(config)})
    await parts.registry.ping()
    await RouterLife(parts).serve(announce)


class _Router:
    """The parts that know each other; built whole, before anything starts."""

    def __init__(self, config: RouterConfig, stop: asyncio.Event) -> None:
        self._config = config
        self._stop = stop
        self._drained: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        host = advertised_host(config)
        tls = load_tls(config, host)
        self._connect = partial(open_channel, tls=tls)  # to other members, by address
        self._telemetry = Telemetry()
        self._outboxes = Outboxes(max_tokens=config.max_buffered_tokens, clock=MonotonicClock())
        self._registry = Registry(url=config.redis, cluster_name=config.cluster_name, lease_s=config.member_lease_s)
        self._tokenization = _tokenization(config)
        self._ports = _ports(config, host, self._telemetry, tls)
        self._member = self._as_member()
        self._prefix_memory, self._prefix_index = PrefixMemory(), PrefixIndex()
        self._fleet = self._make_fleet()
        self._policy = policy(config.placement)
        self._migrations = Migrations(
            router=self._member.id, fleet=self._fleet, policy=self._policy, telemetry=self._telemetry
        )
        self._evacuation = Evacuation(fleet=self._fleet, migrations=self._migrations)
        self._pipeline = self._make_pipeline()
        self._app = self._http_app()
        self._scaling = Scaling(ScaleTargets(self._registry))
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference_service(), self._ports.grpc.grpc)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin_service(), self._ports.grpc.grpc)

    def parts(self) -> RouterParts:
        return RouterParts(
            config=self._config,
            stop=self._stop,
            drained=self._drained,
            member=self._member,
            registry=self._registry,
            telemetry=self._telemetry,
            ports=self._ports,
            app=self._app,
            pipeline=self._pipeline,
            fleet=self._fleet,
            evacuation=self._evacuation,
            scaling=self._scaling,
            outboxes=self._outboxes,
            prefix_index=self._prefix_index,
        )

    def _as_member(self) -> Member:
        """Binds the port of gRPC."""
        config = self._config
        return Member(
            id=new_member_id(config, Role.ROUTER),
            role=Role.ROUTER,
            address=join_address(self._ports.host, self._ports.grpc.bind(config.host, config.grpc_port)),
            http_address=join_address(self._ports.host, self._ports.http.port),
            model=config.model_name,
        )

    def _make_fleet(self) -> Fleet:
        config = self._config
        return Fleet(
            router=self._member,
            membership=self._registry,
            connect=self._connect,
            patience=Patience(silence_s=config.member_lease_s, grace_s=config.stream_grace_s),
            telemetry=self._telemetry,
            follow_prefixes=PrefixFollowing(self._prefix_index, self._prefix_memory).follow,
        )

    def _make_pipeline(self) -> Pipeline:
        config, key = self._config, cluster_key(self._config)
        return Pipeline(
            router=self._member.id,
            tokenization=self._tokenization,
            admission=Admission(config.max_live_requests),
            policy=self._policy,
            fleet=self._fleet,
            migrations=self._migrations,
            prefixes=PrefixBeliefs(self._fleet, self._prefix_memory, self._prefix_index, key),
            outboxes=self._outboxes,
            key=key,
            settings=PipelineSettings(
                request_timeout_s=config.request_timeout_s,
                max_attempts=config.max_attempts,
                breakers=BreakerPolicy(failures=config.breaker_failures, max_pause_s=config.breaker_max_pause_s),
                messages=MessageLimits(config.max_message_bytes, MAX_MESSAGE_BYTES),
            ),
            clock=MonotonicClock(),
            telemetry=self._telemetry,
        )

    def _http_app(self) -> FastAPI:
        return build_app(
            pipeline=self._pipeline,
            outboxes=self._outboxes,
            tokenization=self._tokenization,
            telemetry=self._telemetry,
            ready=lambda: self._pipeline.is_ready,
            api_key=self._config.api_key,
            max_message_bytes=self._config.max_message_bytes,
            client_stall_s=self._config.client_stall_s,
        )

    def _inference_service(self) -> InferenceService:
        return InferenceService(
            pipeline=self._pipeline,
            tokenization=self._tokenization,
            stalls=ClientStalls(self._config.client_stall_s, self._telemetry),
            told_routers=lambda: told_routers(self._member, self._fleet.members()),
            asks_for_keys=bool(self._config.api_key),
        )

    def _admin_service(self) -> AdminService:
        drains = Drains(
            router=self._member.id, fleet=self._fleet, connect=self._connect, stop=self._stop, drained=self._drained
        )
        return AdminService(
            pipeline=self._pipeline,
            fleet=self._fleet,
            migrations=self._migrations,
            drains=drains,
            scaling=self._scaling,
        )


def _tokenization(config: RouterConfig) -> Tokenization:
    tokenization = Tokenization.load(
        config.model,
        served_model_name=config.served_model_name,
        max_model_len=config.max_model_len,
        lengths=LengthLimits(config.max_input_length, config.max_output_length),
    )
    for note in tokenization.model_info.notes:
        _LOG.warning(note)
    return tokenization


def _ports(config: RouterConfig, host: str, telemetry: Telemetry, tls: ClusterTls | None) -> Ports:
    http = HttpServer(host=config.host, port=config.port, tls=tls)
    grpc = GrpcServer(
        service_names=_SERVICES,
        telemetry=telemetry,
        max_message_bytes=config.max_message_bytes,
        interceptors=[ApiKeyInterceptor(config.api_key)] if config.api_key else [],
        credentials=tls.public_credentials() if tls is not None else None,
        max_calls=max_calls(config),  # far more than are live: each is told why
    )
    limits = StuckLimits(config.loop_timeout_s, config.stuck_exit_s)  # of the event loop
    health = HealthPort(grpc.status, host=config.host, port=config.health_port, limits=limits)
    return Ports(http, grpc, health, host)
