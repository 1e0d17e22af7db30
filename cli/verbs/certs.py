"""`tandem certs`: an authority and a member's certificate, for a first try of TLS."""

import argparse
from pathlib import Path

from cli.certificates import make_authority, make_certificate

HELP = "make an authority and a member's certificate, for a first try of TLS"
_DAYS = 365
_HERE = ("localhost", "127.0.0.1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the files go; an authority in it is used again")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name or IP address under which others reach the member; may be repeated (this host always is)",
    )
    parser.add_argument("--name", default="member", help="of the member's files (default: member)")
    parser.add_argument(
        "--days", type=int, default=_DAYS, metavar="N", help=f"how long they are valid (default: {_DAYS})"
    )


def run(arguments: argparse.Namespace) -> int:
    hosts = list(dict.fromkeys([*arguments.host, *_HERE]))
    authority = make_authority(arguments.folder, days=arguments.days)
    pair = make_certificate(arguments.folder, authority, arguments.name, hosts, days=arguments.days)
    print(f"{pair.cert} names {', '.join(hosts)}; start each member with")
    print(f"  --tls-cert {pair.cert} --tls-key {pair.key} --tls-ca {authority.cert}")
    print(f"and give clients --tls-ca {authority.cert}. Keep {authority.key} to yourself: who has it can join.")
    return 0
