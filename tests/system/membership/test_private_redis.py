"""The Redis of `tandem up` and that of compose serve the members of their cluster alone, who need no more rights."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import yaml
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from cluster.accounts.key_store import RecordedKeys, RedisKeyStore
from cluster.accounts.keys import Gate, KeySet
from cluster.accounts.usage import TenantLimits, Usage, UsageMeter
from cluster.auth.keys import ClusterKeys
from cluster.clock import MonotonicClock
from cluster.errors import ConfigError, RegistryUnavailable
from cluster.messages import Role
from cluster.registry.redis_server import RIGHTS, RedisServer
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import Following, ScaleTargets
from cluster.registry.scale_target import ScaleTarget
from router.accounts import SharedUse, UseReports, stored_usage
from tests.system.rigs.members.registry_rig import DEADLINE_S, member, until
from tests.system.rigs.processes.redis_processes import HOST, redis_process

_KEYS = ClusterKeys(bytes(32))
_ROOT = Path(__file__).parents[3]
_COMPOSE = _ROOT / "deploy" / "compose"


@pytest.fixture(params=["tandem up", "compose"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The URL that members of the cluster `tandem` have."""
    if request.param == "tandem up":
        server = await RedisServer.start(cluster_name="tandem")
        yield server.url
        await server.stop()
        return
    secrets, data = tmp_path / "redis", tmp_path / "data"
    data.mkdir()
    made = await asyncio.create_subprocess_exec(sys.executable, _COMPOSE / "make_secrets.py", tmp_path, "cpu")
    assert await made.wait() == 0
    service = yaml.safe_load((_COMPOSE / "compose.yaml").read_text())["services"]["redis"]
    options = [word.replace("/secrets", str(secrets)).replace("/data", str(data)) for word in service["command"][1:]]
    password = (secrets / "password").read_text()
    async with redis_process(data, *options, password=password, user="tandem") as process:
        settings = yaml.safe_load((tmp_path / "tandem.yaml").read_text())
        yield settings["redis"].replace("@redis:6379/", f"@{HOST}:{process.port}/")


async def test_the_redis_of_a_cluster_serves_no_client_without_its_password(url: str) -> None:
    server = url.partition("@")[2]
    for stranger_url in (f"redis://{server}", f"redis://:wrong@{server}", f"redis://tandem:wrong@{server}"):
        async with Redis.from_url(stranger_url) as stranger:
            with pytest.raises(AuthenticationError):
                await stranger.get("{tandem}:members")
        registry = Registry(url=stranger_url, cluster_name="tandem", ttl_s=1.0)
        what = "refuses the password; correct it" if "wrong" in stranger_url else "needs a password; give it in --redis"
        with pytest.raises(RegistryUnavailable, match=what):
            await registry.ping()
        await registry.close()
    async with Redis.from_url(url) as insider:
        for command in ("FLUSHALL", "CONFIG GET *", "ACL LIST", "KEYS *", "GET {other}:members", "SHUTDOWN"):
            with pytest.raises(NoPermissionError):
                await insider.execute_command(*command.split())  # type: ignore[no-untyped-call]


async def test_a_program_that_cannot_run_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, temporary = tmp_path / "redis-server", tmp_path / "temporary"
    program.write_bytes(b"\x7fELF of another processor")
    program.chmod(0o755)
    temporary.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(ConfigError, match=f"^cannot start {program}: Exec format error; .* --redis URL$"):
        await RedisServer.start(cluster_name="tandem")
    assert not list(temporary.iterdir())


async def test_everything_that_members_keep_in_redis_works_with_the_rights_of_members(url: str) -> None:
    registry = Registry(url=url, cluster_name="tandem", ttl_s=5.0, keys=_KEYS)
    async with asyncio.timeout(DEADLINE_S):
        async with aclosing(registry.watch()) as watch:
            assert await anext(watch) == ()
            await registry.register(member())
            assert await until(watch, bool) == (member(),)
            await registry.renew(member())
            await registry.deregister(member())

        store, gate = RedisKeyStore(registry), Gate(has_records=True)
        async with aclosing(store.changes()) as changes:
            await anext(changes)
            await RecordedKeys(store, gate, _KEYS).change(lambda keys: KeySet(keys.version + 1))
            await anext(changes)
        assert (gate.keys.version, bool(await store.read())) == (1, True)

        meter = UsageMeter()
        meter.record("acme", "k", Usage(requests=1))
        use = SharedUse(registry, TenantLimits(), meter, reports=UseReports(_KEYS, "r@1"), clock=MonotonicClock())
        await use.share()
        await use.store()
        assert [each.usage.requests for each in await stored_usage(registry)] == [1]

        follower = Following(registry, "up", ScaleTarget(1, 1))
        await follower.report(0)
        targets = ScaleTargets(registry)
        changed = await targets.set({Role.DECODE: 2})
        assert changed == await targets.read() and changed.size(Role.DECODE) == 2
        await follower.unfollow()
    await registry.close()


def test_the_documented_rights_are_those_of_members() -> None:
    page = (_ROOT / "docs" / "membership.md").read_text()
    assert " ".join(RIGHTS) in " ".join(page.split())
