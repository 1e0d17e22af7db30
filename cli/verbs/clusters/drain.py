"""`tandem drain`: let one member finish its work and leave."""

import argparse
import json
import sys
import time

from cli import connection
from cli.argument_types import seconds
from cluster.process import ExitStatus
from tandem.enum_words import DRAIN_OUTCOMES
from tandem.errors import DeadlineExceeded
from tandem.v1 import admin_pb2

HELP = "let a worker or router finish or move its work, without accepting more, and then leave"
_ASK_TIMEOUT_S = 30.0
_TIMEOUT_S = 600.0
_BECAME = {
    "drained": "has left; all its work was finished or moved",
    "incomplete": "has left before all its work was finished; other workers resume the rest",
    "lost": "was lost: it was killed or crashed; other workers resume its work",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument(
        "member", metavar="MEMBER", help="name of the member as in `tandem status`, or NAME@INCARNATION"
    )
    parser.add_argument("--wait", action="store_true", help="wait until it has left, and report how the drain ended")
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="X",
        default=_TIMEOUT_S,
        help=f"timeout of --wait in seconds (default: {_TIMEOUT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return DRAIN_INCOMPLETE if work was left after --wait, and CRASHED if the member was lost."""
    began_s = time.monotonic()
    try:
        answer = _ask(arguments)
    except DeadlineExceeded as error:
        waited = f"after {arguments.timeout_s:g} s {arguments.member} is still draining"
        raise DeadlineExceeded(waited, reason=error.reason) from error
    except KeyboardInterrupt:
        sys.stderr.write(f"tandem: no longer waiting; {arguments.member} continues to drain\n")
        raise
    outcome = DRAIN_OUTCOMES.label(answer.outcome) or "draining"
    if arguments.json:
        print(json.dumps({"member": answer.member, "outcome": outcome}))
    else:
        took = f" ({time.monotonic() - began_s:.1f} s)" if arguments.wait else ""
        print(f"{answer.member} {_BECAME.get(outcome, f'is {outcome}')}{took}")
    match outcome:
        case "incomplete":
            return ExitStatus.DRAIN_INCOMPLETE
        case "lost":
            return ExitStatus.CRASHED
    return ExitStatus.OK


def _ask(arguments: argparse.Namespace) -> admin_pb2.DrainResponse:
    request = admin_pb2.DrainRequest(member_id=arguments.member, wait=arguments.wait)
    timeout_s = arguments.timeout_s if arguments.wait else _ASK_TIMEOUT_S
    answer: admin_pb2.DrainResponse = connection.ask(
        arguments, lambda admin, metadata: admin.Drain(request, timeout=timeout_s, metadata=metadata)
    )
    return answer
