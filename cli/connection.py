"""How a client command reaches its router."""

import argparse
import os
from collections.abc import Sequence

import grpc

from cli.last_cluster import find_address, find_tls_ca
from cluster.errors import ConfigError
from tandem import channel
from tandem.client import AsyncClient, Client
from tandem.routers import addresses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="gRPC address of a router, or several with commas (default: TANDEM_ADDRESS, else the last cluster here)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="the router's key (default: TANDEM_API_KEY)")
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="use TLS; PEM file with the authorities of the router's certificate (default: TANDEM_TLS_CA)",
    )


def open_client(arguments: argparse.Namespace) -> Client:
    """Raises ConfigError when there is no address to be found, or no file of authorities."""
    address = find_address(arguments.address)
    return Client(address, _api_key(arguments), tls_ca=tls_ca(arguments, address))


def open_async_client(arguments: argparse.Namespace) -> AsyncClient:
    """As open_client, on the running loop."""
    address = find_address(arguments.address)
    return AsyncClient(address, _api_key(arguments), tls_ca=tls_ca(arguments, address))


def open_channel(arguments: argparse.Namespace) -> grpc.Channel:
    """For calls that the client library does not have, to the first address. Raises as open_client."""
    address = find_address(arguments.address)
    return channel.open_channel(addresses(address)[0], tls_ca=tls_ca(arguments, address))


def metadata(arguments: argparse.Namespace) -> Sequence[tuple[str, str]]:
    """For a call on `open_channel`."""
    key = _api_key(arguments)
    return [("authorization", f"Bearer {key}")] if key else []


def tls_ca(arguments: argparse.Namespace, address: str) -> str | None:
    """PEM file with the authorities to judge the router by; None: it is reached in plaintext. Raises ConfigError."""
    path = find_tls_ca(arguments.tls_ca, address)
    if path is not None and not os.access(path, os.R_OK):
        raise ConfigError(f"cannot read --tls-ca {path}")
    return path


def _api_key(arguments: argparse.Namespace) -> str | None:
    key: str | None = arguments.api_key or os.environ.get("TANDEM_API_KEY")
    return key
