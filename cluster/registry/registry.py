"""The members of the cluster, registered in Redis.

A member is one key with a TTL, which the member renews. A second key holds for a day the incarnation that registered
last. Renewal compares with it inside a script, so a process that was stopped and resumes never replaces its successor,
whether or not either registration has expired. The generation is a number that grows with every registration, by the
clock of Redis; it tells which incarnation is newer when Redis has lost its data and the older incarnation registers
again first, and when an entry of an older one is put back. Every change is published, so watchers do not poll; they
still read at intervals, because an expiry publishes nothing.

Owns the keys and scripts. Decides nothing about members: an expired registration means only that no renewal reached
Redis. While Redis cannot be reached, refuses, or has lost data, a missing member may still be alive.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial

from redis.asyncio.client import PubSub
from redis.commands.core import AsyncScript
from redis.exceptions import ResponseError

from cluster.accounts.audit import Audit
from cluster.auth.keys import ClusterKeys
from cluster.clock import Clock, MonotonicClock
from cluster.errors import Fenced, InvalidRequest, RegistryUnavailable
from cluster.member import Member
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.registry.redis_client import REDIS_ERRORS, Answer, cancellable, open_redis, problem, words
from cluster.registry.scale_target import CHANGE_ROLE, CHANNEL, COUNTED_ROLES, POOLS, TARGET, UNMOVABLE, pool_name
from cluster.registry.signed_records import SignedRecords, reported_refusals
from cluster.settings.config import ClusterSettings

_INCARNATION_KEPT_MS = 24 * 3600 * 1000
_JITTER = 0.2
_FIRST_QUESTIONS = 3
_ATTEMPTS = 5  # at registering, while other processes take the same name
# KEYS: registration, incarnation, members, channel; the target, counted roles and channel of scale_registry.py.
# ARGV: id, incarnation with its generation and its signature, member, TTL in ms, retention of the incarnation in ms,
# generation (0: not registered here yet), the pool of the member's role, '1' if another incarnation is not looked for,
# '1' if a change of the role may be refused. Renewing and leaving return (the incarnation that registered since, as it
# is stored, or '', whether the registration had expired); a renewal adds the time of Redis. The incarnation outlives
# the registration, so that generations grow. What another program has written here, also of another type, is
# overwritten.
_TEXT = """
local text = function(key)
    local found = redis.pcall('GET', key)
    return type(found) == 'string' and found or false
end
"""
_WRITE = """
local before = text(KEYS[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[5])
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
if type(redis.pcall('SADD', KEYS[3], ARGV[1])) ~= 'number' then
    redis.call('DEL', KEYS[3])
    redis.call('SADD', KEYS[3], ARGV[1])
end
if before ~= ARGV[3] then redis.call('PUBLISH', KEYS[4], ARGV[1]) end
"""
_COMPARE = (
    _TEXT
    + """
local current = text(KEYS[2])
local newest = tonumber(current and current:match('^%S+ (%d+) ') or '0')
local is_other = current and current:match('^%S*') ~= ARGV[2]:match('^%S*')
if is_other and newest >= tonumber(ARGV[6]) and ARGV[8] ~= '1' then return {current, 0} end
"""
)
# KEYS: incarnation. Returns it as it is stored, its digest, and the time of Redis.
_HOLDER = (
    _TEXT
    + """
local holder, now = text(KEYS[1]) or '', redis.call('TIME')
return {holder, redis.sha1hex(holder), now[1], now[2]}
"""
)
# ARGV[8]: the digest of the incarnation as it was read last. Returns nothing if another process has registered since.
_REGISTER = (
    _TEXT
    + """
if redis.sha1hex(text(KEYS[2]) or '') ~= ARGV[8] then return {} end
"""
    + _WRITE
    + """
local counted = redis.pcall('HGET', KEYS[6], ARGV[1])
return {type(counted) == 'string' and counted or ''}
"""
)
_RENEW = (
    _COMPARE
    + CHANGE_ROLE
    + _WRITE
    + """
local now = redis.call('TIME')
return {'', before and 0 or 1, now[1], now[2]}
"""
)
_DEREGISTER = (
    _COMPARE
    + """
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[3], ARGV[1])
redis.call('PUBLISH', KEYS[4], ARGV[1])
return {'', 0}
"""
)
# KEYS: members. ARGV: prefix of the registrations. Returns ids, each followed by its record. Removes the ids whose
# registration has expired; a renewal adds them again.
_MEMBERS = (
    _TEXT
    + """
local found = {}
for _, id in ipairs(redis.pcall('SMEMBERS', KEYS[1])) do
    local member = text(ARGV[1] .. id)
    if member then found[#found + 1] = id; found[#found + 1] = member else redis.call('SREM', KEYS[1], id) end
end
return found
"""
)


class Registry:
    """The registry as one process uses it. A call that does not end within `timeout_s` raises RegistryUnavailable."""

    def __init__(
        self,
        *,
        url: str,
        cluster_name: str,
        ttl_s: float,
        keys: ClusterKeys | None = None,
        timeout_s: float = 1.0,
        clock: Clock | None = None,
        on_clock_skew: Callable[[float], None] = lambda skew_s: None,
        on_refused: Callable[[str, str], None] = lambda reason, identifier: None,
    ) -> None:
        """`keys`: sign and verify registrations; None for a process that neither registers nor reads members.

        `on_clock_skew`: called at each renewal with this machine's wall clock minus that of Redis, in seconds.
        `on_refused`: called with a Refusal and the id in Redis, once for each record that no member of this cluster has
        signed, or that is older than one that was read."""
        self.ttl_s = ttl_s
        self._signed_records = SignedRecords(keys, cluster_name, on_refused) if keys is not None else None
        self._timeout_s = timeout_s
        self._clock = clock or MonotonicClock()
        self._on_clock_skew = on_clock_skew
        self._read_at_s = self._clock.now_s()
        self._is_gone = False
        self._distrusted_at_s = -float("inf")  # when Redis last came back, or was last found to have lost data
        self._generations: dict[MemberId, int] = {}  # of members that this process registered and that have not left
        self._missing: set[MemberId] = set()  # of these, members that the newest snapshot lacks
        self._prefix = f"{{{cluster_name}}}:"  # braces: all keys on one node of a Redis cluster
        self._redis = open_redis(url, timeout_s)
        self._holder = self._redis.register_script(_HOLDER)
        self._register = self._redis.register_script(_REGISTER)
        self._renew = self._redis.register_script(_RENEW)
        self._deregister = self._redis.register_script(_DEREGISTER)
        self._members = self._redis.register_script(_MEMBERS)
        self._scripts: dict[str, AsyncScript] = {}  # of other users of the registry, by source text

    @staticmethod
    def of_member(settings: ClusterSettings, keys: ClusterKeys, telemetry: Telemetry, audit: Audit) -> "Registry":
        """Return the registry for a process that is a member. Raises ConfigError."""
        return Registry(
            url=settings.redis,
            cluster_name=settings.cluster_name,
            ttl_s=settings.registration_ttl_s,
            keys=keys,
            on_clock_skew=partial(telemetry.gauge, "tandem_clock_skew_seconds"),
            on_refused=reported_refusals(telemetry, audit),
        )

    @property
    def age_s(self) -> float:
        """Return the age of the newest snapshot in seconds."""
        return self._clock.now_s() - self._read_at_s

    async def ping(self) -> None:
        """Check that Redis answers and permits the calls of this class. Tries three times, because a process that has
        just started is slow itself. Raises RegistryUnavailable."""
        for _ in range(_FIRST_QUESTIONS - 1):
            with suppress(RegistryUnavailable):
                await self._stored()
                return
        await self._stored()

    async def strangers(self) -> list[str]:
        """Return the ids of the registrations that are signed with a secret that this process does not have; none if
        any member of this cluster is registered. Raises RegistryUnavailable."""
        return self._records.strangers(await self._stored())

    async def register(self, member: Member) -> Role:
        """Register this incarnation; it replaces any other incarnation of the same member. Return the role for which
        the follower of the scale target counts this member, which an earlier incarnation may have got from an operator;
        without one, the member's own."""
        keys = self._keys(member.id)
        for _ in range(_ATTEMPTS):
            answer = await self._call(self._holder(keys[1:2], []))
            with self._understood():
                stored, digest, *redis_time = answer
                self._generations[member.id] = self._records.next_generation(member.id.id, stored, _ms(*redis_time))
            answer = await self._call(self._register(keys, [*self._arguments(member), digest]))
            with self._understood():
                if answer:
                    (pool,) = answer
                    return POOLS.get(pool, member.role)
        raise RegistryUnavailable(f"other processes register as {member.id.id} at the same time")

    async def renew(self, member: Member, *, may_refuse: bool = False) -> None:
        """Extend the registration and replace its content; restore it if it had expired. If the role is another one and
        the follower of the scale target counts this worker, the target moves with it in the same step. Raises Fenced if
        another incarnation has registered since, and InvalidRequest if the renewal `may_refuse` a role with which no
        ready worker would decode or the target cannot move."""
        asked_s = time.time()
        answer = await self._as_holder(self._renew, member, "1" if may_refuse else "")
        with self._understood():
            if len(answer) == 1:
                raise InvalidRequest(UNMOVABLE[answer[0]].format(member.id.id))
            _, had_lapsed, *redis_time = answer
            if redis_time:
                self._on_clock_skew((asked_s + time.time()) / 2 - int(redis_time[0]) - int(redis_time[1]) / 1e6)
        if had_lapsed:
            self._distrust_absence()

    async def deregister(self, member: Member) -> None:
        """Delete the registration. Raises Fenced."""
        try:
            await self._as_holder(self._deregister, member)
        finally:
            self._generations.pop(member.id, None)

    async def members(self) -> tuple[Member, ...]:
        """Return all registered members, in the order of their ids. Entries that no member of this cluster has signed,
        those older than one that was read before, and those of a later version are left out.
        """
        stored = await self._stored()
        self._read_at_s = self._clock.now_s()
        found = tuple(sorted(self._records.read(stored, self._read_at_s), key=lambda member: member.id))
        missing = set(self._generations).difference(member.id for member in found)
        if missing - self._missing:
            self._distrust_absence()
        self._missing = missing
        return found

    async def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """Yield a snapshot at once, and another one after every change. While Redis is unreachable nothing is yielded,
        so the last snapshot stays valid. For one TTL after Redis came back or lost data, missing members are kept:
        living members need that long to register again."""
        shown: tuple[Member, ...] | None = None
        async with aclosing(self.news("changes")) as news:
            async for _ in news:
                try:
                    found = await self.members()
                except RegistryUnavailable:
                    continue
                if shown is not None and self._clock.now_s() - self._distrusted_at_s < self.ttl_s:
                    found = with_missing(found, shown)
                if found != shown:
                    shown = found
                    yield found

    async def news(self, channel: str) -> AsyncGenerator[None, None]:
        """Yield at once, after every message on this channel, and from time to time without one, because messages are
        lost while no subscription is open. Yields nothing while Redis is unreachable."""
        while True:
            try:
                async with self._redis.pubsub() as subscription:
                    await self._call(self._redis.subscribe(subscription, self._prefix + channel))
                    while True:
                        yield
                        await self._until_published(subscription, channel)
            except (RegistryUnavailable, *REDIS_ERRORS):
                self._is_gone = True
                await asyncio.sleep(jittered(self.ttl_s / 5))

    async def evaluate(self, script: str, names: Sequence[str], arguments: Sequence[str | int]) -> list[str]:
        """Run a script on keys of these names within this cluster's key space."""
        run = self._scripts.get(script)
        if run is None:
            run = self._scripts[script] = self._redis.register_script(script)
        answer: object = await self._call(run([self._prefix + name for name in names], arguments))
        if not isinstance(answer, list):
            raise RegistryUnavailable(f"Redis at {self._redis.place} sent an unexpected response: {str(answer)[:100]}")
        return answer

    async def close(self) -> None:
        await self._redis.aclose()

    @property
    def _records(self) -> SignedRecords:
        assert self._signed_records is not None, "registrations need the cluster's keys"
        return self._signed_records

    async def _stored(self) -> list[tuple[str, str]]:
        """Return the records in Redis by their ids."""
        texts = await self._call(self._members([self._prefix + "members"], [self._prefix + "registration:"]))
        with self._understood():
            return list(zip(texts[::2], texts[1::2], strict=True))

    async def _until_published(self, subscription: PubSub, channel: str) -> None:
        """Wait for a message, or until the next read is due. A silent connection is checked by subscribing again,
        because a half-open connection stays silent forever. Raises RegistryUnavailable, REDIS_ERRORS."""
        pause_s = jittered(self.ttl_s / 5)
        async with asyncio.timeout(pause_s + self._timeout_s):
            published = await cancellable(subscription.get_message(timeout=pause_s))
        if published is None:
            await self._call(self._redis.subscribe(subscription, self._prefix + channel))

    async def _call(self, answer: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_s):
                value = await cancellable(answer)
        except ResponseError as error:
            self._is_gone = True
            if "READONLY" in str(error):  # the master became a replica
                await self._redis.drop_idle()
            raise RegistryUnavailable(f"Redis at {self._redis.place} refuses the command: {words(error)}") from error
        except (*REDIS_ERRORS, TimeoutError) as error:
            self._is_gone = True
            raise RegistryUnavailable(problem(self._redis.place, error)) from error
        if self._is_gone:
            self._is_gone = False
            self._distrust_absence()
        return value

    def _distrust_absence(self) -> None:
        """Treat every missing member as possibly alive for one TTL: it may be missing from Redis only."""
        self._distrusted_at_s = self._clock.now_s()

    def _keys(self, member_id: MemberId) -> list[str]:
        return [
            f"{self._prefix}registration:{member_id.id}",
            f"{self._prefix}incarnation:{member_id.id}",
            f"{self._prefix}members",
            f"{self._prefix}changes",
            *(self._prefix + name for name in (TARGET, COUNTED_ROLES, CHANNEL)),
        ]

    def _arguments(self, member: Member) -> list[str | int]:
        ttl_ms = max(1, round(self.ttl_s * 1000))
        generation = self._generations.get(member.id, 0)
        record, holder = self._records.sign(member, generation), self._records.sign_holder(member.id, generation)
        pool = pool_name(member.role) if member.role.is_worker else ""
        return [member.id.id, holder, record, ttl_ms, _INCARNATION_KEPT_MS, generation, pool]

    async def _as_holder(self, script: AsyncScript, member: Member, *more: str) -> list[str]:
        """Run a script for the incarnation that holds a member's name. Raises Fenced if another one does."""
        keys, arguments = self._keys(member.id), self._arguments(member)
        answer: list[str] = await self._call(script(keys, [*arguments, "", *more]))
        with self._understood():
            if len(answer) == 1 or not answer[0]:
                return answer
            self._not_fenced(member, answer[0])
        answer = await self._call(script(keys, [*arguments, "1", *more]))
        return answer

    def _not_fenced(self, member: Member, stored: str) -> None:
        """Raise Fenced if a member has written this incarnation, and not another program, and it is newer."""
        holder = self._records.holder_of(member.id.id, stored)
        if holder is not None and holder.generation >= self._generations.get(member.id, 0):
            raise Fenced(
                f"{member.id} was replaced: incarnation {holder.incarnation} has registered as {member.id.id} since"
            )

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Raise RegistryUnavailable for an answer that the scripts of this class never return."""
        try:
            yield
        except (TypeError, ValueError, LookupError) as error:
            raise RegistryUnavailable(f"Redis at {self._redis.place} sent an unexpected response: {error}") from error


def with_missing(found: tuple[Member, ...], before: tuple[Member, ...]) -> tuple[Member, ...]:
    """Return the members found, and those of `before` whose id is missing among them."""
    ids = {member.id.id for member in found}
    kept = [member for member in before if member.id.id not in ids]
    return tuple(sorted([*found, *kept], key=lambda member: member.id))


def _ms(seconds: str, microseconds: str) -> int:
    """Return a time of Redis in milliseconds. Raises ValueError."""
    return int(seconds) * 1000 + int(microseconds) // 1000


def jittered(duration_s: float) -> float:
    """Return 80 to 120 % of a delay: members that lost the registry at the same time must not return at the same
    time.
    """
    return duration_s * random.uniform(1 - _JITTER, 1 + _JITTER)
