"""The accounts of a router: its gate, the API keys that it follows, the use that it shares, and its audit log."""

import asyncio
import logging
from pathlib import Path

from cluster.accounts.audit import Audit
from cluster.accounts.gate import Gate
from cluster.accounts.key_store import FileKeyStore, RecordedKeys, RedisKeyStore, configured_key
from cluster.accounts.shared_use import SharedUse, stored_usage
from cluster.accounts.usage import KeyUsage
from cluster.auth.keys import ClusterKeys
from cluster.clock import MonotonicClock
from cluster.messages import MemberId
from cluster.registry.registry import Registry
from cluster.settings.config import RouterConfig
from router.request.live_requests import LiveRequests

_LOG = logging.getLogger("tandem.router")
_IN_REDIS = "redis"


class Accounts:
    def __init__(self, config: RouterConfig, registry: Registry, keys: ClusterKeys) -> None:
        """Raises ConfigError for a key file or an audit file that cannot be used."""
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
        self.audit = Audit(config.audit_file)
        self.keys: RecordedKeys | None = None
        if config.keys:
            store = RedisKeyStore(registry) if config.keys == _IN_REDIS else FileKeyStore(Path(config.keys))
            self.keys = RecordedKeys(store, self.gate, keys)

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
        """Return the usage of all keys, at all routers. What others have not stored is missing: at most that of a
        second. Raises RegistryUnavailable."""
        if self._shared is not None:
            await self._shared.store()
        return await stored_usage(self._registry)
