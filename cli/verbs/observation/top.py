"""`tandem top`: pools, members, load, KV, rates, latencies and requests, as they change."""

import argparse
import os
import sys

from cli import connection
from cli.argument_types import seconds
from cluster.errors import ConfigError

_CANNOT_DRAW = ("dumb", "unknown")  # values of TERM
HELP = "watch the cluster: members, load, KV, rates, latencies, and requests with their phase"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print one screen and exit")
    parser.add_argument("--json", action="store_true", help="with --once: print one JSON object")
    parser.add_argument(
        "--interval-s", type=seconds, metavar="X", default=1.0, help="seconds between two updates (default: 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the screen, or with --once print it. Raises ConfigError, and with --once the client library's errors."""
    if arguments.json and not arguments.once:
        raise ConfigError("--json needs --once")
    if not arguments.once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`tandem top` needs a terminal; use --once where there is none")
    if not arguments.once and os.environ.get("TERM", "").lower() in _CANNOT_DRAW:
        raise ConfigError(
            "`tandem top` needs a terminal that can move its cursor, and TERM says that this one cannot; use --once"
        )
    from cli.top.session import (
        Cluster,  # imported here: rich takes a tenth of a second
        Session,
        print_once,
    )

    cluster = Cluster(arguments)
    if arguments.once:
        print_once(cluster.overview({}), as_json=arguments.json)
        return 0
    Session(cluster, arguments.interval_s).run()
    return 0
