"""The accounts of a router: its gate, the API keys that it follows, the use that it shares, and its audit log.

`SharedUse` shares the use of tenants between routers, and stores usage, through the cluster's Redis. Each router writes
its tenants' whole use and reads that of the others, twice a second: a lost report is replaced by the next one, and the
report of a router that ended expires. Reports are signed and numbered (`UseReports`). Usage is added up in numbered
batches, each exactly once. While Redis does not answer, usage waits in the router, and limits are divided
(cluster/accounts/usage.py).

`KeyInterceptor` checks the API key of every call over gRPC, and writes operators' calls to the audit log. Health checks
are open. Reflection needs any key, `Inference` one that allows inference, `Admin` one that allows everything; a router
without keys accepts every call (cluster/accounts/keys.py).
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf.json_format import MessageToDict

from cluster.accounts.audit import Audit
from cluster.accounts.key_store import FileKeyStore, RecordedKeys, RedisKeyStore, configured_key
from cluster.accounts.keys import Access, Caller, Gate
from cluster.accounts.usage import KeyUsage, TenantLimits, UsageMeter, Use, read_usage
from cluster.auth.keys import ClusterKeys, Purpose
from cluster.auth.sessions import Refusal, signature_refusal
from cluster.clock import Clock, MonotonicClock
from cluster.errors import RegistryUnavailable, TandemError
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from cluster.registry.registry import Registry
from cluster.settings.config import RouterConfig
from router.request.live_requests import LiveRequests

_LOG = logging.getLogger("tandem.router")
_IN_REDIS = "redis"
_PERIOD_S = 0.5
_EXPIRES_MS = 5_000
_REMEMBERED_S = 600.0  # the number of the last report of a router
_CLAIMED = 100  # characters of a router's name that stands in Redis, in the audit log
_BATCH_KEPT_MS = 24 * 3600 * 1000
# KEYS: a hash of reports. ARGV: this router, its report, after how many ms a report expires. Returns the other routers
# and their reports in turn.
_SHARE = """
local time = redis.call('TIME')
local now, found = time[1] * 1000 + math.floor(time[2] / 1000), {}
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d ', now) .. ARGV[2])
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
    local at, report = string.match(all[i + 1], '^(%d+) (.*)$')
    if not at or math.abs(now - tonumber(at)) > tonumber(ARGV[3]) then
        redis.call('HDEL', KEYS[1], all[i])
    elseif all[i] ~= ARGV[1] then
        found[#found + 1] = all[i]
        found[#found + 1] = report
    end
end
return found
"""
# KEYS: the sums, the number of this router's last batch. ARGV: the number of this batch, ms to keep it, fields and
# amounts in turn.
_ADD = """
if tonumber(redis.call('GET', KEYS[2]) or '0') >= tonumber(ARGV[1]) then return {} end
for i = 3, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {}
"""
_READ = "return redis.call('HGETALL', KEYS[1])"
_OPEN_PREFIX = "/grpc.health."
_ACCESS = {"tandem.v1.Inference": Access.INFERENCE, "tandem.v1.Admin": Access.ADMIN}
_POLLED = frozenset({"Overview"})  # asked every second by each tool that watches: only refusals are written
_AUTHORIZATION = "authorization"
_CANCELLED = "cancelled"
_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Accounts:
    def __init__(
        self, config: RouterConfig, registry: Registry, keys: ClusterKeys, telemetry: Telemetry, audit: Audit
    ) -> None:
        """Open the accounts. Raises ConfigError for a key file that cannot be used."""
        if config.is_insecure:
            _LOG.warning("--insecure: every host that reaches the ports uses this router without a key")
        self.gate = Gate(
            api_key=configured_key(config.api_key, config.api_key_file, "--api-key"),
            admin_key=configured_key(config.admin_key, config.admin_key_file, "--admin-key"),
            metrics_key=configured_key("", config.metrics_key_file, "--metrics-key"),
            has_records=bool(config.keys),
        )
        self._registry, self._keys, self._telemetry = registry, keys, telemetry
        self._shared: SharedUse | None = None
        self.audit = audit
        self.keys: RecordedKeys | None = None
        if config.keys:
            store = RedisKeyStore(registry) if config.keys == _IN_REDIS else FileKeyStore(Path(config.keys))
            self.keys = RecordedKeys(store, self.gate, keys)

    async def load(self) -> None:
        """Read the recorded keys. Call it before clients can reach this router: without them it would refuse the calls
        of all clients, also of those that resume their streams here. Raises RegistryUnavailable."""
        if self.keys is not None:
            await self.keys.load()

    async def follow(self, live_requests: LiveRequests, router: MemberId) -> None:
        """Follow changes of the keys, and share the use of tenants, until cancelled."""
        if not self.gate.asks_for_keys:
            return
        reports = UseReports(self._keys, str(router), self._on_refused)
        shared = self._shared = SharedUse(
            self._registry, live_requests.limits, live_requests.usage, reports=reports, clock=MonotonicClock()
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(shared.run(), name="shared use")
            if self.keys is not None:
                tasks.create_task(self.keys.follow(), name="API keys")

    async def usage(self) -> list[KeyUsage]:
        """Return the usage of all keys, at all routers. The usage of the last second may be missing, because routers
        store theirs once a second. Raises RegistryUnavailable.
        """
        if self._shared is not None:
            await self._shared.store()
        return await stored_usage(self._registry)

    def _on_refused(self, reason: Refusal, router: str) -> None:
        self._telemetry.count("tandem_refused_members_total", reason=reason)
        self.audit.record_refusal(what="report of use", origin="registry", why=reason, claims=router[:_CLAIMED])


class SharedUse:
    def __init__(
        self, registry: Registry, limits: TenantLimits, usage: UsageMeter, *, reports: "UseReports", clock: Clock
    ) -> None:
        self._registry, self._limits, self._usage = registry, limits, usage
        self._reports, self._clock = reports, clock

    async def run(self) -> None:
        """Exchange the use of tenants with the other routers, and store it, until cancelled."""
        while True:
            try:
                await self.share()
                await self.store()
            except RegistryUnavailable:
                pass  # counted and logged where the registry is followed
            await asyncio.sleep(_PERIOD_S)

    async def share(self) -> None:
        """Report this router's use and read the others'. Raises RegistryUnavailable."""
        report = self._reports.sign(self._limits.own(self._clock.now_s()))
        found = await self._registry.evaluate(_SHARE, ["use"], [self._reports.router, report, _EXPIRES_MS])
        now_s = self._clock.now_s()
        self._limits.set_others(self._reports.read(dict(zip(found[::2], found[1::2], strict=True)), now_s), now_s)

    async def store(self) -> None:
        """Add what this router's tenants have used to the sums. Raises RegistryUnavailable; the next call repeats the
        batch, which counts once."""
        number, fields = self._usage.batch()
        if fields:
            changes = [word for pair in fields.items() for word in pair]
            await self._registry.evaluate(
                _ADD, ["usage", f"usage:batch:{self._reports.router}"], [number, _BATCH_KEPT_MS, *changes]
            )
        self._usage.stored(number)


async def stored_usage(registry: Registry) -> list[KeyUsage]:
    """Return the usage of all keys at all routers. Raises RegistryUnavailable."""
    found = await registry.evaluate(_READ, ["usage"], [])
    return read_usage(dict(zip(found[::2], found[1::2], strict=True)))


@dataclass(frozen=True, slots=True)
class _Report:
    number: int
    use: Mapping[str, Use]  # by tenant
    read_s: float  # when it was read first


class UseReports:
    """Signs this router's reports, and verifies those of the others. Each report of a router has a higher number than
    the one before and counts until it expires, by the clock of this router: a report that is put back, or never
    replaced, does not count for longer. Nothing that others write in the meantime lowers what it counts."""

    def __init__(
        self,
        keys: ClusterKeys,
        router: str,
        on_refused: Callable[[Refusal, str], None] = lambda reason, router: None,
    ) -> None:
        """`router`: "id@incarnation" of this router. `on_refused`: called with the name of a router under which
        something else stands than a newer report of it, once for each such text."""
        self.router = router
        self._keys, self._on_refused = keys, on_refused
        self._number = 0
        self._last: dict[str, _Report] = {}  # the newest one, by router
        self._seen: dict[str, str] = {}  # the texts that were read last, by router

    def sign(self, use: Mapping[str, Use]) -> str:
        """Return the next report: this router's use by tenant."""
        self._number += 1
        body = json.dumps([self._number, {tenant: astuple(amounts) for tenant, amounts in use.items()}])
        return f"{self._keys.sign(Purpose.USE_REPORTS, _signed(self.router, body)).hex()} {body}"

    def read(self, found: Mapping[str, str], now_s: float) -> dict[str, Mapping[str, Use]]:
        """Return the use of each other router by tenant. `found`: their reports as they stand in Redis, by router."""
        last = {router: report for router, report in self._last.items() if now_s - report.read_s < _REMEMBERED_S}
        for router, text in found.items():
            if self._seen.get(router) == text:
                continue
            reason, report = self._verified(router, text, last.get(router), now_s)
            if report is not None:
                last[router] = report
            elif reason is not None:
                self._on_refused(reason, router)
        self._last, self._seen = last, dict(found)
        return {name: report.use for name, report in last.items() if now_s - report.read_s < _EXPIRES_MS / 1000}

    def _verified(
        self, router: str, text: str, last: _Report | None, now_s: float
    ) -> tuple[Refusal | None, _Report | None]:
        """Return why a report is refused, or the report; neither if it cannot be read, because it is of a later version
        of Tandem. None can lower the use that others have."""
        signature, _, body = text.partition(" ")
        try:
            proof, message = bytes.fromhex(signature), _signed(router, body)
        except ValueError:
            return Refusal.NO_PROOF, None
        if (reason := signature_refusal(self._keys, Purpose.USE_REPORTS, message, proof)) is not None:
            return reason, None
        try:
            number, amounts = json.loads(body)
            use = {tenant: Use(*(max(0, int(each)) for each in use)) for tenant, use in amounts.items()}
            report = _Report(int(number), use, now_s)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return None, None
        is_replayed = last is not None and report.number <= last.number
        return (Refusal.REPLAYED, None) if is_replayed else (None, report)


def _signed(router: str, body: str) -> bytes:
    return f"{router}\0{body}".encode()


class KeyInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, gate: Gate, audit: Audit) -> None:
        self._gate, self._audit = gate, audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        method = handler_call_details.method
        if method.startswith(_OPEN_PREFIX):
            return await continuation(handler_call_details)
        service = method.rpartition("/")[0].removeprefix("/")
        access = _ACCESS.get(service)
        shown = str(dict(handler_call_details.invocation_metadata or ()).get(_AUTHORIZATION, ""))
        if access is not Access.ADMIN:
            self._gate.admit(shown, access)
            return await continuation(handler_call_details)
        name = method.rpartition("/")[2]
        try:
            caller = self._gate.admit(shown, access)
        except TandemError as error:
            return self._refusal(error, self._gate.caller(shown), name)
        handler = await continuation(handler_call_details)
        return handler if handler is None or name in _POLLED else self._audited(handler, caller, name)

    def _refusal(self, error: TandemError, caller: Caller, method: str) -> _Handler:
        async def refuse(_request: Any, context: _Context) -> None:
            if caller.key_id:
                self._audit.record(who=caller, what=method, origin=context.peer(), outcome=error.reason)
            else:
                self._audit.record_refusal(what=method, origin=context.peer(), outcome=error.reason)
            raise error

        return grpc.stream_stream_rpc_method_handler(refuse)  # fits every kind of call: it reads no request

    def _audited(self, handler: Any, caller: Caller, method: str) -> _Handler:
        """Write one line per call: at its end, or at the beginning of a call that follows changes."""

        async def answer(request: Any, context: _Context) -> Any:
            outcome = _CANCELLED
            try:
                response = await handler.unary_unary(request, context)
                outcome = "ok"
                return response
            except Exception as error:
                outcome = error.reason if isinstance(error, TandemError) else "internal"
                raise
            finally:
                self._write(request, context, caller, method, outcome)

        async def answers(request: Any, context: _Context) -> AsyncIterator[Any]:
            self._write(request, context, caller, method, "ok")
            async with aclosing(handler.unary_stream(request, context)) as found:
                async for each in found:
                    yield each

        read, write = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(answer, read, write)
        return grpc.unary_stream_rpc_method_handler(answers, read, write)

    def _write(self, request: Any, context: _Context, caller: Caller, method: str, outcome: str) -> None:
        asked = MessageToDict(request, preserving_proto_field_name=True)  # no request of an operator has a secret
        self._audit.record(who=caller, what=method, origin=context.peer(), outcome=outcome, request=asked)
