"""The desired number of workers of each pool. Pure; cluster/registry/scale_registry.py keeps it in the registry."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.errors import InvalidRequest
from cluster.messages import Role

# The pools by the names that operators use, and the role in which the workers of each one start.
POOLS: Mapping[str, Role] = {"prefill": Role.PREFILL, "decode": Role.DECODE, "colocated": Role.BOTH}
NO_DECODE_WORKER = "decode or colocated must be at least 1: every request ends on a worker that decodes"
# The names in the registry: two hashes and the channel of all changes.
TARGET, COUNTED_ROLES, CHANNEL = "scale:target", "scale:roles", "scale"
# Why a role cannot change, by the word of the script.
UNMOVABLE = {
    "alone": "{} is the last worker that decodes: no other one is registered as ready; give another worker the role"
    " decode or both first",
    "undecodable": "{} is the last worker that decodes of the scale target; give another worker the role decode or both"
    " first",
    "leaving": "the scale target has no worker of the pool of {} any more, so it is about to be drained; scale first",
}
_MOST = 256  # workers of one pool; a larger number is taken for a typing error
_NAMES = {role: name for name, role in POOLS.items()}
# CHANGE_ROLE is the part about a new role of the script that renews a registration (cluster/registry/registry.py), with
# its KEYS, ARGV and functions. A role that may be refused is refused if no ready worker would decode. Redis decides,
# because two routers may ask two workers at once, and each knows another worker that decodes. Redis does not know which
# workers answer: a registration that missed a renewal (every third of the TTL, with jitter) does not count, so a worker
# that died counts for 60 % of the TTL at most. Routers do not ask at all for the last worker that answers them.
_KEEP_A_DECODER = """
if ARGV[9] == '1' and ARGV[7] == 'prefill' then
    local registered = function(id)
        local is_one, member = pcall(function()
            local key = KEYS[1]:sub(1, -1 - #ARGV[1]) .. id
            local found = cjson.decode(cjson.decode(text(key)).body)
            local is_renewed = redis.call('PTTL', key) > 0.4 * ARGV[4]
            local is_ready = found.state == 'ready' and is_renewed
            return {decodes = found.role == 'decode' or found.role == 'both', ready = is_ready}
        end)
        return is_one and member or nil
    end
    local former = registered(ARGV[1])
    if not former or former.decodes then
        local is_kept = false
        for _, id in ipairs(redis.pcall('SMEMBERS', KEYS[3])) do
            local other = id ~= ARGV[1] and registered(id)
            is_kept = is_kept or other and other.decodes and other.ready
        end
        if not is_kept then return {'alone'} end
    end
end
"""
# Where the follower of the scale target counts this worker, another role moves the target by one: from the pool for
# which the worker was counted to that of its role. A pool of the target never gets less than no worker, nor the cluster
# less than one that decodes: then the target stays, and a change that may be refused is, by one word.
_MOVE_TARGET = """
local counted = redis.pcall('HGET', KEYS[6], ARGV[1])
if type(counted) == 'string' and counted ~= ARGV[7] and redis.call('EXISTS', KEYS[5]) == 1 then
    local size = function(pool)
        local found = redis.pcall('HGET', KEYS[5], pool)
        return tonumber(type(found) == 'string' and found or '') or 0
    end
    local decoding = size('decode') + size('colocated')
    if counted ~= 'prefill' then decoding = decoding - 1 end
    if ARGV[7] ~= 'prefill' then decoding = decoding + 1 end
    if size(counted) > 0 and decoding > 0 then
        redis.call('HINCRBY', KEYS[5], counted, -1)
        redis.call('HINCRBY', KEYS[5], ARGV[7], 1)
        redis.call('HINCRBY', KEYS[5], 'version', 1)
        redis.call('HSET', KEYS[6], ARGV[1], ARGV[7])
        redis.call('PUBLISH', KEYS[7], 'target')
    elseif ARGV[9] == '1' then
        return {size(counted) > 0 and 'undecodable' or 'leaving'}
    end
end
"""
CHANGE_ROLE = _KEEP_A_DECODER + _MOVE_TARGET


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """The desired sizes of the pools. `reached`: the newest version that the follower has put into effect; `problem`:
    why it could not put a newer one into effect. `counts_roles`: the follower counts each worker for the pool of its
    present role, and a change of a role moves the sizes; otherwise a worker counts for the pool that it was started in.
    """

    prefill: int
    decode: int
    colocated: int = 0
    version: int = 1
    follower: str = ""
    reached: int = 0
    problem: str = ""
    counts_roles: bool = False

    def size(self, role: Role) -> int:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.colocated}[role]

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.colocated

    def __str__(self) -> str:
        return sizes_text(self.prefill, self.decode, self.colocated)


def pool_name(role: Role) -> str:
    """Return the name of the pool whose workers start in this role."""
    return _NAMES[role]


def sizes_text(prefill: int, decode: int, colocated: int) -> str:
    """Return the sizes as text. Pools that a cluster does without are left out: colocated workers beside separate
    pools, and separate pools beside colocated workers."""
    separate = [f"{prefill} prefill, {decode} decode"] if prefill or decode or not colocated else []
    return ", ".join([*separate, *([f"{colocated} colocated"] if colocated else [])])


def check_sizes(wanted: Mapping[Role, int]) -> None:
    """Check the wanted sizes of the pools. Raises InvalidRequest."""
    if not wanted:
        raise InvalidRequest(f"give the number of workers of a pool: {', '.join(POOLS)}")
    for role, size in wanted.items():
        if not 0 <= size <= _MOST:
            raise InvalidRequest(f"{pool_name(role)} must be from 0 to {_MOST}, not {size}")
