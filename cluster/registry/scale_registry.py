"""The scale target in the registry, its follower, and the loads of the workers that the follower scales.

Each cluster has one target with a version number, written by a script, so two concurrent changes are never mixed. The
follower is the process that runs the workers; there is one at a time. It has a registration with a TTL, which includes
its progress. Without a follower a change of the target is refused. If the registry loses its data, the follower writes
back the target that it read last. A follower that can start a worker of any role registers the role for which it counts
each of its workers. When one registers another role, that count and the target change in the same script
(cluster/registry/registry.py), so no pool is nearer to the target or farther from it. This module starts and ends no
worker.
"""

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import grpc

from cluster.errors import InvalidRequest, RegistryUnavailable, Unavailable
from cluster.messages import Role
from cluster.registry.registry import Registry
from cluster.registry.scale_target import (
    CHANNEL,
    COUNTED_ROLES,
    NO_DECODE_WORKER,
    POOLS,
    TARGET,
    ScaleTarget,
    check_sizes,
    pool_name,
)
from cluster.serving.serving import open_channel
from cluster.serving.tls import ClusterTls
from tandem.enum_words import MEMBER_ROLES
from tandem.v1 import admin_pb2, admin_pb2_grpc

_NAMES = (TARGET, "scale:follower", CHANNEL, COUNTED_ROLES)
_NUM_FIELDS = 8  # of a target in the answers of the scripts
_LOADS_TIMEOUT_S = 5.0
_IDLE_BLOCKS = ("blocks_free", "blocks_cached")

# All scripts return the target's sizes (prefill, decode, colocated) and version, the follower's name, reached and
# problem, and whether it counts roles; empty without a target.
_READ = """
local target = redis.call('HMGET', KEYS[1], 'prefill', 'decode', 'colocated', 'version')
if not target[1] then return {} end
local follower = redis.call('HMGET', KEYS[2], 'name', 'reached', 'problem')
local answer = {target[1], target[2], target[3], target[4], follower[1] or '', follower[2] or '0', follower[3] or ''}
answer[8] = tostring(redis.call('EXISTS', KEYS[4]))
"""
_ANSWER = _READ + "return answer"
# ARGV: the sizes; empty: unchanged. Without a follower nothing is written; nor where no worker would decode, which is
# answered by one word.
_SET = (
    """
local changed = false
if redis.call('EXISTS', KEYS[1], KEYS[2]) == 2 then
    local names, wanted = {'prefill', 'decode', 'colocated'}, {}
    local present = redis.call('HMGET', KEYS[1], unpack(names))
    for number, name in ipairs(names) do
        wanted[number] = ARGV[number] ~= '' and ARGV[number] or present[number]
    end
    if wanted[2] + wanted[3] == 0 then return {'undecodable'} end
    for number, name in ipairs(names) do
        if wanted[number] ~= present[number] then
            redis.call('HSET', KEYS[1], name, wanted[number])
            changed = true
        end
    end
end
if changed then
    redis.call('HINCRBY', KEYS[1], 'version', 1)
    redis.call('PUBLISH', KEYS[3], 'target')
end
"""
    + _ANSWER
)
# ARGV: id, name, reached, problem, TTL in ms, the sizes, version, 1 if it has followed before, and of each worker that
# it counts by its role the id and the pool. Writes nothing where another one follows. The target stands afterwards: its
# own where there was none, or where nobody follows and it did not before. Workers are counted as before, or else as it
# says. Also returns 1 if it follows, and the id and the pool of each worker.
_FOLLOW = (
    """
local holder = redis.call('HGET', KEYS[2], 'id')
if not holder or holder == ARGV[1] then
    local before = redis.call('HMGET', KEYS[2], 'reached', 'problem')
    redis.call('HSET', KEYS[2], 'id', ARGV[1], 'name', ARGV[2], 'reached', ARGV[3], 'problem', ARGV[4])
    redis.call('PEXPIRE', KEYS[2], ARGV[5])
    if redis.call('EXISTS', KEYS[1]) == 0 then
        redis.call('HSET', KEYS[1], 'prefill', ARGV[6], 'decode', ARGV[7], 'colocated', ARGV[8], 'version', ARGV[9])
        redis.call('DEL', KEYS[4])
    elseif not holder and ARGV[10] == '0' then
        redis.call('HSET', KEYS[1], 'prefill', ARGV[6], 'decode', ARGV[7], 'colocated', ARGV[8])
        redis.call('HINCRBY', KEYS[1], 'version', 1)
        redis.call('DEL', KEYS[4])
    end
    local kept = {}
    for number = 11, #ARGV, 2 do
        kept[ARGV[number]] = true
        redis.call('HSETNX', KEYS[4], ARGV[number], ARGV[number + 1])
    end
    for _, id in ipairs(redis.call('HKEYS', KEYS[4])) do
        if not kept[id] then redis.call('HDEL', KEYS[4], id) end
    end
    if before[1] ~= ARGV[3] or before[2] ~= ARGV[4] then redis.call('PUBLISH', KEYS[3], 'follower') end
end
"""
    + _READ
    + """
answer[#answer + 1] = redis.call('HGET', KEYS[2], 'id') == ARGV[1] and '1' or '0'
for _, word in ipairs(redis.call('HGETALL', KEYS[4])) do answer[#answer + 1] = word end
return answer
"""
)
# ARGV: id. The target is deleted with its follower; the next follower starts with its own.
_UNFOLLOW = """
if redis.call('HGET', KEYS[2], 'id') == ARGV[1] then
    redis.call('DEL', KEYS[1], KEYS[2], KEYS[4])
    redis.call('PUBLISH', KEYS[3], 'follower')
end
return {}
"""


class ScaleTargets:
    """Read and set the scale target. Every method raises RegistryUnavailable."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def read(self) -> ScaleTarget | None:
        return _target(await self._registry.evaluate(_ANSWER, _NAMES, []))

    async def set(self, wanted: Mapping[Role, int]) -> ScaleTarget:
        """Set the size of each pool in `wanted`. Return the new target. Raises InvalidRequest, and Unavailable without
        a follower."""
        check_sizes(wanted)
        answer = await self._registry.evaluate(_SET, _NAMES, [str(wanted.get(role, "")) for role in POOLS.values()])
        if len(answer) == 1:
            raise InvalidRequest(NO_DECODE_WORKER)
        target = _target(answer)
        if target is None or not target.follower:
            raise Unavailable(
                "no process follows the scale target: `tandem up` does. If Kubernetes or compose runs the workers, "
                "scale there, for example by `kubectl scale deployment tandem-decode`"
            )
        return target

    async def watch(self) -> AsyncGenerator[ScaleTarget | None, None]:
        """Yield the target at once, and whenever it or the follower's progress may have changed. Yields nothing while
        the registry is unreachable."""
        async with aclosing(self._registry.news(CHANNEL)) as news:
            async for _ in news:
                try:
                    found = await self.read()
                except RegistryUnavailable:
                    continue
                yield found


class Following:
    """The follower's side of the scale target, in the process that runs the workers."""

    def __init__(self, registry: Registry, name: str, first: ScaleTarget) -> None:
        """`name`: for messages. `first`: the present sizes of its pools."""
        self._registry = registry
        self._id = secrets.token_hex(8)
        self._name = name
        self._has_followed = False
        self.target = first  # as it was read last
        self.roles: Mapping[str, Role] = {}  # likewise: for which each worker counts, by member id

    async def report(self, reached: int, problem: str = "", workers: Mapping[str, Role] | None = None) -> str:
        """Renew the registration, report the progress, and read the target and, in the same step, `roles`. `workers`:
        the roles in which its workers were started, by member id; None: it does not count workers by their roles.
        Return the name of the follower if it is another process, else an empty string. Raises RegistryUnavailable."""
        ttl_ms = round(3000 * self._registry.ttl_s)
        sizes = [self.target.size(role) for role in POOLS.values()]
        arguments: list[str | int] = [self._id, self._name, reached, problem, ttl_ms, *sizes, self.target.version]
        arguments.append(int(self._has_followed))
        for worker, started in (workers or {}).items():
            arguments += [worker, pool_name(self.roles.get(worker, started))]
        answer = await self._registry.evaluate(_FOLLOW, _NAMES, arguments)
        found, (follows, *roles) = _target(answer[:_NUM_FIELDS]), answer[_NUM_FIELDS:] or ["0"]
        if found is None or follows != "1":
            return found.follower if found is not None else "another one"
        self._has_followed = True
        self.target = replace(found, follower=self._name)
        self.roles = {
            worker: POOLS[pool] for worker, pool in zip(roles[::2], roles[1::2], strict=True) if pool in POOLS
        }
        return ""

    def news(self) -> AsyncGenerator[None, None]:
        """Yield whenever the target should be read again."""
        return self._registry.news(CHANNEL)

    async def unfollow(self) -> None:
        await self._registry.evaluate(_UNFOLLOW, _NAMES, [self._id])


@dataclass(frozen=True, slots=True)
class WorkerUse:
    role: Role
    load: float


class WorkerLoads:
    """The roles and loads of workers, by which a follower chooses those that it ends."""

    def __init__(self, routers: Sequence[str], admin_key: str, tls: ClusterTls | None) -> None:
        self._routers = tuple(routers)
        self._metadata = [("authorization", f"Bearer {admin_key}")] if admin_key else []
        self._tls = tls

    async def ask(self) -> Mapping[str, WorkerUse]:
        """Return the use of each worker by member id, as a router reports it; {} if no router answers."""
        for router in self._routers:
            async with open_channel(router, self._tls) as channel:
                try:
                    status = await admin_pb2_grpc.AdminStub(channel).Status(
                        admin_pb2.StatusRequest(), timeout=_LOADS_TIMEOUT_S, metadata=self._metadata
                    )
                except grpc.aio.AioRpcError:
                    continue
            roles = {MEMBER_ROLES.number(role): role for role in POOLS.values()}
            workers = [member for member in status.members if member.role in roles and member.figures]
            return {each.member_id: WorkerUse(roles[each.role], worker_load(each.figures)) for each in workers}
        return {}


def worker_load(figures: Mapping[str, float]) -> float:
    """Return the load of a worker: its blocks in use, and the sequences that wait there."""
    blocks = sum(value for name, value in figures.items() if name.startswith("blocks_") and name not in _IDLE_BLOCKS)
    return blocks + figures.get("waiting", 0.0)


def _target(answer: list[str]) -> ScaleTarget | None:
    """Return the target as Redis answers it. Raises RegistryUnavailable if another program wrote it."""
    if not answer:
        return None
    try:
        *sizes, version, follower, reached, problem, counts_roles = answer
        prefill, decode, colocated = map(int, sizes)
        return ScaleTarget(
            prefill, decode, colocated, int(version), follower, int(reached), problem, counts_roles == "1"
        )
    except ValueError as error:
        raise RegistryUnavailable(f"the scale target in Redis cannot be read: {str(error)[:200]}") from error
