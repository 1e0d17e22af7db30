"""`tandem drain`: one member finishes its work and leaves."""

import argparse
import json
import sys
import time

import grpc

from cli import connection
from cluster.errors import ConfigError
from cluster.process import ExitStatus
from tandem.errors import DeadlineExceeded
from tandem.v1 import admin_pb2, admin_pb2_grpc

HELP = "ask a worker or router to take no more, finish or hand on its work, and leave"
_ASK_TIMEOUT_S = 30.0
_TIMEOUT_S = 600.0
_BECAME = {
    "drained": "has left; nothing was left undone",
    "incomplete": "has left; its grace ended before its work, which goes on elsewhere",
    "left": "has left",
    "lost": "is gone without a word: it was killed, or broke; its work goes on elsewhere",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument("member", metavar="MEMBER", help="its name, as `tandem status` lists it, or NAME@INCARNATION")
    parser.add_argument("--wait", action="store_true", help="return when it has left, and say what became of its work")
    parser.add_argument(
        "--timeout-s",
        type=float,
        metavar="X",
        default=_TIMEOUT_S,
        help=f"wait no longer than this (default: {_TIMEOUT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print one object")


def run(arguments: argparse.Namespace) -> int:
    """DRAIN_INCOMPLETE, after a wait, when work was left; CRASHED when the member ended without a word."""
    if arguments.timeout_s <= 0:
        raise ConfigError(f"--timeout-s must be positive, not {arguments.timeout_s:g}")
    began_s = time.monotonic()
    try:
        answer = _ask(arguments)
    except DeadlineExceeded as error:
        waited = f"after {arguments.timeout_s:g} s {arguments.member} is still draining"
        raise DeadlineExceeded(waited, reason=error.reason) from error
    except KeyboardInterrupt:
        sys.stderr.write(f"tandem: no longer waiting; {arguments.member} goes on draining\n")
        raise
    fallback = "left" if arguments.wait else "draining"  # of a worker that is older than the question
    if arguments.json:
        print(json.dumps({"member": answer.member, "outcome": answer.outcome or fallback}))
    else:
        took = f" ({time.monotonic() - began_s:.1f} s)" if arguments.wait else ""
        print(f"{answer.member} {_BECAME.get(answer.outcome or fallback, 'is draining')}{took}")
    match answer.outcome:
        case "incomplete":
            return ExitStatus.DRAIN_INCOMPLETE
        case "lost":
            return ExitStatus.CRASHED
    return ExitStatus.OK


def _ask(arguments: argparse.Namespace) -> admin_pb2.DrainResponse:
    request = admin_pb2.DrainRequest(member_id=arguments.member, wait=arguments.wait)
    timeout_s = arguments.timeout_s if arguments.wait else _ASK_TIMEOUT_S

    def call(channel: grpc.Channel, metadata: connection.Metadata) -> admin_pb2.DrainResponse:
        answer: admin_pb2.DrainResponse = admin_pb2_grpc.AdminStub(channel).Drain(
            request, timeout=timeout_s, metadata=metadata
        )
        return answer

    return connection.ask(arguments, call)
