"""`tandem ui`: the address of the page at /ui, with the admin key for it."""

import argparse
import sys

from cli import connection

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
    it. With `--tls-server-name` that name is the host, because a browser verifies no other one. Raises ConfigError.
    """
    address = connection.find_http_address(arguments.http_address)
    key = connection.operator_key(arguments, address)
    scheme, shown = "http", address
    if connection.tls_ca(arguments, address):
        scheme = "https"
        if name := arguments.tls_server_name:
            host, _, port = address.rpartition(":")
            shown = f"{name}:{port}"
            sys.stderr.write(f"the browser's machine must resolve {name} to {host}\n")
    print(f"{scheme}://{shown}/ui" + (f"#key={key}" if key else ""))
    return 0
