"""`tandem doctor`: what this machine has, and how KV moves between each pair of workers of a running cluster."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from cli import connection
from cli.local.last_cluster import find_address
from cli.machine import Finding, look
from cli.pair_report import PairReport, report, unmeasured
from cli.table import table
from cli.verbs.status import ask
from cluster.errors import ConfigError, MalformedMessage
from cluster.protocol.received import checked
from tandem.errors import TandemError, error_from_rpc
from tandem.v1 import admin_pb2, worker_pb2, worker_pb2_grpc

HELP = "look at this machine, and measure every pair of workers of a running cluster"
_MEASURE_S = 60.0


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """`problems` are those of members; each pair has its own."""

    router: str
    pairs: tuple[PairReport, ...]
    problems: tuple[str, ...]
    note: str = ""  # when there is nothing to look at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument(
        "--pair",
        nargs=2,
        metavar=("DECODE", "EXPORTER"),
        help="these two members only (default: every decode worker with every prefill worker)",
    )
    parser.add_argument(
        "--blocks", type=int, default=0, metavar="N", help="read at most so many at once (default: 64 MB of them)"
    )
    for name in ("cert", "key"):
        parser.add_argument(
            f"--tls-{name}",
            metavar="FILE",
            help=f"with --tls-ca: a member's, for workers ask for it (default: TANDEM_TLS_{name.upper()})",
        )
    parser.add_argument("--json", action="store_true", help="print one object")


def run(arguments: argparse.Namespace) -> int:
    machine = look()
    cluster = _cluster_report(arguments)
    print(_as_json(machine, cluster) if arguments.json else _as_text(machine, cluster))
    is_wrong = any(finding.is_problem for finding in machine) or cluster.problems
    return 1 if is_wrong or any(pair.problems for pair in cluster.pairs) else 0


def _cluster_report(arguments: argparse.Namespace) -> ClusterReport:
    try:
        router = find_address(arguments.address)
    except ConfigError as error:
        if arguments.address or arguments.pair:
            raise
        return ClusterReport("", (), (), error.message)
    try:
        members = list(ask(arguments).members)
    except TandemError as error:
        return ClusterReport(router, (), (f"router {router}: {error.message}",))
    problems = [
        f"{member.member_id} has not answered for {member.last_seen_s:.1f} s"
        for member in members
        if member.last_seen_s
    ]
    problems += [
        f"{member.member_id} is registered, and the router does not reach it at {member.address}; its log says why"
        for member in members
        if member.role != "router" and not member.figures and not member.last_seen_s
    ]
    wanted = list(_wanted(members, arguments.pair))
    pairs = [_measured(importer, exporter, arguments) for importer, exporter in wanted]
    note = "" if wanted else "there is no pair of a decode and a prefill worker"
    return ClusterReport(router, tuple(pairs), tuple(problems), note)


def _wanted(
    members: list[admin_pb2.MemberStatus], pair: list[str] | None
) -> Iterator[tuple[admin_pb2.MemberStatus, admin_pb2.MemberStatus]]:
    """Pairs of importer and exporter. Raises ConfigError for a name that no worker has."""
    if pair is None:
        for importer in members:
            yield from (
                (importer, exporter) for exporter in members if (importer.role, exporter.role) == ("decode", "prefill")
            )
        return
    workers = {member.member_id: member for member in members if member.role != "router"}
    for name in pair:
        if name not in workers:
            raise ConfigError(f"--pair: no worker {name}; there are {', '.join(sorted(workers)) or 'none'}")
    yield workers[pair[0]], workers[pair[1]]


def _measured(
    importer: admin_pb2.MemberStatus, exporter: admin_pb2.MemberStatus, arguments: argparse.Namespace
) -> PairReport:
    request = worker_pb2.MeasurePairRequest(
        exporter=f"{exporter.member_id}@{exporter.incarnation}", address=exporter.address, max_blocks=arguments.blocks
    )
    names = importer.member_id, exporter.member_id
    with _worker_channel(importer.address, arguments) as channel:
        try:
            answer: worker_pb2.MeasurePairResponse = worker_pb2_grpc.WorkerStub(channel).MeasurePair(
                request, timeout=_MEASURE_S
            )
            checked(answer)
        except grpc.RpcError as error:
            return unmeasured(*names, error_from_rpc(error).message)
        except MalformedMessage as error:
            return unmeasured(*names, error.message)
    return report(*names, answer, shared=set(importer.kv_transports) & set(exporter.kv_transports))


def _worker_channel(address: str, arguments: argparse.Namespace) -> grpc.Channel:
    """Raises ConfigError when the router is reached by TLS, and there is nothing to show to a worker."""
    tls_ca = connection.tls_ca(arguments, find_address(arguments.address))
    options = [("grpc.enable_http_proxy", 0)]
    if tls_ca is None:
        return grpc.insecure_channel(address, options=options)
    cert = arguments.tls_cert or os.environ.get("TANDEM_TLS_CERT")
    key = arguments.tls_key or os.environ.get("TANDEM_TLS_KEY")
    if not (cert and key):
        raise ConfigError("workers of this cluster ask for a certificate: give --tls-cert and --tls-key of a member")
    try:
        credentials = grpc.ssl_channel_credentials(*(Path(path).read_bytes() for path in (tls_ca, key, cert)))
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
    return grpc.secure_channel(address, credentials, options=options)


def _as_json(machine: list[Finding], cluster: ClusterReport) -> str:
    return json.dumps(
        {
            "machine": [asdict(finding) for finding in machine],
            "router": cluster.router,
            "note": cluster.note,
            "problems": list(cluster.problems),
            "pairs": [pair.as_json() for pair in cluster.pairs],
        },
        indent=2,
    )


def _as_text(machine: list[Finding], cluster: ClusterReport) -> str:
    rows = [(finding.subject, "problem: " * finding.is_problem + finding.text) for finding in machine]
    parts = [table(("this machine", ""), rows)]
    if cluster.router:
        parts.append(f"cluster of router {cluster.router}")
    parts += [f"problem: {problem}" for problem in cluster.problems]
    parts += [pair.as_text() for pair in cluster.pairs]
    return "\n\n".join([*parts, *([cluster.note] if cluster.note else [])])
