"""The client behind `--redis`, whatever stands there: one server, a socket, Sentinels with their master, a cluster.

Owns the connections. Every attempt is one attempt: whoever calls has the patience, and asks again. Never retries, logs,
or says a password.
"""

from typing import Any, TypeAlias

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisClusterException, RedisError

from cluster.errors import ConfigError
from cluster.registry.redis_url import RedisForm, RedisUrl, read_redis_url

# All that a call may raise where Redis is gone, elsewhere, full, loading, read-only or not itself.
REDIS_ERRORS = (RedisError, RedisClusterException, OSError)
_MOVES = 2  # a cluster's answer that a key is elsewhere, or a node that has just died, is followed so often

_Kwargs: TypeAlias = dict[str, Any]


class RedisClient:
    """Made by `open_redis`. No call connects before the first one that needs it."""

    def __init__(self, url: RedisUrl, client: Redis | RedisCluster, sentinels: Sentinel | None) -> None:
        self.place = url.place
        self._client = client
        self._sentinels = sentinels

    def register_script(self, text: str) -> AsyncScript:
        """Called, it runs where its keys are; a Redis that does not know it, or no longer, is told it."""
        return self._client.register_script(text)

    def pubsub(self) -> PubSub:
        """To be entered, then subscribed by `subscribe`. On a cluster every node hears what is published on any."""
        return self._client.pubsub()

    async def subscribe(self, news: PubSub, channel: str) -> None:
        """Returns when it is so, with all that is published from here on to come. May be asked again: an answer is the
        sign of life of a connection that says nothing. Raises REDIS_ERRORS."""
        await self._client.initialize()  # a cluster's client must know the nodes
        await news.subscribe(channel)
        await news.get_message(timeout=None)

    async def drop_idle(self) -> None:
        """Forgets the connections that are not in use: whoever answered may not be the master any more."""
        if isinstance(self._client, RedisCluster):
            await self._client.aclose()
        else:
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def aclose(self) -> None:
        await self._client.aclose()
        if isinstance(self._client, RedisCluster):  # which closes nothing that it wants to find anew
            await self._client.nodes_manager.aclose()
            await self._client.nodes_manager.aclose("startup_nodes")
        if self._sentinels is not None:
            await self._sentinels.aclose()


def open_redis(text: str, timeout_s: float) -> RedisClient:
    """Raises ConfigError."""
    url = read_redis_url(text)
    try:
        match url.form:
            case RedisForm.SENTINEL:
                return _by_sentinels(url, timeout_s)
            case RedisForm.CLUSTER:
                return RedisClient(url, _cluster(url, timeout_s), None)
            case _:
                settings = {"decode_responses": True, "retry": _once(), **_timeouts(timeout_s)}
                return RedisClient(url, _checked(Redis.from_url(url.of_one(), **settings)), None)
    except (ValueError, TypeError, RedisError, RedisClusterException) as error:
        raise ConfigError(f"--redis: {error}") from None


def words(error: BaseException) -> str:
    """What a person needs to know of it. Sentinels tell what each of them answered behind a description of theirs."""
    if isinstance(error, MasterNotFoundError):
        head, *answers = str(error).split(" - ")
        causes = "; ".join(answer.partition(", <redis.")[0] for answer in answers)
        return f"{head.partition(' : ')[0]}{causes and f': {causes}'}"
    return str(error) or type(error).__name__


def _by_sentinels(url: RedisUrl, timeout_s: float) -> RedisClient:
    options: _Kwargs = {**parse_url(url.of_one())}
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    if url.is_tls:
        options["ssl"] = True
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    shared = {name: value for name, value in options.items() if name.startswith("ssl")}
    # One that does not answer must leave the others their part of a call's time.
    patience = _timeouts(timeout_s / (len(url.hosts) + 1))
    sentinels: Sentinel = Sentinel(  # type: ignore[no-untyped-call]
        url.hosts, sentinel_kwargs={**own, **shared, "retry": _once(), **patience}
    )
    settings = {"decode_responses": True, "retry": _once(), **_timeouts(timeout_s), **options}
    return RedisClient(url, _checked(sentinels.master_for(url.service, **settings)), sentinels)


def _cluster(url: RedisUrl, timeout_s: float) -> RedisCluster:
    return RedisCluster.from_url(
        url.of_one(),
        startup_nodes=[ClusterNode(host, port) for host, port in url.hosts[1:]],
        decode_responses=True,
        retry=Retry(NoBackoff(), _MOVES),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s / (len(url.hosts) + 1),
    )


def _checked(client: Redis) -> Redis:
    """What a connection would not take shows now. Raises TypeError, RedisError."""
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)
    return client


def _once() -> Retry:
    return Retry(NoBackoff(), 0)


def _timeouts(timeout_s: float) -> _Kwargs:
    return {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
