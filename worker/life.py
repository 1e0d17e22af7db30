"""A worker's life as a member of its cluster: started, bound, registered, ready, draining, ended. The same for both
roles.

This module owns the worker's name, key, address, registration and server, and the order of these steps. The role
decides which services the server has and how it drains.

`StartPhases` measures where the time of a start goes, from the creation of the process.
"""

import asyncio
import logging
import os
import resource
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from cluster.accounts.audit import Audit
from cluster.accounts.key_store import configured_key
from cluster.accounts.keys import Gate
from cluster.auth.gate import MemberGate
from cluster.auth.key_file import cluster_keys
from cluster.auth.member_channel import open_member_channel
from cluster.clock import Clock, MonotonicClock
from cluster.errors import DrainIncomplete, Draining, InternalError, Unavailable, Unhealthy
from cluster.member import Capacity, DrainOutcome, Member, MemberState
from cluster.messages import LayoutFingerprint, Role
from cluster.observe.health import HealthPort
from cluster.observe.logs import configure_logs, set_log_level
from cluster.observe.stalls import StallLimits
from cluster.observe.telemetry import MetricsPort, Telemetry
from cluster.observe.trace_context import open_span_export
from cluster.process import lasting
from cluster.protocol.hashing import keyed_chains, nameless_chains
from cluster.registry.registration import Registration, advertised_host, check_registry, new_member_id, scraped_host
from cluster.registry.registry import Registry
from cluster.service_times import StepLimit
from cluster.serving.serving import GrpcServer, join_address
from cluster.serving.tls import load_tls
from cluster.settings.config import WorkerConfig, echo
from cluster.settings.reload import SettingsReload, SettingsSource

_LOG = logging.getLogger("tandem.worker")
_SERVICES = tuple(f"tandem.internal.v1.{name}" for name in ("PrefillWorker", "DecodeWorker", "Worker", "KvTransfer"))
_STOP_GRACE_S = 1.0
_MOST_CONNECTIONS = 4096
_STUCK_END_S = 15.0  # for one that is stuck to leave in order

EventT = TypeVar("EventT")
Result = TypeVar("Result")
Drain: TypeAlias = Callable[[float], Coroutine[Any, Any, None]]
Ends: TypeAlias = "Sequence[asyncio.Future[None]]"


async def run_worker(
    config: WorkerConfig,
    role: Role,
    *,
    stop: asyncio.Event,
    announce: Callable[..., None],
    source: SettingsSource[WorkerConfig] | None = None,
) -> None:
    """Serve until `stop` is set, then drain. What can be refused without a model is refused before torch is imported.
    `source`: of settings and certificates that may change meanwhile.

    Raises ConfigError, ModelRefused, RegistryUnavailable, Fenced and DrainIncomplete."""
    life = WorkerLife(config, role=role, service_names=_SERVICES, stop=stop, source=source)
    await life.check_registry()
    life.phases.end("registry")
    with lasting():
        app = await life.unless_stopped(partial(import_module, "worker.app"))
    life.phases.end("imports")
    if app is not None:
        await app.serve(life, announce=announce)


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """The properties of this worker that routers and other workers need."""

    fingerprint: LayoutFingerprint
    capacity: Capacity
    transports: Sequence[str]
    grammar_engine: str


class WorkerLife:
    """The life of one worker. It is created before the model is loaded, so that errors in flags, port, key or Redis
    appear at once.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        role: Role,
        service_names: Sequence[str],
        stop: asyncio.Event,
        source: SettingsSource[WorkerConfig] | None = None,
    ) -> None:
        """Raises ConfigError."""
        self.phases = StartPhases(MonotonicClock(), process_age_s())
        configure_logs(config.log_level, config.log_format)
        self.config = config
        self.role = role
        self.member = new_member_id(config, role)
        self.keys = cluster_keys(config)
        keeps_prefixes = config.prefix_caching == "on"
        self.new_chain = keyed_chains(self.keys.hash_key, config.block_size) if keeps_prefixes else nameless_chains()
        self.telemetry = Telemetry.of_worker()
        self.describe(role)
        self.host = advertised_host(config)
        self.tls = load_tls(config, self.host)
        self.connect = partial(open_member_channel, keys=self.keys, caller=str(self.member), tls=self.tls)  # by address
        self.spans = open_span_export(config.otlp_endpoint, service="tandem-worker", member=self.member.id)
        self.audit = Audit(config.audit_file)
        gate = MemberGate(self.keys, self.member, self.telemetry, self.audit)
        self.server = GrpcServer(
            service_names=service_names,
            telemetry=self.telemetry,
            gate=gate,
            max_connections=_most_connections(),
            credentials=self.tls.member_credentials() if self.tls is not None else None,
        )
        gate.serve(self.server)
        self.address = join_address(self.host, self.server.bind(config.host, config.port))
        loop_limits = StallLimits(config.loop_timeout_s, config.stuck_exit_s)
        self._health = HealthPort(
            self.server.status,
            host=config.host,
            port=config.health_port,
            limits=loop_limits,
            on_lag=partial(self.telemetry.observe, "tandem_event_loop_lag_seconds"),
        )
        self._metrics = MetricsPort(
            self.telemetry,
            Gate(metrics_key=configured_key("", config.metrics_key_file, "--metrics-key")),
            host=config.metrics_host,
            port=config.metrics_port,
        )
        self._registry = Registry.of_member(config, self.keys, self.telemetry, self.audit)
        self._stop = stop
        self._source, self._drain_grace_s = source, config.drain_grace_s
        self._loop = asyncio.get_running_loop()
        self._fatal: asyncio.Future[None] = self._loop.create_future()
        self._registration: Registration | None = None  # None until the worker has joined its cluster
        self._drained: asyncio.Future[DrainOutcome] = self._loop.create_future()
        self.phases.end("process")
        self.telemetry.gauge("tandem_insecure_ports", float(config.is_insecure))
        if config.is_insecure:
            _LOG.warning("--insecure: every host that reaches the port of metrics reads them without a key")
        _LOG.info("starting", extra={"member": str(self.member), "settings": echo(config)})

    async def check_registry(self) -> None:
        """Check that the registry answers and has no other cluster. Raises RegistryUnavailable, ConfigError."""
        await check_registry(self._registry, self.config)

    def fatal(self, error: Exception) -> None:
        """End the worker because of an error from which it cannot recover. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._set_fatal, error)

    def on_loop(self, receive: Callable[[EventT], None]) -> Callable[[EventT], None]:
        """Return a function that any thread may call. It calls `receive` on the event loop, in the order of calls."""

        def forward(event: EventT) -> None:
            self._loop.call_soon_threadsafe(receive, event)

        return forward

    def request_drain(self) -> "asyncio.Future[DrainOutcome]":
        """Ask this worker to drain. The result is the outcome of the drain."""
        self._stop.set()
        return asyncio.shield(self._drained)

    async def set_role(self, role: Role) -> Role:
        """Register another role; the worker's work continues. Return the former one. Raises Unavailable, Fenced, and
        InvalidRequest where the scale target cannot move with it."""
        if self._registration is None:
            raise Unavailable("this worker is still starting and has no registration yet; try again")
        if self._stop.is_set():
            raise Draining("this worker is draining and will not do the work of another role")
        former = await self._registration.set_role(role)
        _LOG.info("the role has changed", extra={"former_role": former, "role": role})
        return former

    def describe(self, role: Role) -> None:
        """Publish the identity of this worker with its present role."""
        self.telemetry.describe(role=role, member=self.member.id, model=self.config.model_name)

    def register_step_target(self, limit: StepLimit) -> None:
        """Register another target for steps, from which routers predict."""
        assert self._registration is not None, "settings change once the worker is registered"
        self._registration.set_step_target(limit)

    async def unless_stopped(self, work: Callable[[], Result]) -> Result | None:
        """Run `work` on a thread of its own and return its result. Returns None, and abandons the thread, if the worker
        is asked to stop before."""
        working = self._loop.run_in_executor(ThreadPoolExecutor(1, "start"), work)
        stopped = asyncio.create_task(self._stop.wait(), name="wait for stop")
        try:
            await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stopped.cancel()

    async def live(
        self,
        profile: WorkerProfile,
        *,
        announce: Callable[..., None],
        drain: Drain,
        watch: Callable[[Registration], Coroutine[Any, Any, None]],
        on_role: Callable[[Role], None],
        setters: Mapping[str, Callable[[Any], None]],
    ) -> None:
        """Serve until the worker is asked to stop, then drain and return. `drain` gets the grace in seconds, `on_role`
        each new role. `setters`: by the name of each setting of the worker's work that can change, the function that
        receives its new value. Raises DrainIncomplete if work is left after the grace, Fenced if a newer member has
        this name, InternalError after `fatal`, and ConfigError if the worker does not fit into the cluster."""
        registration = Registration(self._registry, self._as_member(profile), on_role=on_role)
        await self.server.start()
        self._health.start()
        self._metrics.start()
        await registration.join_unless(self._stop)
        self._registration = registration
        keep = asyncio.create_task(registration.keep(), name="keep registration")
        watching = asyncio.create_task(watch(registration), name="watch over health")
        stopped = asyncio.create_task(self._stop.wait(), name="wait for stop")
        reloading = asyncio.create_task(self._follow_settings(setters), name="follow settings")
        breaks = (keep, watching, self._fatal)
        try:
            if not self._stop.is_set():
                await registration.set_state(MemberState.READY)
                await self.server.set_ready(True)
                health, metrics = (join_address(self.host, each.port) for each in (self._health, self._metrics))
                self.phases.end("registration")
                _LOG.info("ready", extra=self.phases.fields())
                announce(grpc=self.address, health=health, metrics=metrics, member=self.member)
                await _until(stopped, breaks)
            await self._drain(registration, drain, breaks)
        except Unhealthy:
            self._health.end_within(_STUCK_END_S)
            raise
        finally:
            for task in (stopped, keep, watching, reloading):
                task.cancel()
            await registration.deregister()
            await self._registry.close()

    async def end(self) -> None:
        """Stop the server. Calls that are left have a short grace to end."""
        self._health.stop()
        self._metrics.stop()
        await self.server.stop(_STOP_GRACE_S)
        if self.spans is not None:
            await self.spans.close()

    async def _drain(self, registration: Registration, drain: Drain, breaks: Ends) -> None:
        """Drain. Routers with work here are notified at the same time as the registry, which may not answer."""
        grace_s = self._drain_grace_s
        await self.server.set_ready(False)
        _LOG.info("draining", extra={"grace_s": grace_s})
        draining = asyncio.create_task(drain(grace_s), name="drain")
        publishing = asyncio.create_task(registration.set_state(MemberState.DRAINING), name="publish the state")
        outcome = DrainOutcome.INCOMPLETE
        try:
            await _until(draining, (publishing, *breaks))
            outcome = DrainOutcome.DRAINED
        except DrainIncomplete as error:
            _LOG.warning("the drain ended with work left: %s", error.message, extra={"grace_s": grace_s})
            raise
        finally:
            self._drained.set_result(outcome)
            draining.cancel()
            publishing.cancel()
            await asyncio.gather(draining, publishing, return_exceptions=True)

    async def _follow_settings(self, setters: Mapping[str, Callable[[Any], None]]) -> None:
        if self._source is None:
            return

        def set_grace(grace_s: float) -> None:
            self._drain_grace_s = grace_s

        own: dict[str, Callable[[Any], None]] = {"log_level": set_log_level, "drain_grace_s": set_grace}
        await SettingsReload(self.config, self._source, setters=own | dict(setters), tls=self.tls).run()

    def _as_member(self, profile: WorkerProfile) -> Member:
        return Member(
            id=self.member,
            role=self.role,
            address=self.address,
            metrics_address=join_address(scraped_host(self.config, self.host), self._metrics.port),
            model=self.config.model_name,
            fingerprint=profile.fingerprint,
            transports=tuple(profile.transports),
            capacity=profile.capacity,
            grammar_engine=profile.grammar_engine,
            scheduling_policy=self.config.scheduling_policy,
        )

    def _set_fatal(self, error: Exception) -> None:
        if not self._fatal.done():
            _LOG.error("the worker cannot go on", exc_info=error)
            self._fatal.set_exception(InternalError(f"the worker cannot go on: {error}"))


async def _until(work: asyncio.Future[Any], breaks: Ends) -> None:
    """Wait until `work` is done. Raises its error, or that of one of `breaks` which fails before."""
    waiting: set[asyncio.Future[Any]] = {work, *breaks}
    while not work.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for end in done:
            end.result()
    work.result()


class StartPhases:
    """The seconds of each phase. A phase begins where the one before it has ended, so the phases add up to the whole
    start. Several threads may use it one after the other."""

    def __init__(self, clock: Clock, age_s: float) -> None:
        """`age_s`: how long the process has existed."""
        self._clock = clock
        self._last_s = clock.now_s() - age_s
        self._seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """End a phase. A phase that comes several times has the sum."""
        now_s = self._clock.now_s()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def fields(self) -> dict[str, float]:
        """Return the phases as fields of a log record, in their order, and their sum."""
        named = {f"{phase}_s": round(seconds, 3) for phase, seconds in self._seconds.items()}
        return named | {"total_s": round(sum(self._seconds.values()), 3)}


def _most_connections() -> int:
    """Return how many connections the port for calls takes: at most a quarter of the files that this process may open,
    so that those of strangers leave enough for hand-offs."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if most == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, most // 4)


def process_age_s() -> float:
    """Return for how long this process has existed, to a hundredth of a second."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # starttime of proc_pid_stat(5), since boot
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
