"""`tandem profile`: record the operations of a worker's steps, for Perfetto."""

import argparse
import json
from pathlib import Path

from cli import connection
from cli.argument_types import seconds, whole_number
from cluster.errors import ConfigError
from tandem.v1 import admin_pb2

HELP = "record the work of host and device in a worker's next steps, as a file for https://ui.perfetto.dev"
_EXPORT_S = 90.0  # beside the steps: for the profiler to start, and to write the trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument(
        "member", metavar="MEMBER", help="name of the worker as in `tandem status`, or NAME@INCARNATION"
    )
    parser.add_argument(
        "--steps",
        type=whole_number(1, 1000),
        default=50,
        metavar="N",
        help="steps to record, at most 1000 (default: 50)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="end after this time if the worker computes fewer steps, at most 60 s (default: 30)",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="file for the profile (default: tandem-profile-MEMBER.json.gz)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    request = admin_pb2.ProfileRequest(
        member_id=arguments.member, num_steps=arguments.steps, timeout_s=arguments.timeout
    )
    timeout_s = arguments.timeout + _EXPORT_S
    answer: admin_pb2.ProfileResponse = connection.ask(
        arguments, lambda admin, metadata: admin.Profile(request, timeout=timeout_s, metadata=metadata)
    )
    file = Path(arguments.output or f"tandem-profile-{answer.member.partition('@')[0]}.json.gz")
    try:
        file.write_bytes(answer.trace)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; choose another --output") from error
    if arguments.json:
        print(json.dumps({"member": answer.member, "steps": answer.num_steps, "file": str(file)}))
    elif answer.num_steps:
        print(f"{answer.num_steps} steps of {answer.member} are in {file}; https://ui.perfetto.dev opens it")
    else:
        print(f"{answer.member} computed nothing within {arguments.timeout:g} s; {file} has no step")
    return 0
