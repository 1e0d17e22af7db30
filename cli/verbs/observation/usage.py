"""`tandem usage`: the usage of each tenant and API key."""

import argparse
import json

from cli import connection
from cli.table import table
from cluster.accounts.usage import KINDS
from tandem.v1 import admin_pb2

HELP = "show requests and tokens by tenant and API key"
_TIMEOUT_S = 10.0
_HEADING = ("tenant", "key", *(kind.replace("_", " ") for kind in KINDS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    found: admin_pb2.UsageResponse = connection.ask(
        arguments,
        lambda admin, metadata: admin.Usage(admin_pb2.UsageRequest(), timeout=_TIMEOUT_S, metadata=metadata),
    )
    if arguments.json:
        keys = [
            {"tenant": key.tenant, "key_id": key.key_id, **{kind: int(getattr(key, kind)) for kind in KINDS}}
            for key in found.keys
        ]
        print(json.dumps({"keys": keys}, indent=2))
    elif found.keys:
        rows = [(key.tenant or "-", key.key_id, *(str(getattr(key, kind)) for kind in KINDS)) for key in found.keys]
        print(table(_HEADING, rows))
    else:
        print("no key was used yet")
    return 0
