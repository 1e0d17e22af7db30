"""Of the last two workers that decode only one gets another role, also if two routers ask at once: Redis decides."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from cluster.errors import InvalidRequest
from cluster.member import MemberState
from cluster.messages import Role
from cluster.registry.redis_server import RedisServer
from cluster.registry.registration import Registration
from cluster.registry.registry import Registry
from tests.polling import until
from tests.system.rigs.members.registry_rig import DEADLINE_S, KEYS, member

_REFUSAL = "is the last worker that decodes: no other one is registered as ready"


def _registry(url: str, *, timeout_s: float = DEADLINE_S) -> Registry:
    return Registry(url=url, cluster_name="last-decode", ttl_s=60.0, keys=KEYS, timeout_s=timeout_s)


async def _joined(
    registry: Registry,
    name: str,
    role: Role = Role.DECODE,
    state: MemberState = MemberState.READY,
    on_role: Callable[[Role], None] = lambda role: None,
) -> Registration:
    made = Registration(registry, member(name, role=role, state=state), on_role=on_role)
    await made.join()
    return made


@pytest.fixture
async def own_redis() -> AsyncIterator[RedisServer]:
    server = await RedisServer.start()
    yield server
    await server.stop()


async def _roles(registry: Registry) -> list[Role]:
    return [found.role for found in await registry.members()]


@pytest.mark.parametrize("role", [Role.DECODE, Role.BOTH])
async def test_of_two_changes_at_once_that_leave_no_worker_that_decodes_one_is_refused(
    own_redis: RedisServer, role: Role
) -> None:
    """No follower counts these workers, as on Kubernetes. Each of two routers knows another worker that decodes."""
    registries = [_registry(own_redis.url) for _ in range(2)]
    workers = [await _joined(each, name, role) for each, name in zip(registries, ("d0", "d1"), strict=True)]
    outcomes = await asyncio.gather(*(each.set_role(Role.PREFILL) for each in workers), return_exceptions=True)
    (refusal,) = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert isinstance(refusal, InvalidRequest) and _REFUSAL in refusal.message
    assert sorted(each.member.role for each in workers) == sorted([role, Role.PREFILL])
    assert sorted(await _roles(registries[0])) == sorted([role, Role.PREFILL])
    for each in registries:
        await each.close()


@pytest.mark.parametrize("state", [state for state in MemberState if state is not MemberState.READY])
async def test_a_worker_that_is_not_ready_does_not_count_as_one_that_decodes(
    own_redis: RedisServer, state: MemberState
) -> None:
    registry = _registry(own_redis.url)
    last = await _joined(registry, "d0")
    other = await _joined(registry, "d1", state=state)
    with pytest.raises(InvalidRequest, match=f"d0 {_REFUSAL}"):
        await last.set_role(Role.PREFILL)
    await other.set_state(MemberState.READY)
    await last.set_role(Role.PREFILL)
    assert await _roles(registry) == [Role.PREFILL, Role.DECODE]
    await registry.close()


async def test_a_worker_that_missed_a_renewal_does_not_count_as_one_that_decodes(own_redis: RedisServer) -> None:
    """A worker that died stays registered for the rest of its TTL."""
    registry = _registry(own_redis.url)
    last, dead = await _joined(registry, "d0"), await _joined(registry, "d1")

    async def leave(share_of_ttl: float) -> None:
        expire = "redis.call('PEXPIRE', KEYS[1], ARGV[1]) return {}"
        await registry.evaluate(expire, ["registration:d1"], [round(1000 * registry.ttl_s * share_of_ttl)])

    await leave(0.39)
    with pytest.raises(InvalidRequest, match=f"d0 {_REFUSAL}"):
        await last.set_role(Role.PREFILL)
    await dead.set_state(MemberState.READY)  # it was only late
    await leave(0.6)
    await last.set_role(Role.PREFILL)
    await registry.close()


async def test_records_of_other_programs_neither_stop_a_change_nor_count(own_redis: RedisServer) -> None:
    registry = _registry(own_redis.url)
    last = await _joined(registry, "d0")
    writes = (
        "redis.call('SADD', KEYS[1], unpack(ARGV)); for i, id in ipairs(ARGV) do redis.call('SET', KEYS[i + 1], id) end"
    )
    texts = ["text", "7", "null", "{}", '{"body": 7}', '{"body": "null"}', '{"body": "{}"}', "[" * 2000]
    await registry.evaluate(writes + " return {}", ["members", *(f"registration:{text}" for text in texts)], texts)
    with pytest.raises(InvalidRequest, match=f"d0 {_REFUSAL}"):
        await last.set_role(Role.PREFILL)
    await _joined(registry, "d1")
    await last.set_role(Role.PREFILL)
    await registry.close()


@pytest.mark.parametrize("is_emptied", [False, True], ids=["stopped for a while", "started again without data"])
async def test_of_two_changes_that_redis_gets_later_the_second_is_taken_back(
    own_redis: RedisServer, is_emptied: bool
) -> None:
    registry, patient = _registry(own_redis.url, timeout_s=1.0), _registry(own_redis.url)
    reported: dict[str, list[Role]] = {"d0": [], "d1": []}
    workers = [await _joined(registry, name, on_role=roles.append) for name, roles in reported.items()]
    if is_emptied:
        await own_redis.stop()
    else:
        os.kill(own_redis.pid, signal.SIGSTOP)
    for worker in workers:
        assert await worker.set_role(Role.PREFILL) is Role.DECODE
    successor = await RedisServer.start(own_redis.port) if is_emptied else own_redis
    os.kill(successor.pid, signal.SIGCONT)

    async def is_written(worker: Registration) -> bool:
        """Write this registration once more, as each renewal does. Return whether the registry has its present role."""
        await worker.set_state(MemberState.READY)
        return (worker.member.id, worker.member.role) in {(each.id, each.role) for each in await patient.members()}

    for worker in workers:
        await until(partial(is_written, worker), what="the registry has its role")
    assert sorted(worker.member.role for worker in workers) == [Role.DECODE, Role.PREFILL]
    assert sorted(await _roles(patient)) == [Role.DECODE, Role.PREFILL]
    assert sorted(reported.values(), key=len) == [[Role.PREFILL], [Role.PREFILL, Role.DECODE]]
    for each in (registry, patient):
        await each.close()
    await successor.stop()
