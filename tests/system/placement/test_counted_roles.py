"""A change of a worker's role moves the scale target in the same step, in a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from cluster.errors import InvalidRequest
from cluster.member import MemberState
from cluster.messages import Role
from cluster.registry.registration import Registration
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import Following, ScaleTargets
from cluster.registry.scale_target import ScaleTarget
from tests.system.rigs.members.registry_rig import KEYS, member

_WORKERS = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
_FIRST = ScaleTarget(1, 2)


@pytest.fixture
async def registry(redis_url: str, cluster_name: str) -> AsyncIterator[Registry]:
    made = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=60.0, keys=KEYS, timeout_s=60.0)
    await joined(made, "decode-0")  # so that a change of another worker leaves one that decodes
    yield made
    await made.close()


@pytest.fixture
async def follower(registry: Registry) -> Following:
    """A follower that has reached its first target with three workers."""
    made = Following(registry, "first", _FIRST)
    assert await made.report(0, workers=_WORKERS) == ""
    assert await made.report(1, workers=_WORKERS) == ""
    return made


async def joined(registry: Registry, name: str, role: Role = Role.DECODE, incarnation: str = "first") -> Registration:
    made = Registration(registry, member(name, incarnation, role, state=MemberState.READY))
    await made.join()
    return made


async def sizes(registry: Registry) -> tuple[int, int, int, int]:
    """Return the sizes of the target (prefill, decode, colocated) and its version."""
    target = await ScaleTargets(registry).read()
    assert target is not None and target.counts_roles
    return target.prefill, target.decode, target.colocated, target.version


async def test_a_change_of_a_role_moves_the_target_and_the_count_of_the_worker_together(
    registry: Registry, follower: Following
) -> None:
    changed = await joined(registry, "decode-1")
    assert await changed.set_role(Role.PREFILL) is Role.DECODE
    assert await sizes(registry) == (2, 1, 0, 2)
    await follower.report(1, workers=_WORKERS)
    assert (follower.target.prefill, follower.target.decode, follower.target.version) == (2, 1, 2)
    assert follower.roles == {**_WORKERS, "decode-1": Role.PREFILL}
    for _ in range(2):
        await registry.renew(changed.member)
    assert await sizes(registry) == (2, 1, 0, 2), "a renewal without a change moves nothing"
    await changed.set_role(Role.BOTH)
    assert await sizes(registry) == (1, 1, 1, 3)


async def test_a_role_that_redis_gets_with_a_later_renewal_moves_the_target_then(
    registry: Registry, follower: Following
) -> None:
    changed = await joined(registry, "decode-1")
    away = Registry(url="redis://127.0.0.1:1", cluster_name="away", ttl_s=60.0, keys=KEYS)
    unreached = Registration(away, changed.member)
    await unreached.set_role(Role.PREFILL)
    await away.close()
    assert await sizes(registry) == (1, 2, 0, 1)
    await registry.renew(unreached.member)
    assert await sizes(registry) == (2, 1, 0, 2)


async def test_of_two_changes_at_once_the_one_that_leaves_no_decode_worker_is_refused(
    registry: Registry, follower: Following
) -> None:
    await joined(registry, "stranger")  # it decodes, and the target does not count it
    workers = [await joined(registry, name) for name in ("decode-0", "decode-1")]
    outcomes = await asyncio.gather(*(each.set_role(Role.PREFILL) for each in workers), return_exceptions=True)
    (refusal,) = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert (
        isinstance(refusal, InvalidRequest) and "is the last worker that decodes of the scale target" in refusal.message
    )
    assert await sizes(registry) == (2, 1, 0, 2)
    assert sorted(each.member.role for each in workers) == [Role.DECODE, Role.PREFILL]
    assert sorted(found.role for found in await registry.members()) == [Role.DECODE, Role.DECODE, Role.PREFILL]


async def test_a_refused_change_has_no_effect_also_if_its_caller_leaves_or_asks_twice(
    registry: Registry, follower: Following
) -> None:
    last = await joined(registry, "decode-1")
    await (await joined(registry, "decode-0")).set_role(Role.PREFILL)
    asked = [asyncio.create_task(last.set_role(Role.PREFILL)) for _ in range(3)]
    await asyncio.sleep(0)  # the first one is on its way to Redis
    asked[0].cancel()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, InvalidRequest, InvalidRequest]
    await last.set_state(MemberState.READY)
    assert {found.id.id: found.role for found in await registry.members()}["decode-1"] is Role.DECODE
    assert await sizes(registry) == (2, 1, 0, 2)


async def test_a_worker_whose_pool_is_about_to_be_drained_keeps_its_role(
    registry: Registry, follower: Following
) -> None:
    leaving = await joined(registry, "decode-1")
    await ScaleTargets(registry).set({Role.DECODE: 0, Role.BOTH: 1})
    with pytest.raises(InvalidRequest, match="decode-1 any more, so it is about to be drained"):
        await leaving.set_role(Role.PREFILL)
    assert await sizes(registry) == (1, 0, 1, 2)
    assert leaving.member.role is Role.DECODE


async def test_a_change_while_the_pools_approach_a_target_moves_that_target(
    registry: Registry, follower: Following
) -> None:
    changed = await joined(registry, "decode-1")
    await ScaleTargets(registry).set({Role.DECODE: 5})
    await changed.set_role(Role.PREFILL)
    assert await sizes(registry) == (2, 4, 0, 3)


async def test_a_worker_that_is_started_again_joins_with_the_role_for_which_it_counts(
    registry: Registry, follower: Following
) -> None:
    dead = await joined(registry, "decode-1")
    await dead.set_role(Role.PREFILL)
    started_again = await joined(registry, "decode-1", Role.DECODE, "second")
    assert started_again.member.role is Role.PREFILL
    await registry.renew(started_again.member)
    assert await sizes(registry) == (2, 1, 0, 2)


async def test_a_new_worker_under_the_name_of_one_that_was_drained_has_the_role_of_its_name(
    registry: Registry, follower: Following
) -> None:
    await (await joined(registry, "decode-1")).set_role(Role.PREFILL)
    await follower.report(2, workers=_WORKERS)
    await follower.report(2, workers={name: role for name, role in _WORKERS.items() if name != "decode-1"})
    await follower.report(2, workers=_WORKERS)
    assert follower.roles == _WORKERS
    assert (await joined(registry, "decode-1", Role.DECODE, "second")).member.role is Role.DECODE


async def test_the_role_of_a_worker_that_the_follower_does_not_run_leaves_the_target(
    registry: Registry, follower: Following
) -> None:
    await (await joined(registry, "stranger")).set_role(Role.PREFILL)
    assert await sizes(registry) == (1, 2, 0, 1)


async def test_a_follower_that_counts_no_roles_keeps_its_target(registry: Registry) -> None:
    follower = Following(registry, "the operator", _FIRST)
    await follower.report(1)
    changed = await joined(registry, "decode-1")
    await changed.set_role(Role.PREFILL)
    await follower.report(1)
    assert changed.member.role is Role.PREFILL
    assert await ScaleTargets(registry).read() == replace(_FIRST, follower="the operator", reached=1)


async def test_after_redis_lost_its_data_the_next_renewal_moves_an_old_target_with_its_count(
    registry: Registry, follower: Following, redis_url: str, cluster_name: str
) -> None:
    changed = await joined(registry, "decode-1")
    await changed.set_role(Role.PREFILL)  # the follower has not read it
    async with Redis.from_url(redis_url) as client:
        await client.delete(*await client.keys(f"*{cluster_name}*"))
    await registry.renew(changed.member)
    await follower.report(1, workers=_WORKERS)
    assert (follower.target.prefill, follower.target.decode, follower.roles) == (1, 2, _WORKERS)
    await registry.renew(changed.member)
    await follower.report(1, workers=_WORKERS)
    assert (follower.target.prefill, follower.target.decode) == (2, 1)
    assert follower.roles["decode-1"] is Role.PREFILL


async def test_the_next_follower_counts_workers_as_it_finds_them_until_they_renew(
    registry: Registry, follower: Following, redis_url: str, cluster_name: str
) -> None:
    changed = await joined(registry, "decode-1")
    await changed.set_role(Role.PREFILL)
    async with Redis.from_url(redis_url) as client:  # its registration expires; it was killed
        await client.delete(f"{{{cluster_name}}}:scale:follower")
    successor = Following(registry, "second", _FIRST)
    await successor.report(0, workers=_WORKERS)
    assert (successor.target.prefill, successor.target.decode, successor.roles) == (1, 2, _WORKERS)
    await registry.renew(changed.member)
    await successor.report(0, workers=_WORKERS)
    assert (successor.target.prefill, successor.target.decode) == (2, 1)
    assert successor.roles["decode-1"] is Role.PREFILL
