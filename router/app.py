"""Builds the objects of a router and runs it as a member of the cluster: serve, register, become ready, drain, leave.

Owns the order of these steps and the tasks that run beside the requests. The pipeline owns the requests.
"""

import asyncio
import gc
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI

from cluster.accounts.audit import Audit
from cluster.auth.key_file import cluster_keys
from cluster.auth.member_channel import open_member_channel
from cluster.clock import MonotonicClock
from cluster.errors import DrainIncomplete
from cluster.member import DrainOutcome, Member, MemberState
from cluster.messages import Role
from cluster.observe.logs import configure_logs, set_log_level
from cluster.observe.telemetry import Telemetry
from cluster.process import lasting
from cluster.registry.registration import Registration, advertised_host, check_registry, new_member_id, scraped_host
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import ScaleTargets
from cluster.request_size import LengthLimits
from cluster.serving.frame_channel import FIRST_S
from cluster.serving.serving import MAX_MESSAGE_BYTES, join_address
from cluster.serving.tls import load_tls
from cluster.settings.config import RouterConfig, echo
from cluster.settings.reload import SettingsReload, SettingsSource
from router.accounts import Accounts
from router.fleet.fleet import Fleet
from router.fleet.prefix_locator import CacheEventFollower, PrefixLocator
from router.fleet.supervision import WorkerTimeouts
from router.grammars.checker import grammar_checker
from router.grpc_api.service import AdminService, InferenceService, WriteTimeout
from router.http.openai_api import build_app
from router.http.page_endpoint import add_page
from router.operator_commands import MemberCommands, ScaleTargetView
from router.overview.overview import Overview, Watched, publish_effect
from router.pipeline.migration import Evacuation, Migrations
from router.pipeline.pipeline import Pipeline, PipelineSettings
from router.policies.breakers import BreakerPolicy
from router.policies.candidates import SloTargets
from router.policies.prefix_index import PrefixIndex
from router.policies.slo_aware import policy
from router.ports import bind_ports, max_calls
from router.request.divided_answers import ChatSettings
from router.request.live_requests import LiveRequests
from router.request.traces import open_traces
from router.request.validation import MessageLimits
from router.running import running
from router.text.tokenization import Tokenization
from router.tools.formats import AnswerFormat
from tandem.v1 import admin_pb2_grpc, inference_pb2_grpc

_LOG = logging.getLogger("tandem.router")
_STOP_GRACE_S = 1.0
# A request makes thousands of objects that live as long as it does, and few cycles. With Python's own thresholds the
# collector takes a tenth of the router's time, to traverse what is still in use.
_GC_THRESHOLDS = (20_000, 20, 50)
_SETTLE_S = 3.0
_PUBLISH_PERIOD_S = 1.0
_EFFECT_PERIOD_S = 15.0


async def run(
    config: RouterConfig,
    *,
    stop: asyncio.Event,
    announce: Callable[..., None],
    source: SettingsSource[RouterConfig] | None = None,
) -> None:
    """Serve until `stop` is set, then drain. `source`: of settings and certificates that may change meanwhile. Raises
    ConfigError, RegistryUnavailable, Fenced, DrainIncomplete."""
    configure_logs(config.log_level, config.log_format)
    with lasting():
        router = Router(config, stop, source)
    gc.set_threshold(*_GC_THRESHOLDS)
    await router.serve(announce)


class Router:
    """All objects of a router. They are built before anything starts."""

    def __init__(
        self, config: RouterConfig, stop: asyncio.Event, source: SettingsSource[RouterConfig] | None = None
    ) -> None:
        self._config, self._source = config, source
        self._drain_grace_s = config.drain_grace_s
        self._stop = stop
        self._drained: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._keys = cluster_keys(config)
        host = advertised_host(config)
        tls = self._tls = load_tls(config, host)
        self._telemetry = Telemetry.of_router()
        targets = SloTargets.of_ms(config.slo_ttft_ms, config.slo_tpot_ms)
        self._live_requests = LiveRequests(
            max_live_requests=config.max_live_requests,
            max_buffered_tokens=config.max_buffered_tokens,
            clock=MonotonicClock(),
            telemetry=self._telemetry,
            targets=targets,
            traces=open_traces(config),
        )
        audit = Audit(config.audit_file)
        self._registry = Registry.of_member(config, self._keys, self._telemetry, audit)
        self._accounts = Accounts(config, self._registry, self._keys, self._telemetry, audit)
        answers = AnswerFormat.named(config.tool_call_parser, config.reasoning_parser)
        self._chats = ChatSettings(answers, config.trust_request_chat_template == "on")
        self._tokenization = _tokenization(config, answers.markers)
        self._ports = bind_ports(config, host, self._telemetry, tls, self._accounts)
        self._member = self._as_member()
        self._telemetry.describe(role=Role.ROUTER, member=self._member.id.id, model=config.model_name)
        self._telemetry.gauge("tandem_insecure_ports", float(config.is_insecure))
        self._telemetry.gauge("tandem_slo_seconds", config.slo_ttft_ms / 1000, latency="ttft")
        self._telemetry.gauge("tandem_slo_seconds", config.slo_tpot_ms / 1000, latency="itl")
        wait_s = min(FIRST_S, config.stream_grace_s / 2)  # a stream begins within the grace where frames are dropped
        self._connect = partial(  # to members, by address
            open_member_channel, keys=self._keys, caller=str(self._member.id), tls=tls, frames_wait_s=wait_s
        )
        self._prefix_index = PrefixIndex()
        self._fleet = self._make_fleet()
        self._policy = policy(config.placement, targets, draw=random.random, explore=config.explore)
        self._migrations = Migrations(router=self._member.id, fleet=self._fleet, telemetry=self._telemetry)
        self._evacuation = Evacuation(fleet=self._fleet, migrations=self._migrations)
        self._grammars = grammar_checker(config.model, config.revision)
        self._pipeline = self._make_pipeline()
        self._scaling = ScaleTargetView(ScaleTargets(self._registry), self._fleet.set_scale_target)
        self._overview = self._make_overview()
        self._app = self._http_app()
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference_service(), self._ports.grpc.grpc)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin_service(), self._ports.grpc.grpc)

    async def serve(self, announce: Callable[..., None]) -> None:
        """Serve until the router is asked to stop and has drained.

        Raises RegistryUnavailable, Fenced when a newer process has the same name, and DrainIncomplete when requests
        were left at the end of the drain.
        """
        _LOG.info("starting", extra={"member": str(self._member.id), "settings": echo(self._config)})
        await check_registry(self._registry, self._config)
        await self._accounts.load()
        registration = Registration(self._registry, self._member)
        try:
            await self._ports.grpc.start()
            self._ports.health.start()
            self._ports.metrics.start()
            await registration.join_unless(self._stop)
            num_left = await self._live(registration, announce)
            if num_left:
                raise DrainIncomplete(
                    f"{num_left} request(s) were left after {self._drain_grace_s:g} s; clients that know another"
                    " router resume them there; raise --drain-grace-s"
                )
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            self._ports.health.stop()
            self._ports.metrics.stop()
            await self._ports.grpc.stop(_STOP_GRACE_S)
            await self._grammars.close()
            await self._live_requests.close()
            await registration.deregister()
            await self._registry.close()

    async def _live(self, registration: Registration, announce: Callable[..., None]) -> int:
        """Serve requests until the drain has ended, and return how many requests were left."""
        http_stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._fleet.run(), name="fleet"),
                tasks.create_task(self._evacuation.run(), name="evacuation"),
                tasks.create_task(self._scaling.run(), name="scale target"),
                tasks.create_task(registration.keep(), name="keep registration"),
                tasks.create_task(self._accounts.follow(self._live_requests, self._member.id), name="accounts"),
                tasks.create_task(self._follow_readiness(), name="readiness"),
                tasks.create_task(self._publish_figures(), name="figures"),
                tasks.create_task(self._overview.run(), name="overview"),
                tasks.create_task(self._publish_effect(), name="effect of disaggregation"),
                tasks.create_task(self._follow_settings(), name="follow settings"),
            ]
            tasks.create_task(self._serve_http(http_stop), name="HTTP")
            await self._until_stopped(registration, announce)
            announcing = registration.set_state(MemberState.DRAINING)  # the registry may not answer
            background.append(tasks.create_task(announcing, name="announce the drain"))
            num_left = await self._drain()
            http_stop.set()
            for task in background:
                task.cancel()
        return num_left

    async def _serve_http(self, stop: asyncio.Event) -> None:
        await self._ports.http.serve(
            self._app,
            max_connections=max_calls(self._config),
            telemetry=self._telemetry,
            stop=stop,
            grace_s=_STOP_GRACE_S,
        )

    async def _until_stopped(self, registration: Registration, announce: Callable[..., None]) -> None:
        """Become ready once the fleet has settled, and wait for the stop event."""
        async with running(self._stop.wait()) as stopped:
            async with running(self._fleet.settle(_SETTLE_S)) as settled:
                await asyncio.wait((stopped, settled), return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                await registration.set_state(MemberState.READY)
                announce(
                    http=self._member.http_address,
                    grpc=self._member.address,
                    health=join_address(self._ports.host, self._ports.health.port),
                    metrics=self._member.metrics_address,
                    member=self._member.id,
                )
            await stopped

    async def _drain(self) -> int:
        """Refuse new requests and wait for the live ones. Returns how many were left; their streams were ended."""
        self._pipeline.refuse_new()
        if self._config.share_port == "on":
            self._ports.http.leave_port()
        await self._ports.grpc.set_ready(False)
        _LOG.info("draining", extra={"live_requests": len(self._live_requests)})
        try:
            async with asyncio.timeout(self._drain_grace_s):
                await self._pipeline.drain()
        except TimeoutError:
            num_left = len(self._live_requests)
            _LOG.warning("the drain ended with requests left", extra={"live_requests": num_left})
            self._drained.set_result(DrainOutcome.INCOMPLETE)
            self._pipeline.end_all()
            return num_left
        self._drained.set_result(DrainOutcome.DRAINED)
        return 0

    async def _follow_readiness(self) -> None:
        """Keep the gRPC health service equal to /ready."""
        while True:
            changed = self._fleet.changes.next()  # a client that watches the health may delay the next line
            await self._ports.grpc.set_ready(self._pipeline.is_ready)
            await asyncio.shield(changed)

    async def _publish_figures(self) -> None:
        """Publish the gauges that change too often, or by themselves, to be set at every change."""
        while True:
            self._telemetry.gauge("tandem_buffered_tokens", self._live_requests.num_buffered_tokens)
            self._telemetry.gauge("tandem_prefix_index_blocks", len(self._prefix_index))
            self._telemetry.gauge("tandem_registry_age_seconds", self._registry.age_s)
            await asyncio.sleep(_PUBLISH_PERIOD_S)

    async def _publish_effect(self) -> None:
        """Publish the effect of disaggregation. It takes milliseconds to estimate, so this is rare."""
        while True:
            publish_effect(self._live_requests.explanations.comparison(), self._telemetry)
            await asyncio.sleep(_EFFECT_PERIOD_S)

    async def _follow_settings(self) -> None:
        if self._source is None:
            return

        def set_grace(grace_s: float) -> None:
            self._drain_grace_s = grace_s

        def set_timeout(timeout_s: float) -> None:
            self._pipeline.request_timeout_s = timeout_s

        setters: dict[str, Callable[[Any], None]] = {
            "log_level": set_log_level,
            "drain_grace_s": set_grace,
            "max_live_requests": self._live_requests.admission.set_limit,
            "max_buffered_tokens": self._live_requests.buffers.set_limit,
            "request_timeout_s": set_timeout,
        }
        await SettingsReload(self._config, self._source, setters=setters, tls=self._tls).run()

    def _as_member(self) -> Member:
        """Bind the gRPC port and describe this router as a member."""
        config = self._config
        return Member(
            id=new_member_id(config, Role.ROUTER),
            role=Role.ROUTER,
            address=join_address(self._ports.host, self._ports.grpc.bind(config.host, config.grpc_port, "--grpc-port")),
            http_address=join_address(self._ports.host, self._ports.http.port),
            metrics_address=join_address(scraped_host(config, self._ports.host), self._ports.metrics.port),
            model=config.model_name,
        )

    def _make_fleet(self) -> Fleet:
        config = self._config
        return Fleet(
            router=self._member,
            membership=self._registry,
            connect=self._connect,
            timeouts=WorkerTimeouts(
                heartbeat_timeout_s=config.registration_ttl_s, recovery_timeout_s=config.stream_grace_s
            ),
            clock=MonotonicClock(),
            telemetry=self._telemetry,
            follow_cache_events=CacheEventFollower(self._prefix_index).follow,
        )

    def _make_pipeline(self) -> Pipeline:
        config, keys = self._config, self._keys
        return Pipeline(
            router=self._member.id,
            tokenization=self._tokenization,
            live_requests=self._live_requests,
            policy=self._policy,
            fleet=self._fleet,
            migrations=self._migrations,
            prefixes=PrefixLocator(self._fleet, self._prefix_index, keys.hash_key),
            grammars=self._grammars,
            keys=keys,
            settings=PipelineSettings(
                request_timeout_s=config.request_timeout_s,
                max_attempts=config.max_attempts,
                breakers=BreakerPolicy(failures=config.breaker_failures, max_pause_s=config.breaker_max_pause_s),
                messages=MessageLimits(config.max_message_bytes, MAX_MESSAGE_BYTES),
            ),
            clock=MonotonicClock(),
            telemetry=self._telemetry,
        )

    def _make_overview(self) -> Overview:
        watched = Watched(
            router=self._member,
            fleet=self._fleet,
            live_requests=self._live_requests,
            pairs=self._pipeline.pairs,
            scaling=self._scaling,
            telemetry=self._telemetry,
            registry_age_s=lambda: self._registry.age_s,
            placement=self._config.placement,
        )
        return Overview(watched, connect=self._connect, clock=MonotonicClock())

    def _http_app(self) -> FastAPI:
        app = build_app(
            pipeline=self._pipeline,
            live_requests=self._live_requests,
            tokenization=self._tokenization,
            telemetry=self._telemetry,
            ready=lambda: self._pipeline.is_ready,
            gate=self._accounts.gate,
            audit=self._accounts.audit,
            max_message_bytes=self._config.max_message_bytes,
            client_stall_s=self._config.client_stall_s,
            allowed_origins=[origin for origin in self._config.allowed_origins.split(",") if origin],
            chats=self._chats,
        )
        add_page(app, self._overview)
        return app

    def _inference_service(self) -> InferenceService:
        return InferenceService(
            pipeline=self._pipeline,
            tokenization=self._tokenization,
            stalls=WriteTimeout(self._config.client_stall_s, self._telemetry),
            advertised_routers=partial(self._fleet.advertised_routers, self._member),
            gate=self._accounts.gate,
            chats=self._chats,
        )

    def _admin_service(self) -> AdminService:
        commands = MemberCommands(
            router=self._member.id, fleet=self._fleet, connect=self._connect, stop=self._stop, drained=self._drained
        )
        return AdminService(
            pipeline=self._pipeline,
            fleet=self._fleet,
            migrations=self._migrations,
            commands=commands,
            scaling=self._scaling,
            overview=self._overview,
            placement=self._config.placement,
            explore=self._config.explore,
            gate=self._accounts.gate,
            keys=self._accounts.keys,
            usage=self._accounts.usage,
        )


def _tokenization(config: RouterConfig, markers: Sequence[str]) -> Tokenization:
    tokenization = Tokenization.load(
        config.model,
        revision=config.revision,
        served_model_name=config.served_model_name,
        max_model_len=config.max_model_len,
        lengths=LengthLimits(config.max_input_length, config.max_output_length),
        markers=markers,
    )
    for note in tokenization.model_info.notes:
        _LOG.warning(note)
    return tokenization
