"""`tandem ui`: the address of the page at /ui, with the admin key for it."""

import argparse

from cli import connection
from cli.local.last_cluster import find_http_address, find_tls_ca

HELP = "print the address of the cluster's page, with the admin key that it asks for"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--http-address",
        metavar="HOST:PORT",
        help="HTTP address of a router (default: TANDEM_HTTP_ADDRESS or the last local cluster)",
    )
    connection.add_credentials(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the address, with the key after `#`: browsers do not send that part to a server; the page reads and removes
    it. Raises ConfigError.
    """
    address = find_http_address(arguments.http_address)
    scheme = "https" if find_tls_ca(arguments.tls_ca, address) else "http"
    key = connection.operator_key(arguments, address)
    print(f"{scheme}://{address}/ui" + (f"#key={key}" if key else ""))
    return 0
