"""`tandem migrate`: running sequences go on at another decode worker."""

import argparse
import json

import grpc

from cli import connection
from tandem.v1 import admin_pb2, admin_pb2_grpc

HELP = "move a decode worker's running sequences to another one, KV and all; their streams go on"
_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument("source", metavar="SOURCE", help="the decode worker's name, as `tandem status` lists it")
    parser.add_argument("--to", metavar="TARGET", default="", help="another one (default: placement chooses for each)")
    parser.add_argument("--max", metavar="N", type=_positive, default=0, help="at most so many (default: all)")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(arguments: argparse.Namespace) -> int:
    """This router's sequences only. What cannot move goes on where it is, so that is no failure of the command."""
    answer = _ask(arguments)
    if arguments.json:
        print(json.dumps({"moved": answer.num_moved, "kept": answer.num_kept}))
    else:
        print(f"{answer.num_moved} sequence(s) moved, {answer.num_kept} stayed or were prefilled again")
    return 0


def _ask(arguments: argparse.Namespace) -> admin_pb2.MigrateResponse:
    request = admin_pb2.MigrateRequest(source=arguments.source, target=arguments.to, max_sequences=arguments.max)

    def call(channel: grpc.Channel, metadata: connection.Metadata) -> admin_pb2.MigrateResponse:
        answer: admin_pb2.MigrateResponse = admin_pb2_grpc.AdminStub(channel).Migrate(
            request, timeout=_TIMEOUT_S, metadata=metadata
        )
        return answer

    return connection.ask(arguments, call)


def _positive(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, not {text!r}")
    return number
