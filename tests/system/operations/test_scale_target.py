"""The scale target in a real Redis: setting it, following it, and restoring it after Redis has lost all data."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from redis.asyncio import Redis

from cluster.errors import InvalidRequest, Unavailable
from cluster.messages import Role
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import Following, ScaleTargets
from cluster.registry.scale_target import ScaleTarget


@pytest.fixture
async def registry(redis_url: str, cluster_name: str) -> AsyncIterator[Registry]:
    registry = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=5.0)
    yield registry
    await registry.close()


def following(registry: Registry, name: str = "first", target: tuple[int, int] = (1, 2)) -> Following:
    return Following(registry, name, ScaleTarget(*target))


async def test_without_a_follower_a_target_is_refused_with_the_remedy(registry: Registry) -> None:
    targets = ScaleTargets(registry)
    assert await targets.read() is None
    with pytest.raises(Unavailable, match="kubectl scale"):
        await targets.set({Role.DECODE: 3})
    follower = following(registry)
    assert await follower.report(reached=1) == ""
    await follower.unfollow()
    with pytest.raises(Unavailable, match="tandem up"):
        await targets.set({Role.DECODE: 3})


async def test_a_follower_receives_a_target_at_once_and_the_operator_its_progress(
    registry: Registry,
) -> None:
    targets, follower = ScaleTargets(registry), following(registry)
    await follower.report(reached=0)
    await follower.report(reached=1)
    async with aclosing(targets.watch()) as seen:
        assert await anext(seen) == ScaleTarget(1, 2, version=1, follower="first", reached=1)
        assert await targets.set({Role.DECODE: 3}) == ScaleTarget(1, 3, version=2, follower="first", reached=1)
        assert await follower.report(reached=1, problem="decode-2 ended with status 1") == ""
        assert (follower.target.prefill, follower.target.decode, follower.target.version) == (1, 3, 2)
        await follower.report(reached=2)
        while (target := await anext(seen)) is None or target.reached < 2:
            pass
        assert target.problem == ""


async def test_of_two_processes_of_one_name_one_follows(registry: Registry) -> None:
    """Two containers on one host may both be called "tandem up on HOST, process 1"."""
    one, other = Following(registry, "same", ScaleTarget(1, 2)), Following(registry, "same", ScaleTarget(2, 2))
    assert await one.report(1) == ""
    assert await other.report(0) == "same"
    assert await one.report(1) == ""


async def test_a_follower_whose_registration_expired_keeps_the_target_that_was_set_since(
    registry: Registry, redis_url: str, cluster_name: str
) -> None:
    """Also one that has reached no target yet."""
    follower = Following(registry, "one", ScaleTarget(1, 2))
    await follower.report(0)
    await ScaleTargets(registry).set({Role.DECODE: 7})
    async with Redis.from_url(redis_url) as client:
        assert await client.delete(f"{{{cluster_name}}}:scale:follower") == 1
    assert await follower.report(0) == ""
    assert (follower.target.prefill, follower.target.decode) == (1, 7)


async def test_concurrent_targets_change_only_the_pools_that_they_name(registry: Registry) -> None:
    targets, follower = ScaleTargets(registry), following(registry)
    await follower.report(reached=1)
    first, second = await targets.set({Role.PREFILL: 4}), await targets.set({Role.DECODE: 5})
    assert (second.prefill, second.decode) == (4, 5)
    assert (first.version, second.version) == (2, 3)
    assert (await targets.set({Role.PREFILL: 4, Role.DECODE: 5})).version == 3, "nothing has changed"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({}, "number of workers of a pool"),
        ({Role.DECODE: 0}, "must be at least 1"),
        ({Role.DECODE: 0, Role.BOTH: 0}, "must be at least 1"),
        ({Role.PREFILL: 300}, "prefill must be from 0 to 256, not 300"),
    ],
)
async def test_an_impossible_target_is_refused(registry: Registry, wanted: dict[Role, int], said: str) -> None:
    await following(registry).report(reached=1)
    with pytest.raises(InvalidRequest, match=said):
        await ScaleTargets(registry).set(wanted)
    target = await ScaleTargets(registry).read()
    assert target is not None and (target.prefill, target.decode, target.version) == (1, 2, 1)


async def test_colocated_workers_may_take_the_place_of_all_others(registry: Registry) -> None:
    await following(registry).report(reached=1)
    target = await ScaleTargets(registry).set({Role.PREFILL: 0, Role.DECODE: 0, Role.BOTH: 2})
    assert (target.prefill, target.decode, target.colocated, target.version) == (0, 0, 2, 2)


async def test_one_process_follows_at_a_time_and_the_next_starts_with_its_own_pools(registry: Registry) -> None:
    first, second = following(registry), following(registry, "second", (2, 2))
    await first.report(reached=1)
    assert await second.report(reached=0) == "first"
    assert (second.target.prefill, second.target.decode) == (2, 2), "another one's target is none of its business"
    await first.unfollow()
    assert await second.report(reached=0) == ""
    target = await ScaleTargets(registry).read()
    assert target is not None and (target.prefill, target.decode, target.follower) == (2, 2, "second")


async def test_a_target_is_written_again_after_redis_lost_its_data(
    registry: Registry, redis_url: str, cluster_name: str
) -> None:
    targets, follower = ScaleTargets(registry), following(registry)
    await follower.report(reached=1)
    await targets.set({Role.DECODE: 7})
    await follower.report(reached=1)
    async with Redis.from_url(redis_url) as client:
        await client.delete(*await client.keys(f"*{cluster_name}*"))
    await follower.report(reached=1)
    assert await targets.read() == ScaleTarget(1, 7, version=2, follower="first", reached=1)


async def test_a_follower_whose_registration_lapsed_finds_the_target_unchanged(
    registry: Registry, redis_url: str, cluster_name: str
) -> None:
    targets, follower = ScaleTargets(registry), following(registry)
    await follower.report(reached=1)
    await targets.set({Role.DECODE: 7})
    async with Redis.from_url(redis_url) as client:
        await client.delete(f"{{{cluster_name}}}:scale:follower")
    await follower.report(reached=1)
    assert follower.target == ScaleTarget(1, 7, version=2, follower="first", reached=1)
