"""`tandem requests`: the requests that the cluster's routers serve now."""

import argparse
import json
import sys
from collections.abc import Sequence

from cli import connection
from cli.table import table
from tandem.enum_words import REQUEST_PHASES
from tandem.errors import TandemError
from tandem.routers import addresses
from tandem.v1 import admin_pb2, admin_pb2_grpc

HELP = "list live requests with their phase, age, workers and tokens"
_TIMEOUT_S = 10.0
_HEADING = ("request", "phase", "age s", "tokens", "prefill", "decode", "events")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ask all known routers, because each lists its own requests. A router that cannot be reached is reported on
    stderr.
    Raises ConfigError, and the last router's error if none answered."""
    requests: list[admin_pb2.LiveRequest] = []
    failures: list[TandemError] = []
    known = addresses(connection.find_address(arguments.address))
    for address in known:
        try:
            requests += connection.ask_one(arguments, address, _ask)
        except TandemError as error:
            failures.append(error)
            if len(failures) == len(known):
                raise
            sys.stderr.write(f"tandem: router {address}: {error.message}\n")
    if arguments.json:
        json.dump(requests_object(requests), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print(requests_text(requests))
    return 0


def requests_object(requests: Sequence[admin_pb2.LiveRequest]) -> dict[str, object]:
    return {
        "requests": [
            {
                "request_id": request.request_id,
                "label": request.label,
                "phase": REQUEST_PHASES.label(request.phase),
                "age_s": request.age_s,
                "num_tokens": request.num_tokens,
                "prefill": request.prefill_member,
                "decode": request.decode_member,
                "reasons": list(request.reasons),
            }
            for request in requests
        ]
    }


def requests_text(requests: Sequence[admin_pb2.LiveRequest]) -> str:
    if not requests:
        return "no live request"
    rows = [
        (
            request.label or request.request_id,
            REQUEST_PHASES.label(request.phase),
            f"{request.age_s:.1f}",
            str(request.num_tokens),
            _name(request.prefill_member),
            _name(request.decode_member),
            ", ".join(request.reasons),
        )
        for request in requests
    ]
    return table(_HEADING, rows)


def _name(member: str) -> str:
    """Return the member's id without its incarnation, which --json includes."""
    return member.partition("@")[0] or "-"


def _ask(admin: admin_pb2_grpc.AdminStub, metadata: connection.Metadata) -> Sequence[admin_pb2.LiveRequest]:
    return list(admin.Requests(admin_pb2.RequestsRequest(), timeout=_TIMEOUT_S, metadata=metadata).requests)
