"""The accounts of a router: its gate, the records of API keys that it follows, and its audit log."""

from pathlib import Path

from cluster.accounts.audit import Audit
from cluster.accounts.gate import Gate
from cluster.accounts.key_store import FileKeyStore, RecordedKeys, RedisKeyStore, configured_key
from cluster.auth.keys import ClusterKeys
from cluster.registry.registry import Registry
from cluster.settings.config import RouterConfig

_IN_REDIS = "redis"


class Accounts:
    def __init__(self, config: RouterConfig, registry: Registry, keys: ClusterKeys) -> None:
        """Raises ConfigError for a key file or an audit file that cannot be used."""
        self.gate = Gate(
            api_key=configured_key(config.api_key, config.api_key_file, "--api-key"),
            admin_key=configured_key(config.admin_key, config.admin_key_file, "--admin-key"),
            has_records=bool(config.keys),
        )
        self.audit = Audit(config.audit_file)
        self.keys: RecordedKeys | None = None
        if config.keys:
            store = RedisKeyStore(registry) if config.keys == _IN_REDIS else FileKeyStore(Path(config.keys))
            self.keys = RecordedKeys(store, self.gate, keys)

    async def follow(self) -> None:
        """Follow changes until cancelled."""
        if self.keys is not None:
            await self.keys.follow()
