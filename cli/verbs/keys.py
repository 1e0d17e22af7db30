"""`tandem keys`: replace the secret in a cluster's key file, without a pause and without a lost request."""

import argparse
from pathlib import Path

from cluster.auth.key_file import KeyFile, key_path, rotate, rotate_caches
from cluster.settings.config import ClusterSettings

HELP = "replace the secret of a cluster"
_STEPS = {
    "next": "step 1 of 3: a new secret is accepted and signs nothing yet",
    "previous": "step 2 of 3: the new secret signs, and the old one is still accepted",
    "": "step 3 of 3: the old secret is not accepted any more",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
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
    rotating.set_defaults(act=_rotate)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.act(arguments))


def _rotate(arguments: argparse.Namespace) -> int:
    settings = ClusterSettings(cluster_key_file=arguments.cluster_key_file, cluster_name=arguments.cluster_name)
    path = key_path(settings)
    print(f"{path}: {_replaced_caches(path) if arguments.caches else _next_step(path)}")
    return 0


def _replaced_caches(path: Path) -> str:
    generation = rotate_caches(path).secrets.generation
    return f"the secret of the caches has generation {generation}; restart all members together to use it"


def _next_step(path: Path) -> str:
    changed: KeyFile = rotate(path)
    after = "" if not changed.other_word else "; once every member has this file, run the command again"
    return _STEPS[changed.other_word] + after
