"""How the Redis of a cluster is named: the forms of `--redis`, read strictly, and shown without what is secret in them.

    redis://[user:password@]host[:port][/db]                         one server; rediss:// with TLS
    unix://[user:password@]/path/to/socket                           one server on this machine
    redis+sentinel://[user:password@]host[:port],.../[service][/db]  whoever its Sentinels call the master of `service`
    redis+cluster://[user:password@]host[:port],...                  a Redis Cluster, found through any of these nodes

`rediss+sentinel://` and `rediss+cluster://` are the same with TLS. What stands behind a question mark are redis-py's
connection options. User and password are the data nodes'; Sentinels that ask for their own have them as the options
`sentinel_username` and `sentinel_password`. No error says a part of the URL that may be a password: one whose special
characters are not percent-encoded is cut anywhere.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.errors import ConfigError

_PORT = 6379
_SENTINEL_PORT = 26379
_SERVICE = "mymaster"  # what Redis's own example of a Sentinel calls it
_HINT = "special characters in a password must be percent-encoded"


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
    hosts: tuple[tuple[str, int], ...] = ()  # none: a socket
    path: str = ""  # of a socket
    service: str = ""  # that Sentinels watch
    database: int = 0
    options: str = field(default="", repr=False)  # as they stand behind the question mark

    @property
    def place(self) -> str:
        """Where it is, for people."""
        if self.form is RedisForm.SOCKET:
            return self.path
        hosts = ",".join(_shown(host, port) for host, port in self.hosts)
        return f"{hosts} (Sentinels of {self.service})" if self.form is RedisForm.SENTINEL else hosts

    def of_one(self) -> str:
        """The URL, as redis-py reads it, of the first host or the socket alone, with all else that was said."""
        credentials = f"{self.credentials}@" if self.credentials else ""
        options = f"?{self.options}" if self.options else ""
        if self.form is RedisForm.SOCKET:
            return f"unix://{credentials}{self.path}{options}"
        scheme = "rediss" if self.is_tls else "redis"
        return f"{scheme}://{credentials}{_shown(*self.hosts[0])}/{self.database}{options}"


def read_redis_url(text: str) -> RedisUrl:
    """Raises ConfigError."""
    scheme, found, rest = text.partition("://")
    forms = {str(form): (form, False) for form in RedisForm}
    forms |= {f"rediss{form.removeprefix('redis')}": (form, True) for form in RedisForm if form is not RedisForm.SOCKET}
    if not found or scheme not in forms:
        raise ConfigError(f"--redis must be a URL that begins with one of {', '.join(f'{name}://' for name in forms)}")
    form, is_tls = forms[scheme]
    rest, _, options = rest.partition("?")
    authority, slash, path = rest.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    if form is RedisForm.SOCKET:
        if hosts or not path:
            raise ConfigError(f"--redis: a socket is named unix:///path/to/socket; {_HINT}")
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


def _hosts(text: str, form: RedisForm) -> tuple[tuple[str, int], ...]:
    default = _SENTINEL_PORT if form is RedisForm.SENTINEL else _PORT
    hosts = tuple(_host(item.strip(), default) for item in text.split(","))
    if form is RedisForm.SERVER and len(hosts) > 1:
        raise ConfigError("--redis: several hosts belong to redis+sentinel:// or redis+cluster://")
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
            raise ConfigError("--redis: the service that the Sentinels watch stands before the database: /mymaster/0")
    if "/" in service or (number and not (number.isascii() and number.isdigit())):
        raise ConfigError(f"--redis: the database must be a number; {_HINT}")
    database = int(number or 0)
    if form is RedisForm.CLUSTER and database:
        raise ConfigError("--redis: a Redis Cluster has database 0 only")
    return service, database


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
