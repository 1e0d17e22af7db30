"""The client for the Redis that `--redis` names, and the strict parser of that URL.

    redis://[user:password@]host[:port][/db]                         one server; rediss:// with TLS
    unix://[user:password@]/path/to/socket                           one server on this machine
    redis+sentinel://[user:password@]host[:port],.../[service][/db]  the master of `service`, found through Sentinels
    redis+cluster://[user:password@]host[:port],...                  a Redis Cluster, found through any of these nodes

`rediss+sentinel://` and `rediss+cluster://` are the same with TLS. Options after a question mark are redis-py's
connection options. User and password are those of the data nodes; Sentinels with their own credentials get them from
the options `sentinel_username` and `sentinel_password`.

Owns the connections. Never retries (the caller does) and never logs. No error message contains a part of the URL that
may be a password, because a password whose special characters are not percent-encoded splits the URL anywhere.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import AuthenticationError, RedisClusterException, RedisError

from cluster.errors import ConfigError

# Every exception of a call when Redis is unreachable, moved, full, loading or read-only.
REDIS_ERRORS = (RedisError, RedisClusterException, OSError)
_TEXT = {"decode_responses": True, "encoding_errors": "replace"}  # another program may write any bytes
_MOVES = 2  # redirections that a call follows when a key has moved or a node has just died

_PORT = 6379
_SENTINEL_PORT = 26379
_SERVICE = "mymaster"  # the name in Redis's example configuration
_NO_PASSWORD = ("HELLO AUTH", "Authentication required")  # answers to a client that gives none
_HINT = "special characters in a password must be percent-encoded"

Answer = TypeVar("Answer")
_Kwargs: TypeAlias = dict[str, Any]


class RedisForm(StrEnum):
    SERVER = "redis"
    SOCKET = "unix"
    SENTINEL = "redis+sentinel"
    CLUSTER = "redis+cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    form: RedisForm
    is_tls: bool = False
    credentials: str = field(default="", repr=False)  # user:password, percent-encoded
    hosts: tuple[tuple[str, int], ...] = ()  # empty for a socket
    path: str = ""  # of the socket
    service: str = ""  # monitored by Sentinels
    database: int = 0
    options: str = field(default="", repr=False)  # after the question mark

    @property
    def place(self) -> str:
        """Return the address for messages, without credentials."""
        if self.form is RedisForm.SOCKET:
            return self.path
        hosts = ",".join(_shown(host, port) for host, port in self.hosts)
        return f"{hosts} (Sentinels of {self.service})" if self.form is RedisForm.SENTINEL else hosts

    def of_one(self) -> str:
        """Return the URL for redis-py: the first host or the socket, with credentials, database and options."""
        credentials = f"{self.credentials}@" if self.credentials else ""
        options = f"?{self.options}" if self.options else ""
        if self.form is RedisForm.SOCKET:
            return f"unix://{credentials}{self.path}{options}"
        scheme = "rediss" if self.is_tls else "redis"
        return f"{scheme}://{credentials}{_shown(*self.hosts[0])}/{self.database}{options}"


def read_redis_url(text: str) -> RedisUrl:
    """Parse a Redis URL. Raises ConfigError."""
    scheme, found, rest = text.partition("://")
    forms = {str(form): (form, False) for form in RedisForm}
    forms |= {f"rediss{form.removeprefix('redis')}": (form, True) for form in RedisForm if form is not RedisForm.SOCKET}
    if not text:
        raise ConfigError("--redis is needed: a URL such as redis://127.0.0.1:6379/0")
    if not found or scheme not in forms:
        raise ConfigError(f"--redis must be a URL that begins with one of {', '.join(f'{name}://' for name in forms)}")
    form, is_tls = forms[scheme]
    rest, _, options = rest.partition("?")
    authority, slash, path = rest.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    if form is RedisForm.SOCKET:
        if hosts or not path:
            raise ConfigError(f"--redis: a Unix socket is written as unix:///path/to/socket; {_HINT}")
        return RedisUrl(form=form, credentials=credentials, path=slash + path, options=options)
    service, database = _service_and_database(form, path)
    return RedisUrl(
        form=form,
        is_tls=is_tls,
        credentials=credentials,
        hosts=_hosts(hosts, form),
        service=service,
        database=database,
        options=options,
    )


class RedisClient:
    """A client of one Redis. `open_redis` creates it. It connects at the first call that needs a connection."""

    def __init__(self, url: RedisUrl, client: Redis | RedisCluster, sentinels: Sentinel | None) -> None:
        self.place = url.place
        self._client = client
        self._sentinels = sentinels

    def register_script(self, text: str) -> AsyncScript:
        """Return a callable that runs the script on the node of its keys and loads it there if it is missing."""
        return self._client.register_script(text)

    def pubsub(self) -> PubSub:
        """Return a subscription. Enter it with `async with`, then call `subscribe`. A cluster forwards messages between
        its nodes."""
        return self._client.pubsub()

    async def subscribe(self, news: PubSub, channel: str) -> None:
        """Subscribe, and return when the subscription is confirmed; later messages are delivered. Calling it again
        checks a silent connection. Raises REDIS_ERRORS.
        """
        await self._client.initialize()  # a cluster's client must know the nodes
        await news.subscribe(channel)
        await news.get_message(timeout=None)

    async def drop_idle(self) -> None:
        """Close the connections that are not in use, because another server may be the master now."""
        if isinstance(self._client, RedisCluster):
            await self._client.aclose()
        else:
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def aclose(self) -> None:
        await self._client.aclose()
        if isinstance(self._client, RedisCluster):  # its aclose() leaves the nodes' connections open
            await self._client.nodes_manager.aclose()
            await self._client.nodes_manager.aclose("startup_nodes")
        if self._sentinels is not None:
            await self._sentinels.aclose()


def open_redis(text: str, timeout_s: float) -> RedisClient:
    """Return a client for this URL; it connects later. Raises ConfigError."""
    url = read_redis_url(text)
    try:
        match url.form:
            case RedisForm.SENTINEL:
                return _by_sentinels(url, timeout_s)
            case RedisForm.CLUSTER:
                return RedisClient(url, _cluster(url, timeout_s), None)
            case _:
                settings = {**_TEXT, "retry": _once(), **_timeouts(timeout_s)}
                return RedisClient(url, _checked(Redis.from_url(url.of_one(), **settings)), None)
    except (ValueError, TypeError, RedisError, RedisClusterException) as error:
        raise ConfigError(f"--redis: {error}") from None


def problem(place: str, error: BaseException) -> str:
    """Return one line with the reason why Redis does not serve, and the remedy."""
    if any(sign in str(error) for sign in _NO_PASSWORD):
        return f"Redis at {place} needs a password; give it in --redis, as redis://USER:PASSWORD@HOST:PORT"
    if isinstance(error, AuthenticationError):
        return f"Redis at {place} refuses the password; correct it in --redis"
    return f"cannot reach Redis at {place}: {words(error).rstrip('.')}; start it, or correct --redis"


def words(error: BaseException) -> str:
    """Return the error as one line for an operator, without the Sentinels' descriptions of themselves."""
    if isinstance(error, MasterNotFoundError):
        head, *answers = str(error).split(" - ")
        causes = "; ".join(answer.partition(", <redis.")[0] for answer in answers)
        return f"{head.partition(' : ')[0]}{causes and f': {causes}'}"
    return str(error) or type(error).__name__


async def cancellable(answer: Awaitable[Answer]) -> Answer:
    """Await a call of redis-py, and raise a cancellation that redis-py dropped: it sends through `asyncio.wait_for`,
    which on Python 3.11 drops a cancellation that arrives together with the result.
    """
    task = asyncio.current_task()
    assert task is not None
    cancels_before = task.cancelling()
    value = await answer
    if task.cancelling() > cancels_before:
        raise asyncio.CancelledError
    return value


def _by_sentinels(url: RedisUrl, timeout_s: float) -> RedisClient:
    options: _Kwargs = {**parse_url(url.of_one())}
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    if url.is_tls:
        options["ssl"] = True
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    shared = {name: value for name, value in options.items() if name.startswith("ssl")}
    # A Sentinel that does not answer must leave time for the others.
    timeouts = _timeouts(timeout_s / (len(url.hosts) + 1))
    sentinels: Sentinel = Sentinel(  # type: ignore[no-untyped-call]
        url.hosts, sentinel_kwargs={**own, **shared, "retry": _once(), **timeouts}
    )
    settings = {**_TEXT, "retry": _once(), **_timeouts(timeout_s), **options}
    return RedisClient(url, _checked(sentinels.master_for(url.service, **settings)), sentinels)


def _cluster(url: RedisUrl, timeout_s: float) -> RedisCluster:
    return RedisCluster.from_url(
        url.of_one(),
        startup_nodes=[ClusterNode(host, port) for host, port in url.hosts[1:]],
        **_TEXT,
        retry=Retry(NoBackoff(), _MOVES),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s / (len(url.hosts) + 1),
    )


def _checked(client: Redis) -> Redis:
    """Construct one connection, so that wrong options fail now. Raises TypeError, RedisError."""
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)
    return client


def _once() -> Retry:
    return Retry(NoBackoff(), 0)


def _timeouts(timeout_s: float) -> _Kwargs:
    return {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}


def _hosts(text: str, form: RedisForm) -> tuple[tuple[str, int], ...]:
    default = _SENTINEL_PORT if form is RedisForm.SENTINEL else _PORT
    hosts = tuple(_host(item.strip(), default) for item in text.split(","))
    if form is RedisForm.SERVER and len(hosts) > 1:
        raise ConfigError("--redis: several hosts need redis+sentinel:// or redis+cluster://")
    return hosts


def _host(text: str, default_port: int) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):  # the colons of an IPv6 address without a port
        host, port = text, str(default_port)
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--redis: every host must be a name or address with a port, host:port; {_HINT}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _service_and_database(form: RedisForm, path: str) -> tuple[str, int]:
    service, separator, number = path.rpartition("/")
    if form is not RedisForm.SENTINEL:
        service, number = "", path
    elif not separator:
        service, number = path or _SERVICE, ""
        if service.isdigit():
            raise ConfigError(
                "--redis: the name of the service that the Sentinels watch must precede the database, as in /mymaster/0"
            )
    if "/" in service or (number and not (number.isascii() and number.isdigit())):
        raise ConfigError(f"--redis: the database must be a number; {_HINT}")
    database = int(number or 0)
    if form is RedisForm.CLUSTER and database:
        raise ConfigError("--redis: a Redis Cluster has database 0 only")
    return service, database


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
