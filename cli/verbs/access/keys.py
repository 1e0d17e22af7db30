"""`tandem keys`: make, list and revoke the API keys of tenants, and replace the cluster's secret, without a pause and
without a lost request."""

import argparse
import json
from dataclasses import fields
from pathlib import Path

from cli import connection
from cli.argument_types import whole_number
from cli.table import table
from cluster.accounts.keys import Access, Limits
from cluster.auth.key_file import KeyFile, key_path, rotate, rotate_caches
from cluster.messages import MAX_WEIGHT
from cluster.settings.config import ClusterSettings
from tandem.enum_words import KEY_ACCESSES
from tandem.v1 import admin_pb2

HELP = "create, list and revoke API keys (routers with --keys), and replace the secret of a cluster"
_TIMEOUT_S = 10.0
_HEADING = ("key", "tenant", "allows", "requests/min", "tokens/min", "concurrency", "sequences", "bytes", "weight")
_STEPS = {
    "next": "step 1 of 3: a new secret is accepted and signs nothing yet",
    "previous": "step 2 of 3: the new secret signs, and the old one is still accepted",
    "": "step 3 of 3: the old secret is not accepted any more",
}
_LIMITS = tuple(item.name for item in fields(Limits))
_FLAGS_OF_LIMITS = {
    "--requests-per-minute": "requests of the tenant in a minute",
    "--tokens-per-minute": "tokens of its prompts and outputs in a minute",
    "--max-concurrency": "its requests at once",
    "--max-sequences": "sequences of one request: prompts x n",
    "--max-buffered-bytes": "bytes of its requests that routers hold",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="create a key and show it once")
    add.add_argument("--tenant", metavar="NAME", required=True, help="name of the tenant who uses the key")
    add.add_argument(
        "--allow",
        action="append",
        choices=[str(access) for access in Access],
        help="a right of the key; may be repeated; admin includes the others (default: inference)",
    )
    for flag, text in _FLAGS_OF_LIMITS.items():
        add.add_argument(flag, type=whole_number(0, 1 << 40), metavar="N", default=0, help=f"most {text}; 0: no limit")
    add.add_argument(
        "--max-priority",
        type=whole_number(-(1 << 31), (1 << 31) - 1),
        metavar="N",
        help="most urgent (lowest) priority of its requests",
    )
    add.add_argument(
        "--weight",
        type=whole_number(1, MAX_WEIGHT),
        metavar="N",
        default=1,
        help="the tenant's share of a full cluster, relative to other tenants (default: 1)",
    )
    revoke = actions.add_parser("revoke", help="make a key invalid at every router")
    revoke.add_argument("key_id", metavar="KEY_ID", help="id of the key as in `tandem keys list`")
    for action in (add, actions.add_parser("list", help="show all keys, without the secrets"), revoke):
        connection.add_arguments(action)
        action.add_argument("--json", action="store_true", help="print one JSON object")

    _add_rotation(actions)


def _add_rotation(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = (
        "Take the next of three steps: accept a new secret, sign with it, drop the old one. Members read their file"
        " again within a second. Where every member has a copy, distribute the file before the next step."
    )
    rotating = actions.add_parser(
        "rotate", help="take the next step of replacing the cluster's secret", description=text
    )
    rotating.add_argument(
        "--cluster-key-file", default="", metavar="FILE", help="the key file (default: the one of --cluster-name)"
    )
    rotating.add_argument("--cluster-name", default="tandem", metavar="NAME", help="the cluster (default: tandem)")
    rotating.add_argument(
        "--caches",
        action="store_true",
        help="replace the secret behind block hashes instead: restart all members together, which lose their caches",
    )


def run(arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "add":
            added: admin_pb2.AddKeyResponse = connection.ask(
                arguments,
                lambda admin, metadata: admin.AddKey(_request(arguments), timeout=_TIMEOUT_S, metadata=metadata),
            )
            shown = {"key": added.key, **record_object(added.record)}
            print(json.dumps(shown) if arguments.json else _added_text(added))
        case "revoke":
            request = admin_pb2.RevokeKeyRequest(key_id=arguments.key_id)
            connection.ask(
                arguments, lambda admin, metadata: admin.RevokeKey(request, timeout=_TIMEOUT_S, metadata=metadata)
            )
            print(json.dumps({"revoked": arguments.key_id}) if arguments.json else f"{arguments.key_id} is revoked")
        case "rotate":
            settings = ClusterSettings(cluster_key_file=arguments.cluster_key_file, cluster_name=arguments.cluster_name)
            path = key_path(settings)
            print(f"{path}: {_replaced_caches(path) if arguments.caches else _next_step(path)}")
        case _:
            found: admin_pb2.ListKeysResponse = connection.ask(
                arguments,
                lambda admin, metadata: admin.ListKeys(
                    admin_pb2.ListKeysRequest(), timeout=_TIMEOUT_S, metadata=metadata
                ),
            )
            objects = [record_object(record) for record in found.records]
            print(json.dumps({"keys": objects}, indent=2) if arguments.json else _listed_text(found))
    return 0


def record_object(record: admin_pb2.KeyRecord) -> dict[str, object]:
    return {
        "key_id": record.key_id,
        "tenant": record.tenant,
        "allow": _allowed(record),
        **{name: int(getattr(record.limits, name)) for name in _LIMITS},
        "weight": record.weight,
        "max_priority": record.max_priority if record.HasField("max_priority") else None,
    }


def _request(arguments: argparse.Namespace) -> admin_pb2.AddKeyRequest:
    record = admin_pb2.KeyRecord(
        tenant=arguments.tenant,
        access=[KEY_ACCESSES.number(word) for word in arguments.allow or [Access.INFERENCE]],
        limits=admin_pb2.KeyLimits(**{name: getattr(arguments, name) for name in _LIMITS}),
        weight=arguments.weight,
        max_priority=arguments.max_priority,
    )
    return admin_pb2.AddKeyRequest(record=record)


def _added_text(added: admin_pb2.AddKeyResponse) -> str:
    record = added.record
    return f"key {record.key_id} of {record.tenant}, which is not shown again:\n{added.key}"


def _listed_text(found: admin_pb2.ListKeysResponse) -> str:
    if not found.records:
        return "there are no keys; make one with `tandem keys add --tenant NAME`"
    rows = [
        (
            record.key_id,
            record.tenant,
            ",".join(_allowed(record)),
            *(str(getattr(record.limits, name) or "-") for name in _LIMITS),
            str(record.weight),
        )
        for record in found.records
    ]
    return table(_HEADING, rows)


def _allowed(record: admin_pb2.KeyRecord) -> list[str]:
    return [KEY_ACCESSES.label(number) for number in record.access]


def _replaced_caches(path: Path) -> str:
    generation = rotate_caches(path).secrets.generation
    return f"the secret of the caches has generation {generation}; restart all members together to use it"


def _next_step(path: Path) -> str:
    changed: KeyFile = rotate(path)
    after = "" if not changed.other_word else "; once every member has this file, run the command again"
    return _STEPS[changed.other_word] + after
