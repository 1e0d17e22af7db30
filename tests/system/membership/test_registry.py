"""The registry on a real redis-server: leases, incarnations, and what happens while it is gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from cluster.auth.keys import ClusterKeys
from cluster.errors import ConfigError, Fenced
from cluster.member import MemberState
from cluster.messages import LayoutFingerprint, Role
from cluster.registry.redis_server import RedisServer
from cluster.registry.registration import Registration, check_registry
from cluster.registry.registry import Registry
from cluster.registry.scale_target import COUNTED_ROLES
from cluster.settings.config import RouterConfig
from tests import polling
from tests.system.rigs.members.registry_rig import DEADLINE_S, FINGERPRINT, KEYS, kept, member, until


@pytest.fixture
async def registry(redis_url: str, cluster_name: str) -> AsyncIterator[Registry]:
    opened = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=5.0, keys=KEYS, timeout_s=DEADLINE_S)
    yield opened
    await opened.close()


@pytest.fixture
async def brief_registry(redis_url: str, cluster_name: str) -> AsyncIterator[Registry]:
    """A registry whose registrations expire soon enough to watch."""
    opened = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=0.4, keys=KEYS)
    yield opened
    await opened.close()


async def test_a_registered_member_is_seen_with_all_its_fields(registry: Registry) -> None:
    router = member("r0", role=Role.ROUTER, fingerprint=None, transports=(), capacity=None, http_address="127.0.0.1:2")
    await registry.register(router)
    await registry.register(member())
    assert await registry.members() == (member(), router)


async def test_a_process_with_another_key_than_all_members_is_refused_and_stale_registrations_refuse_none(
    redis_url: str, cluster_name: str
) -> None:
    settings = RouterConfig(model="m", redis=redis_url, cluster_name=cluster_name, cluster_key_file="/keys/mine")
    theirs, mine, brief = (
        Registry(url=redis_url, cluster_name=cluster_name, ttl_s=ttl_s, keys=keys, timeout_s=DEADLINE_S)
        for ttl_s, keys in ((60.0, KEYS), (2.0, ClusterKeys(b"m" * 32)), (0.2, ClusterKeys(b"m" * 32)))
    )
    await check_registry(mine, settings)
    await theirs.register(member())
    told = r"cluster key /keys/mine is not that of the 1 registered member\(s\) of cluster '.*' \(p0\); copy"
    with pytest.raises(ConfigError, match=told):
        await check_registry(brief, settings)
    await check_registry(theirs, settings)
    checking = asyncio.create_task(check_registry(mine, settings))
    await theirs.deregister(member())  # as if it had expired
    await checking
    for each in (theirs, mine, brief):
        await each.close()


async def test_members_of_other_clusters_are_not_seen(registry: Registry, redis_url: str) -> None:
    other = Registry(url=redis_url, cluster_name="test-another", ttl_s=5.0, keys=KEYS, timeout_s=DEADLINE_S)
    await registry.register(member())
    assert await other.members() == ()
    await other.close()


async def test_a_watcher_receives_joins_states_and_departures_at_once(redis_url: str, cluster_name: str) -> None:
    """A registration TTL of ten minutes makes a periodic read come minutes later each time, so only notifications are
    fast enough."""
    slow = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=600.0, keys=KEYS)
    async with aclosing(slow.watch()) as watch:
        assert await until(watch, lambda _: True) == ()
        await slow.register(member())
        await until(watch, lambda members: len(members) == 1)
        await slow.renew(member(state=MemberState.READY))
        await until(watch, lambda members: members[0].state is MemberState.READY)
        await slow.deregister(member())
        await until(watch, lambda members: members == ())
    await slow.close()


async def test_a_member_that_stops_renewing_lapses_for_the_watcher(brief_registry: Registry) -> None:
    async with aclosing(brief_registry.watch()) as watch:
        async with kept(brief_registry, member()):
            await until(watch, lambda members: members == (member(),))
        await until(watch, lambda members: members == ())


async def test_a_member_that_renews_stays_registered_beyond_its_ttl(redis_url: str, cluster_name: str) -> None:
    registry = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=2.0, keys=KEYS)  # a busy machine renews in time
    async with kept(registry, member()), Redis.from_url(redis_url) as redis:

        async def left_ms() -> int:
            found: int = await redis.pttl(f"{{{cluster_name}}}:registration:p0")
            assert found > 0, "it has expired"
            return found

        for _ in range(4):  # a third of the lease passes before each renewal
            await polling.until(left_ms, lambda found: found < 1800, what="a part of the lease has passed")
            await polling.until(left_ms, lambda found: found > 1800, what="it is renewed")
        assert await registry.members() == (member(),)
    await registry.close()


async def test_the_newer_incarnation_wins_and_the_older_is_fenced(registry: Registry) -> None:
    await registry.register(member(incarnation="old"))
    await registry.register(member(incarnation="new"))
    for attempt in (registry.renew, registry.deregister):
        with pytest.raises(Fenced, match="incarnation new"):
            await attempt(member(incarnation="old"))
    assert await registry.members() == (member(incarnation="new"),)


async def test_a_woken_process_cannot_replace_its_successor_whose_registration_lapsed(brief_registry: Registry) -> None:
    await brief_registry.register(member(incarnation="old"))
    await brief_registry.register(member(incarnation="new"))
    async with aclosing(brief_registry.watch()) as watch:
        await until(watch, lambda members: members == ())
    with pytest.raises(Fenced):
        await brief_registry.renew(member(incarnation="old"))
    await brief_registry.renew(member(incarnation="new"))
    assert await brief_registry.members() == (member(incarnation="new"),)


async def test_the_newer_incarnation_wins_after_redis_lost_its_data(
    registry: Registry, redis_url: str, cluster_name: str
) -> None:
    await registry.register(member(incarnation="old"))
    await registry.register(member(incarnation="new"))
    async with Redis.from_url(redis_url) as redis:
        await redis.delete(*await redis.keys(f"{{{cluster_name}}}:*"))
    await registry.renew(member(incarnation="old"))  # no record contradicts it
    await registry.renew(member(incarnation="new"))
    with pytest.raises(Fenced, match="incarnation new"):
        await registry.renew(member(incarnation="old"))
    assert await registry.members() == (member(incarnation="new"),)


@pytest.mark.parametrize("key", ["registration:p0", "incarnation:p0", "members", COUNTED_ROLES])
async def test_a_key_of_another_type_that_another_program_wrote_stops_no_member(
    registry: Registry, redis_url: str, cluster_name: str, key: str
) -> None:
    await registry.register(member())
    async with Redis.from_url(redis_url) as redis:
        await redis.delete(f"{{{cluster_name}}}:{key}")
        await redis.rpush(f"{{{cluster_name}}}:{key}", "x")
        await registry.renew(member())
        assert await registry.members() == (member(),)
        await registry.register(member())


async def test_bytes_that_are_no_text_stop_no_member(registry: Registry, redis_url: str, cluster_name: str) -> None:
    await registry.register(member())
    async with Redis.from_url(redis_url) as redis:
        for name in ("registration:x", "incarnation:p0"):
            await redis.set(f"{{{cluster_name}}}:{name}", b"\xff")
        await redis.sadd(f"{{{cluster_name}}}:members", "x")
    assert await registry.members() == (member(),)
    await registry.renew(member())
    async with Redis.from_url(redis_url) as redis:
        await redis.set(f"{{{cluster_name}}}:incarnation:p0", b"\xff")
    await registry.register(member(incarnation="second"))


async def test_an_older_incarnation_that_is_put_back_ends_no_member_and_is_shown_to_none(
    redis_url: str, cluster_name: str
) -> None:
    refused: list[str] = []
    registry = Registry(
        url=redis_url, cluster_name=cluster_name, ttl_s=5.0, keys=KEYS, timeout_s=DEADLINE_S,
        on_refused=lambda reason, identifier: refused.append(f"{identifier} {reason}"),
    )  # fmt: skip
    names = [f"{{{cluster_name}}}:{kind}:p0" for kind in ("registration", "incarnation")]
    async with Redis.from_url(redis_url) as redis, aclosing(registry.watch()) as watch:
        await registry.register(member(incarnation="old"))
        recorded = [await redis.get(name) for name in names]
        await registry.register(member(incarnation="new"))
        await until(watch, lambda members: members == (member(incarnation="new"),))
        for number in range(1, 4):
            for name, text in zip(names, recorded, strict=True):
                await redis.set(name, text or b"")
            assert await registry.members() == ()
            assert refused == ["p0 replayed"] * number
            await registry.renew(member(incarnation="new"))
            assert await registry.members() == (member(incarnation="new"),)
            with pytest.raises(Fenced, match="incarnation new"):
                await registry.renew(member(incarnation="old"))
        await registry.deregister(member(incarnation="new"))
        with pytest.raises(Fenced, match="incarnation new"):
            await registry.renew(member(incarnation="old"))
    await registry.close()


async def test_a_registration_that_meets_another_one_is_the_newer_of_the_two(
    registry: Registry, redis_url: str, cluster_name: str
) -> None:
    """Many incarnations register at once: the last one that was written holds the name, and all others are fenced."""
    incarnations = [member(incarnation=str(number)) for number in range(4)]
    await asyncio.gather(*(registry.register(each) for each in incarnations))
    (holder,) = await registry.members()
    await registry.renew(holder)
    for other in incarnations:
        if other != holder:
            with pytest.raises(Fenced):
                await registry.renew(other)


async def test_a_member_gives_its_name_only_to_an_incarnation_that_a_member_signed(
    registry: Registry, redis_url: str, cluster_name: str
) -> None:
    await registry.register(member())
    await registry.register(member("p1", "another"))
    async with Redis.from_url(redis_url, decode_responses=True) as redis:
        of_another_name = await redis.get(f"{{{cluster_name}}}:incarnation:p1")
        for forged in ("made-up", "made-up " + "0" * 72, str(of_another_name)):
            await redis.set(f"{{{cluster_name}}}:incarnation:p0", forged)
            await registry.renew(member())
            await redis.set(f"{{{cluster_name}}}:incarnation:p0", forged)
            await registry.deregister(member())
            await registry.register(member())
            assert member() in await registry.members()


async def test_every_new_role_is_reported_in_order_also_if_its_caller_leaves(registry: Registry) -> None:
    roles: list[Role] = []
    await registry.register(member("d0", role=Role.DECODE, state=MemberState.READY))
    registration = Registration(registry, member(), on_role=roles.append)
    await registration.join()
    leaving = asyncio.create_task(registration.set_role(Role.DECODE))
    await asyncio.sleep(0)  # it writes now
    leaving.cancel()
    others = await asyncio.gather(registration.set_role(Role.BOTH), registration.set_role(Role.PREFILL))
    assert leaving.cancelled()
    assert roles == [Role.DECODE, *others[1:], Role.PREFILL] == [Role.DECODE, Role.BOTH, Role.PREFILL]
    assert [found.role for found in await registry.members()] == [Role.DECODE, Role.PREFILL]


async def test_a_fenced_member_receives_that_with_its_next_renewal(brief_registry: Registry) -> None:
    registration = Registration(brief_registry, member(incarnation="old"))
    await registration.join()
    await brief_registry.register(member(incarnation="new"))
    with pytest.raises(Fenced):
        await asyncio.wait_for(registration.keep(), DEADLINE_S)


@pytest.mark.parametrize(
    ("other", "ours", "theirs"),
    [
        (replace(FINGERPRINT, model_config="config-b", weights="weights-b"), "config-a", "config-b"),
        (replace(FINGERPRINT, block_table="table-b"), "table-a", "table-b"),
        (replace(FINGERPRINT, weights="weights-b"), "weights-a", "weights-b"),
    ],
    ids=["another model", "another layout", "another fine-tune of the same shape"],
)
async def test_a_worker_that_does_not_match_the_cluster_is_refused_with_both_values(
    registry: Registry, other: LayoutFingerprint, ours: str, theirs: str
) -> None:
    await Registration(registry, member("d0", role=Role.DECODE, fingerprint=other)).join()
    with pytest.raises(ConfigError) as refusal:
        await Registration(registry, member("p0")).join()
    assert ours in refusal.value.message
    assert theirs in refusal.value.message
    assert [found.id.id for found in await registry.members()] == ["d0"]


async def test_a_starting_worker_does_not_keep_out_a_worker_that_matches_the_accepted_ones(registry: Registry) -> None:
    """Two workers start together while another one serves. The one that does not match is refused with the serving
    worker's values, and the other one joins, whichever comes first."""
    foreign = replace(FINGERPRINT, weights="weights-b")
    await Registration(registry, member("d0", role=Role.DECODE, state=MemberState.READY)).join()
    await registry.register(member("a-stranger", fingerprint=foreign))  # about to receive it
    await Registration(registry, member("p0")).join()
    with pytest.raises(ConfigError, match="decode worker d0@first"):
        await Registration(registry, member("b-stranger", fingerprint=foreign)).join()


async def test_a_worker_that_was_alone_may_restart_with_another_model(registry: Registry) -> None:
    await Registration(registry, member(incarnation="old")).join()
    await Registration(registry, member(incarnation="new", fingerprint=replace(FINGERPRINT, weights="b"))).join()


async def test_members_with_other_fingerprints_are_visible(registry: Registry) -> None:
    stranger = member("d0", role=Role.DECODE, fingerprint=replace(FINGERPRINT, weights="weights-b"))
    await registry.register(stranger)
    await registry.register(member())
    assert set(await registry.members()) == {member(), stranger}


async def test_a_member_without_a_protocol_version_of_the_others_is_refused(registry: Registry) -> None:
    newer = member("d0", protocol_oldest=2, protocol_newest=3)
    await Registration(registry, newer).join()
    with pytest.raises(ConfigError, match=r"protocol 1 to 1.*2 to 3"):
        await Registration(registry, member()).join()


async def test_scripts_that_redis_lost_are_loaded_again(registry: Registry, redis_url: str) -> None:
    await registry.register(member())
    async with Redis.from_url(redis_url) as redis:
        await redis.script_flush()
    await registry.renew(member(state=MemberState.READY))
    assert await registry.members() == (member(state=MemberState.READY),)


@pytest.mark.parametrize("url", ["", "http://x", "redis://h:nine/0"])
def test_a_url_that_names_no_redis_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--redis"):
        Registry(url=url, cluster_name="c", ttl_s=1.0)


def test_a_missing_redis_url_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match="--redis is needed: a URL such as redis://"):
        Registry(url="", cluster_name="c", ttl_s=1.0)


async def test_a_port_in_use_is_named_when_redis_cannot_have_it(redis_url: str) -> None:
    port = int(redis_url.split(":")[2].split("/")[0])
    with pytest.raises(ConfigError, match=f"port {port}"):
        await RedisServer.start(port)


async def test_a_watch_and_a_renewal_can_be_cancelled_at_any_moment(redis_url: str, cluster_name: str) -> None:
    """A cancellation at the end of a write was once lost, and the draining process never ended."""
    registry = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=0.001, keys=KEYS)  # as often as it can
    registration = Registration(registry, member())

    async def watched() -> None:
        async for _ in registry.watch():
            pass

    for run in (watched, registration.keep):
        for turns in range(150):
            task = asyncio.create_task(run())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=DEADLINE_S)
            while not task.done():  # so that a failure of this test ends too
                task.cancel()
                await asyncio.wait([task], timeout=0.1)
            assert done, f"{run.__name__} goes on after a cancel at turn {turns} of the loop"
            assert task.cancelled()
    await registry.close()
