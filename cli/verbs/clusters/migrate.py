"""`tandem migrate`: move running sequences to another decode worker."""

import argparse
import json

from cli import connection
from cli.argument_types import whole_number
from tandem.v1 import admin_pb2

HELP = "move a decode worker's running sequences, with their KV, to another one; their streams continue"
_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument("source", metavar="SOURCE", help="the decode worker's name, as `tandem status` lists it")
    parser.add_argument(
        "--to",
        metavar="TARGET",
        default="",
        help="the target decode worker (default: placement chooses one for each sequence)",
    )
    parser.add_argument(
        "--max",
        metavar="N",
        type=whole_number(1, (1 << 32) - 1),
        default=0,
        help="move at most N sequences (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Move this router's sequences only. A sequence that cannot move continues where it is, which is not an error."""
    request = admin_pb2.MigrateRequest(source=arguments.source, target=arguments.to, max_sequences=arguments.max)
    answer = connection.ask(
        arguments, lambda admin, metadata: admin.Migrate(request, timeout=_TIMEOUT_S, metadata=metadata)
    )
    if arguments.json:
        print(json.dumps({"moved": answer.num_moved, "kept": answer.num_kept}))
    else:
        print(f"{answer.num_moved} sequence(s) moved, {answer.num_kept} stayed or were prefilled again")
    return 0
