"""The accounts of a router: its gate, the API keys that it follows, the use that it shares, and its audit log.

`SharedUse` shares the use of tenants between routers, and stores usage, through the cluster's Redis. Each router writes
its tenants' whole use and reads that of the others, twice a second: a lost report is replaced by the next one, and the
report of a router that ended expires. Usage is added up in numbered batches, each exactly once. While Redis does not
answer, usage waits in the router, and limits are divided (cluster/accounts/usage.py).
"""

import asyncio
import json
import logging
from dataclasses import astuple
from pathlib import Path

from cluster.accounts.audit import Audit
from cluster.accounts.key_store import FileKeyStore, RecordedKeys, RedisKeyStore, configured_key
from cluster.accounts.keys import Gate
from cluster.accounts.usage import KeyUsage, TenantLimits, UsageMeter, Use, read_usage
from cluster.auth.keys import ClusterKeys
from cluster.clock import Clock, MonotonicClock
from cluster.errors import RegistryUnavailable
from cluster.messages import MemberId
from cluster.registry.registry import Registry
from cluster.settings.config import RouterConfig
from router.request.live_requests import LiveRequests

_LOG = logging.getLogger("tandem.router")
_IN_REDIS = "redis"


class Accounts:
    def __init__(self, config: RouterConfig, registry: Registry, keys: ClusterKeys, audit: Audit) -> None:
        """Open the accounts. Raises ConfigError for a key file that cannot be used."""
        if config.is_insecure:
            _LOG.warning("--insecure: every host that reaches the ports uses this router without a key")
        self.gate = Gate(
            api_key=configured_key(config.api_key, config.api_key_file, "--api-key"),
            admin_key=configured_key(config.admin_key, config.admin_key_file, "--admin-key"),
            metrics_key=configured_key("", config.metrics_key_file, "--metrics-key"),
            has_records=bool(config.keys),
        )
        self._registry = registry
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
        shared = self._shared = SharedUse(
            self._registry, live_requests.limits, live_requests.usage, router=str(router), clock=MonotonicClock()
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


_PERIOD_S = 0.5
_EXPIRES_MS = 5_000
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


class SharedUse:
    def __init__(
        self, registry: Registry, limits: TenantLimits, usage: UsageMeter, *, router: str, clock: Clock
    ) -> None:
        """`router`: "id@incarnation" of this router."""
        self._registry, self._limits, self._usage = registry, limits, usage
        self._router, self._clock = router, clock

    async def run(self) -> None:
        """Share and store until cancelled."""
        while True:
            try:
                await self.share()
                await self.store()
            except RegistryUnavailable:
                pass  # counted and logged where the registry is followed
            await asyncio.sleep(_PERIOD_S)

    async def share(self) -> None:
        """Report this router's use and read the others'. Raises RegistryUnavailable."""
        own = {tenant: astuple(use) for tenant, use in self._limits.own(self._clock.now_s()).items()}
        found = await self._registry.evaluate(_SHARE, ["use"], [self._router, json.dumps(own), _EXPIRES_MS])
        reports = {router: _read(report) for router, report in zip(found[::2], found[1::2], strict=True)}
        self._limits.set_others(reports, self._clock.now_s())

    async def store(self) -> None:
        """Add what this router's tenants have used to the sums. Raises RegistryUnavailable; the next call repeats the
        batch, which counts once."""
        number, fields = self._usage.batch()
        if fields:
            changes = [word for pair in fields.items() for word in pair]
            await self._registry.evaluate(
                _ADD, ["usage", f"usage:batch:{self._router}"], [number, _BATCH_KEPT_MS, *changes]
            )
        self._usage.stored(number)


async def stored_usage(registry: Registry) -> list[KeyUsage]:
    """Return the usage of all keys at all routers. Raises RegistryUnavailable."""
    found = await registry.evaluate(_READ, ["usage"], [])
    return read_usage(dict(zip(found[::2], found[1::2], strict=True)))


def _read(report: str) -> dict[str, Use]:
    """Return the use by tenant. A report that cannot be read, of a later version, counts as none, and no report can
    lower the use that others have."""
    try:
        return {tenant: Use(*(max(0, int(amount)) for amount in use)) for tenant, use in json.loads(report).items()}
    except (ValueError, TypeError, AttributeError):
        return {}
