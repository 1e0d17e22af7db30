"""Who is in the cluster, kept in Redis as leases that their holders renew.

A member is one key that lapses unless it is renewed. Beside it stands, for a day, which incarnation registered last:
renewal compares with that inside a script, so a process that was stopped and wakes up can never take its successor's
place, whether or not either lease has lapsed meanwhile. The generation, a number that grows with every registration by
Redis's own clock, says who is newer where a Redis that lost everything was told of the older one first. Every change is
published, so watchers wait for news instead of polling; they still look now and then, as a lapse publishes nothing.

Owns the keys and scripts. Decides nothing about members: a lapsed lease only means that no sign of life came here.
While Redis cannot be reached, refuses or has lost what it was told, it is in doubt: who is missing there may live.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from redis.asyncio.client import PubSub
from redis.commands.core import AsyncScript
from redis.exceptions import ResponseError

from cluster.clock import Clock, MonotonicClock
from cluster.errors import Fenced, RegistryUnavailable
from cluster.member import Member, from_json, to_json
from cluster.messages import MemberId
from cluster.registry.redis_client import REDIS_ERRORS, open_redis, words

Answer = TypeVar("Answer")

_INCARNATION_KEPT_MS = 24 * 3600 * 1000
_JITTER = 0.2
_FIRST_QUESTIONS = 3

# KEYS: lease, incarnation, members, channel, generation. ARGV: id, incarnation, member, lease in ms, incarnation kept
# in ms, generation (0: it has not registered here). Renewing and leaving answer (the incarnation that registered since,
# or '', whether the lease had lapsed).
_WRITE = """
local before = redis.call('GET', KEYS[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[5])
redis.call('SET', KEYS[5], generation, 'PX', ARGV[5])
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
redis.call('SADD', KEYS[3], ARGV[1])
if before ~= ARGV[3] then redis.call('PUBLISH', KEYS[4], ARGV[1]) end
"""
_COMPARE = """
local current, generation = redis.call('GET', KEYS[2]), tonumber(ARGV[6])
local newest = tonumber(redis.call('GET', KEYS[5])) or generation
if current and current ~= ARGV[2] and newest >= generation then return {current, 0} end
"""
_REGISTER = (
    """
local now = redis.call('TIME')
local newest = tonumber(redis.call('GET', KEYS[5])) or 0
local generation = math.max(now[1] * 1000 + math.floor(now[2] / 1000), newest + 1)
"""
    + _WRITE
    + "return generation"
)
_RENEW = _COMPARE + _WRITE + "return {'', before and 0 or 1}"
_LEAVE = (
    _COMPARE
    + """
redis.call('DEL', KEYS[1], KEYS[2], KEYS[5])
redis.call('SREM', KEYS[3], ARGV[1])
redis.call('PUBLISH', KEYS[4], ARGV[1])
return {'', 0}
"""
)
# KEYS: members. ARGV: prefix of the leases. Forgets the ids whose lease has lapsed; their renewal brings them back.
_MEMBERS = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local member = redis.call('GET', ARGV[1] .. id)
    if member then found[#found + 1] = member else redis.call('SREM', KEYS[1], id) end
end
return found
"""


class Registry:
    """One process's view of the registry. Every call ends within `timeout_s`, or raises RegistryUnavailable."""

    def __init__(
        self,
        *,
        url: str,
        cluster_name: str,
        lease_s: float,
        timeout_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self.lease_s = lease_s
        self._timeout_s = timeout_s
        self._clock = clock or MonotonicClock()
        self._read_at_s = self._clock.now_s()
        self._is_gone = False
        self._doubted_at_s = -float("inf")  # when it was last back, or had lost a lease of somebody who renews it
        self._generations: dict[MemberId, int] = {}  # of those that registered here and have not left
        self._missing: set[MemberId] = set()  # of those, in the newest snapshot
        self._prefix = f"{{{cluster_name}}}:"  # braces: all keys on one node of a Redis cluster
        self._redis = open_redis(url, timeout_s)
        self._register = self._redis.register_script(_REGISTER)
        self._renew = self._redis.register_script(_RENEW)
        self._leave = self._redis.register_script(_LEAVE)
        self._members = self._redis.register_script(_MEMBERS)
        self._scripts: dict[str, AsyncScript] = {}  # of those who keep something else here

    @property
    def age_s(self) -> float:
        """How old the newest snapshot is."""
        return self._clock.now_s() - self._read_at_s

    async def ping(self) -> None:
        """It answers, and lets this process in: the question is one that will be asked again and again. A process that
        has just started is slow itself, so one answer that is late is no reason to end."""
        for _ in range(_FIRST_QUESTIONS - 1):
            with suppress(RegistryUnavailable):
                await self.members()
                return
        await self.members()

    async def register(self, member: Member) -> None:
        """Takes the place of whichever incarnation of this member was there: the newest start wins."""
        answer = await self._call(self._register(self._keys(member.id), self._arguments(member)))
        self._generations[member.id] = int(answer)

    async def renew(self, member: Member) -> None:
        """Extends the lease and replaces what it says; brings it back where it had lapsed. Raises Fenced when another
        incarnation registered since."""
        current, had_lapsed = await self._call(self._renew(self._keys(member.id), self._arguments(member)))
        self._not_fenced(member, current)
        if had_lapsed:
            self._doubt()

    async def leave(self, member: Member) -> None:
        """Ends the lease at once. Raises Fenced."""
        arguments = self._arguments(member)
        self._generations.pop(member.id, None)
        current, _ = await self._call(self._leave(self._keys(member.id), arguments))
        self._not_fenced(member, current)

    async def members(self) -> tuple[Member, ...]:
        """All whose leases are valid, in the order of their ids. What cannot be read (a version of the far future) is
        left out: nobody here could talk to it."""
        texts = await self._call(self._members([self._prefix + "members"], [self._prefix + "lease:"]))
        self._read_at_s = self._clock.now_s()
        found = tuple(sorted(_readable(texts), key=lambda member: member.id))
        missing = set(self._generations).difference(member.id for member in found)
        if missing - self._missing:
            self._doubt()
        self._missing = missing
        return found

    async def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """A snapshot at once, and another whenever one differs. While the registry is gone nothing new comes, so what
        was seen last stays. As long as it is in doubt, and for one lease after, those missing from it are kept: members
        need that long to come back to a Redis that has lost every lease."""
        believed: tuple[Member, ...] | None = None
        async with aclosing(self.news("changes")) as news:
            async for _ in news:
                try:
                    found = await self.members()
                except RegistryUnavailable:
                    continue
                if believed is not None and self._clock.now_s() - self._doubted_at_s < self.lease_s:
                    found = with_missing(found, believed)
                if found != believed:
                    believed = found
                    yield found

    async def news(self, channel: str) -> AsyncGenerator[None, None]:
        """Comes at once, whenever something is published there, and now and then by itself, as what is published while
        nobody listens is lost. While the registry is gone nothing comes."""
        while True:
            try:
                async with self._redis.pubsub() as subscription:
                    await self._call(self._redis.subscribe(subscription, self._prefix + channel))
                    while True:
                        yield
                        await self._until_published(subscription, channel)
            except (RegistryUnavailable, *REDIS_ERRORS):
                self._is_gone = True
                await asyncio.sleep(jittered(self.lease_s / 5))

    async def evaluate(self, script: str, names: Sequence[str], arguments: Sequence[str | int]) -> list[str]:
        """Runs a script over keys of these names, which are this cluster's own."""
        run = self._scripts.get(script)
        if run is None:
            run = self._scripts[script] = self._redis.register_script(script)
        return await self._call(run([self._prefix + name for name in names], arguments))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _until_published(self, subscription: PubSub, channel: str) -> None:
        """Or until it is time to look. A connection that says nothing is asked for a sign of life: one that a network
        cut in half would stay silent for ever. Raises RegistryUnavailable, REDIS_ERRORS."""
        pause_s = jittered(self.lease_s / 5)
        async with asyncio.timeout(pause_s + self._timeout_s):
            published = await _heeding_cancel(subscription.get_message(timeout=pause_s))
        if published is None:
            await self._call(self._redis.subscribe(subscription, self._prefix + channel))

    async def _call(self, answer: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_s):
                value = await _heeding_cancel(answer)
        except ResponseError as error:
            self._is_gone = True
            if "READONLY" in str(error):  # the master has become a replica
                await self._redis.drop_idle()
            raise RegistryUnavailable(f"Redis at {self._redis.place} refuses: {words(error)}") from error
        except (*REDIS_ERRORS, TimeoutError) as error:
            self._is_gone = True
            raise RegistryUnavailable(f"cannot reach Redis at {self._redis.place}: {words(error)}") from error
        if self._is_gone:
            self._is_gone = False
            self._doubt()
        return value

    def _doubt(self) -> None:
        """Whoever is missing now may have been lost by Redis alone."""
        self._doubted_at_s = self._clock.now_s()

    def _keys(self, member_id: MemberId) -> list[str]:
        return [
            f"{self._prefix}lease:{member_id.id}",
            f"{self._prefix}incarnation:{member_id.id}",
            f"{self._prefix}members",
            f"{self._prefix}changes",
            f"{self._prefix}generation:{member_id.id}",
        ]

    def _arguments(self, member: Member) -> list[str | int]:
        lease_ms = max(1, round(self.lease_s * 1000))
        generation = self._generations.get(member.id, 0)
        return [member.id.id, member.id.incarnation, to_json(member), lease_ms, _INCARNATION_KEPT_MS, generation]

    def _not_fenced(self, member: Member, current: str) -> None:
        if current:
            raise Fenced(f"{member.id} is no longer {member.id.id}: incarnation {current} registered since")


async def _heeding_cancel(answer: Awaitable[Answer]) -> Answer:
    """redis-py sends through `asyncio.wait_for`, which on Python 3.11 drops a cancel that comes together with the end
    of what it waits for: the task would go on for ever. What was dropped is raised here."""
    task = asyncio.current_task()
    assert task is not None
    cancels_before = task.cancelling()
    value = await answer
    if task.cancelling() > cancels_before:
        raise asyncio.CancelledError
    return value


def with_missing(found: tuple[Member, ...], before: tuple[Member, ...]) -> tuple[Member, ...]:
    """What was found, and of what was there before the ids that nobody holds now."""
    ids = {member.id.id for member in found}
    kept = [member for member in before if member.id.id not in ids]
    return tuple(sorted([*found, *kept], key=lambda member: member.id))


def jittered(duration_s: float) -> float:
    """Members that lost the registry together must not come back together."""
    return duration_s * random.uniform(1 - _JITTER, 1 + _JITTER)


def _readable(texts: list[str]) -> list[Member]:
    members = []
    for text in texts:
        try:
            members.append(from_json(text))
        except ValueError:
            continue
    return members
