"""The connection of a client command to a router.

Finds the cluster by --address, TANDEM_ADDRESS, or the cluster last started on this machine, whose file `tandem up`
writes.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import grpc

from cluster.accounts.key_store import configured_key
from cluster.auth.key_file import key_path
from cluster.errors import ConfigError
from cluster.settings.config import ClusterSettings
from cluster.settings.config_sources import setting_outside_flags
from tandem import channel
from tandem.client import AsyncClient, Client, authorization
from tandem.errors import TandemError, error_from_rpc
from tandem.routers import addresses, is_host_and_port, is_reachable
from tandem.v1 import admin_pb2, admin_pb2_grpc

Metadata: TypeAlias = Sequence[tuple[str, str]]
Answer = TypeVar("Answer")
Call: TypeAlias = Callable[[admin_pb2_grpc.AdminStub, Metadata], Answer]
_FOLLOW_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 0.0  # a person who mistyped the address waits for the answer


@dataclass(frozen=True, slots=True)
class LastCluster:
    """The file that `tandem up` keeps for other commands while it runs. `grpc` and `http` are its first router's
    addresses."""

    grpc: str
    http: str
    pid: int
    tls_ca: str = ""  # PEM file with the authorities of its certificates; empty: it does not use TLS
    more_grpc: tuple[str, ...] = ()  # addresses of its other routers
    admin_key: str = field(default="", repr=False)
    key_file: str = ""  # its cluster key
    more_http: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The gRPC addresses of all its routers, comma-separated."""
        return ",".join((self.grpc, *self.more_grpc))

    def is_at(self, address: str) -> bool:
        """Return whether each of these comma-separated addresses is a router of this cluster. Its key is sent to all of
        them."""
        own = {self.grpc, *self.more_grpc, self.http, *self.more_http}
        return own >= {one.strip() for one in address.split(",") if one.strip()}


def remember(cluster: LastCluster, environment: Mapping[str, str] | None = None) -> str:
    """Write the file; it is valid until `forget` or the end of the process. Return why it cannot be written, or an
    empty string."""
    folder = _folder(os.environ if environment is None else environment)
    draft = folder / f"draft-{cluster.pid}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("cluster-*.json"):
            if not _lives(path):
                path.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:  # it has a key
            file.write(json.dumps(asdict(cluster)))
        draft.replace(folder / f"cluster-{cluster.pid}.json")
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        return f"cannot write to {folder}: {error.strerror}"
    return ""


def forget(pid: int, environment: Mapping[str, str] | None = None) -> None:
    """Delete the file of this process, and no other."""
    with suppress(OSError):  # a folder that cannot be written
        (_folder(os.environ if environment is None else environment) / f"cluster-{pid}.json").unlink(missing_ok=True)


def running(environment: Mapping[str, str]) -> list[LastCluster]:
    """Return the clusters that run on this machine, the newest first."""
    found = [path for path in _folder(environment).glob("cluster-*.json") if _lives(path)]
    read = [(started_ns, cluster) for path in found if (cluster := _read(path)) and (started_ns := _written_ns(path))]
    return [cluster for _, cluster in sorted(read, key=lambda each: each[0], reverse=True)]


def find_http_address(told: str | None, environment: Mapping[str, str] | None = None) -> str:
    """Return the host:port of a router's HTTP API. Raises ConfigError."""
    environment = os.environ if environment is None else environment
    if address := told or environment.get("TANDEM_HTTP_ADDRESS"):
        if not is_host_and_port(address):
            raise ConfigError(f"an address must be host:port, such as 127.0.0.1:8000, not {address!r}")
        return address
    if found := running(environment):
        return found[0].http
    raise ConfigError("no cluster runs on this machine; start one with `tandem up`, or give --http-address host:port")


def find_tls_ca(told: str | None, address: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the PEM file that verifies the router at `address`, gRPC or HTTP; None means plaintext. Raises ConfigError
    if the file of TANDEM_CONFIG cannot be read."""
    environment = os.environ if environment is None else environment
    if named := told or setting_outside_flags("tls_ca", environment):
        return named
    return next((found.tls_ca or None for found in running(environment) if found.is_at(address)), None)


def find_admin_key(address: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the admin key of the local cluster with routers at `address`, gRPC or HTTP; empty: there is none."""
    environment = os.environ if environment is None else environment
    return next((found.admin_key for found in running(environment) if found.is_at(address)), "")


def find_key_file(told: str | None, address: str, environment: Mapping[str, str] | None = None) -> Path:
    """Return the key file of the cluster whose router is at `address`: the given one, else that of a cluster on this
    machine, else that of the default cluster name.
    """
    environment = os.environ if environment is None else environment
    known = (cluster.key_file for cluster in running(environment) if cluster.is_at(address))
    named = told or environment.get("TANDEM_CLUSTER_KEY_FILE") or next(known, "")
    return key_path(ClusterSettings(cluster_key_file=named))


def find_address(told: str | None, environment: Mapping[str, str] | None = None) -> str:
    """Return the gRPC host:port of a router, or of several, comma-separated. Raises ConfigError."""
    environment = os.environ if environment is None else environment
    address = told or environment.get("TANDEM_ADDRESS")
    if address:
        try:
            addresses(address)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return address
    found = running(environment)
    if not found:
        raise ConfigError("no cluster runs on this machine; start one with `tandem up`, or give --address host:port")
    return found[0].address


def _folder(environment: Mapping[str, str]) -> Path:
    """Return a folder in XDG_RUNTIME_DIR, which is deleted with the session, else in the user's cache."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    return Path(runtime or environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def _lives(path: Path) -> bool:
    return Path("/proc", path.stem.removeprefix("cluster-")).exists()


def _read(path: Path) -> LastCluster | None:
    """Return None if the file has just been deleted or another version wrote it."""
    try:
        values = json.loads(path.read_text())
        return LastCluster(
            grpc=values["grpc"],
            http=values["http"],
            pid=values["pid"],
            tls_ca=values.get("tls_ca", ""),
            more_grpc=tuple(values.get("more_grpc", ())),
            admin_key=values.get("admin_key", ""),
            key_file=values.get("key_file", ""),
            more_http=tuple(values.get("more_http", ())),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="gRPC address of one or more routers, comma-separated (default: TANDEM_ADDRESS or the last local cluster)",
    )
    add_credentials(parser)
    parser.add_argument(
        "--no-discover",
        dest="discover",
        action="store_false",
        help="use only the routers of --address: for a load balancer, or routers that are not reachable from here",
    )


def add_credentials(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="the router's API key (default: TANDEM_API_KEY; operators' commands: TANDEM_ADMIN_KEY; of a cluster that"
        " `tandem up` started here: its own)",
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the API key")
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="use TLS; PEM file with the certificate authorities of the router (default: TANDEM_TLS_CA)",
    )
    parser.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help="the name that the router's certificate has, where it does not name the host of the address"
        " (default: TANDEM_TLS_SERVER_NAME)",
    )


def open_client(arguments: argparse.Namespace) -> Client:
    """Return a client of the cluster that the arguments name. Raises ConfigError without an address, or if the --tls-ca
    file is missing."""
    address = find_address(arguments.address)
    return Client(
        address,
        client_key(arguments, address),
        tls_ca=tls_ca(arguments, address),
        tls_server_name=tls_server_name(arguments),
        discover=arguments.discover,
        connect_timeout_s=_CONNECT_TIMEOUT_S,
    )


def open_async_client(arguments: argparse.Namespace) -> AsyncClient:
    """Do what `open_client` does, for a client on the running event loop."""
    address = find_address(arguments.address)
    return AsyncClient(
        address,
        client_key(arguments, address),
        tls_ca=tls_ca(arguments, address),
        tls_server_name=tls_server_name(arguments),
        discover=arguments.discover,
        connect_timeout_s=_CONNECT_TIMEOUT_S,
    )


def ask(arguments: argparse.Namespace, call: Call[Answer]) -> Answer:
    """Make an operator's call at the first router that can be reached. Raises ConfigError as
    `open_client`, and the client library's errors."""
    return ask_first(arguments, addresses(find_address(arguments.address)), call)


def ask_first(arguments: argparse.Namespace, routers: Sequence[str], call: Call[Answer]) -> Answer:
    """Do what `ask` does, at the first of these routers that can be reached; there is at least one."""
    failure: TandemError | None = None
    for address in routers:
        try:
            return ask_one(arguments, address, call)
        except TandemError as error:
            if not error.is_lost:
                raise
            failure = error
    assert failure is not None
    raise failure


def ask_one(arguments: argparse.Namespace, address: str, call: Call[Answer]) -> Answer:
    """Do what `ask` does, at the router at `address`."""
    authorities = tls_ca(arguments, find_address(arguments.address))
    with channel.open_channel(address, tls_ca=authorities, tls_server_name=tls_server_name(arguments)) as opened:
        try:
            return call(admin_pb2_grpc.AdminStub(opened), _metadata(arguments, address))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error


def every_router(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the addresses of all routers: those of --address, and those that are registered, unless --no-discover is
    given. Raises as `ask`."""
    given = addresses(find_address(arguments.address))
    if not arguments.discover:
        return given
    members = ask(arguments, _members)
    registered = [member.address for member in members if member.role == admin_pb2.MEMBER_ROLE_ROUTER]
    return tuple(dict.fromkeys([*given, *(found for found in registered if is_reachable(found, given[0]))]))


def _members(admin: admin_pb2_grpc.AdminStub, metadata: Metadata) -> Sequence[admin_pb2.MemberStatus]:
    following = admin.Follow(admin_pb2.FollowRequest(), timeout=_FOLLOW_TIMEOUT_S, metadata=metadata)
    try:
        return list(next(iter(following)).members)
    finally:
        following.cancel()


def operator_key(arguments: argparse.Namespace, address: str) -> str:
    """Return the key for operators' calls at the router at `address`; empty: none. Raises ConfigError."""
    return _given_key(arguments) or _environment_key("admin_key") or client_key(arguments, address)


def _metadata(arguments: argparse.Namespace, address: str) -> Metadata:
    return authorization(operator_key(arguments, address))


def tls_ca(arguments: argparse.Namespace, address: str) -> str | None:
    """PEM file with the router's certificate authorities; None: no TLS. Raises ConfigError."""
    path = find_tls_ca(arguments.tls_ca, address)
    try:
        channel.channel_credentials(path, secure=False)
    except OSError as error:
        raise ConfigError(f"cannot read --tls-ca {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--tls-ca {path} holds no certificate") from error
    return path


def tls_server_name(arguments: argparse.Namespace) -> str | None:
    """Return the name to verify in the certificates of routers and workers; None: the host of each address."""
    return arguments.tls_server_name or setting_outside_flags("tls_server_name") or None


def client_key(arguments: argparse.Namespace, address: str) -> str:
    """Return the key with which to generate at the router at `address`; empty: none. Raises ConfigError."""
    return _given_key(arguments) or _environment_key("api_key") or find_admin_key(address)


def _given_key(arguments: argparse.Namespace) -> str:
    return _sent_key(arguments.api_key or "", arguments.api_key_file or "", "--api-key")


def _environment_key(name: str) -> str:
    variable = f"TANDEM_{name.upper()}"
    key, file = os.environ.get(variable, ""), os.environ.get(f"{variable}_FILE", "")
    return _sent_key(key, file, f"--{name.replace('_', '-')}")


def _sent_key(value: str, file: str, flag: str) -> str:
    key = configured_key(value, file, flag)
    try:
        authorization(key)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error
    return key
