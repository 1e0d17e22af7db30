"""How a client command reaches its router."""

import argparse
import os
from collections.abc import Sequence

from cli.last_cluster import find_address
from tandem.client import AsyncClient, Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="a router's gRPC address (default: TANDEM_ADDRESS, else the cluster last started here)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="the router's key (default: TANDEM_API_KEY)")


def open_client(arguments: argparse.Namespace) -> Client:
    """Raises ConfigError when there is no address to be found."""
    return Client(find_address(arguments.address), _api_key(arguments))


def open_async_client(arguments: argparse.Namespace) -> AsyncClient:
    """As open_client, on the running loop."""
    return AsyncClient(find_address(arguments.address), _api_key(arguments))


def metadata(arguments: argparse.Namespace) -> Sequence[tuple[str, str]]:
    """For a call that the client library does not have."""
    key = _api_key(arguments)
    return [("authorization", f"Bearer {key}")] if key else []


def _api_key(arguments: argparse.Namespace) -> str | None:
    key: str | None = arguments.api_key or os.environ.get("TANDEM_API_KEY")
    return key
