"""The connection of a client command to a router."""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import grpc

from cli.local.last_cluster import find_address, find_admin_key, find_tls_ca
from cluster.accounts.key_store import configured_key
from cluster.errors import ConfigError
from cluster.settings.config_sources import setting_outside_flags
from tandem import channel
from tandem.client import AsyncClient, Client
from tandem.errors import TandemError, error_from_rpc
from tandem.routers import addresses, is_reachable
from tandem.v1 import admin_pb2, admin_pb2_grpc

Metadata: TypeAlias = Sequence[tuple[str, str]]
Answer = TypeVar("Answer")
Call: TypeAlias = Callable[[admin_pb2_grpc.AdminStub, Metadata], Answer]
_FOLLOW_TIMEOUT_S = 10.0


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
    key = operator_key(arguments, address)
    return [("authorization", f"Bearer {key}")] if key else []


def tls_ca(arguments: argparse.Namespace, address: str) -> str | None:
    """PEM file with the router's certificate authorities; None: no TLS. Raises ConfigError."""
    path = find_tls_ca(arguments.tls_ca, address)
    if path is not None and not os.access(path, os.R_OK):
        raise ConfigError(f"cannot read --tls-ca {path}")
    return path


def tls_server_name(arguments: argparse.Namespace) -> str | None:
    """Return the name to verify in the certificates of routers and workers; None: the host of each address."""
    return arguments.tls_server_name or setting_outside_flags("tls_server_name") or None


def client_key(arguments: argparse.Namespace, address: str) -> str:
    """Return the key with which to generate at the router at `address`; empty: none. Raises ConfigError."""
    return _given_key(arguments) or _environment_key("api_key") or find_admin_key(address)


def _given_key(arguments: argparse.Namespace) -> str:
    return configured_key(arguments.api_key or "", arguments.api_key_file or "", "--api-key")


def _environment_key(name: str) -> str:
    variable = f"TANDEM_{name.upper()}"
    key, file = os.environ.get(variable, ""), os.environ.get(f"{variable}_FILE", "")
    return configured_key(key, file, f"--{name.replace('_', '-')}")
