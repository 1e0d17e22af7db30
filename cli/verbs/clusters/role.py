"""`tandem role`: change the role of a worker without a restart."""

import argparse
import json

from cli import connection
from cli.verbs.observation.status import target_object
from cluster.registry.scale_target import sizes_text
from tandem.enum_words import MEMBER_ROLES
from tandem.v1 import admin_pb2

HELP = "change the role of a worker, and its pool, without a restart: prefill, decode or both"
_TIMEOUT_S = 30.0
_ROLES = ("prefill", "decode", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument(
        "member", metavar="MEMBER", help="name of the worker as in `tandem status`, or NAME@INCARNATION"
    )
    parser.add_argument("role", choices=_ROLES, help="the work that routers send to it from now on")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    request = admin_pb2.SetRoleRequest(member_id=arguments.member, role=MEMBER_ROLES.number(arguments.role))
    answer: admin_pb2.SetRoleResponse = connection.ask(
        arguments, lambda admin, metadata: admin.SetRole(request, timeout=_TIMEOUT_S, metadata=metadata)
    )
    former = MEMBER_ROLES.label(answer.former_role)
    target = answer.target if answer.target.follower else None
    if arguments.json:
        counted = {"target": target_object(target)} if target is not None else {}
        print(json.dumps({"member": answer.member, "former_role": former, "role": arguments.role, **counted}))
    else:
        print(f"{answer.member} has the role {arguments.role} now; it had {former}")
        if target is not None:
            print(moved_target_text(target))
    return 0


def moved_target_text(target: admin_pb2.ScaleTarget) -> str:
    """Return the text about a scale target that moved with the role of a worker."""
    sizes = sizes_text(target.prefill, target.decode, target.colocated)
    if target.counts_roles:
        return f"the scale target is {sizes} now"
    return (
        f"the scale target stays {sizes}: {target.follower} counts each worker for the pool that it was started in, and"
        " a worker that replaces this one has the role of that pool"
    )
