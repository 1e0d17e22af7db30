"""`tandem doctor`: checks this machine, and the KV links between each pair of workers of a running cluster."""

import argparse
import asyncio
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from cli import connection
from cli.machine import Finding, look
from cli.table import bytes_text, table
from cli.verbs.observation.status import ask
from cluster.auth.key_file import read_key_file
from cluster.auth.keys import ClusterKeys
from cluster.auth.member_channel import MemberChannel
from cluster.errors import ConfigError, MalformedMessage
from cluster.protocol.received import checked
from cluster.settings.config_sources import setting_outside_flags
from kvtransfer.importer.links import DOES_NOT_REACH
from tandem.errors import TandemError, error_from_rpc
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tandem.v1 import admin_pb2

HELP = "check this machine, and measure KV transfer between all workers of a running cluster"
_MEASURE_S = 60.0
_MUCH_FASTER = 1.5


@dataclass(frozen=True, slots=True)
class PathReport:
    transport: str
    bytes_per_s: float
    latency_s: float
    reason: str  # empty, or why it cannot be used

    @property
    def works(self) -> bool:
        return self.bytes_per_s > 0


@dataclass(frozen=True, slots=True)
class PairReport:
    """The transports between two workers. `paths`: best first. Hand-offs use the first one that works."""

    importer: str
    exporter: str
    num_bytes: int
    paths: tuple[PathReport, ...]
    problems: tuple[str, ...]

    @property
    def chosen(self) -> str:
        return next((path.transport for path in self.paths if path.works), "")

    @property
    def advice(self) -> str:
        """Return a better setting, or an empty string."""
        first = next((path for path in self.paths if path.works), None)
        fastest = max((path for path in self.paths if path.works), key=lambda path: path.bytes_per_s, default=None)
        if first is None or fastest is None or fastest.bytes_per_s < _MUCH_FASTER * first.bytes_per_s:
            return ""
        others = [path.transport for path in self.paths if path.works and path is not fastest]
        return f"{fastest.transport} was faster here: --kv-transports {','.join([fastest.transport, *others])}"

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"chosen": self.chosen, "advice": self.advice}

    def as_text(self) -> str:
        rows = [_row(path, path.transport == self.chosen) for path in self.paths]
        heading = f"{self.importer} reads {self.exporter}"
        lines = [heading + (f", at most {bytes_text(self.num_bytes)} at once" if rows else "")]
        if rows:
            grid = table(("transport", "chosen", "GB/s", "latency", "reason"), rows)
            lines += ["  " + line for line in grid.splitlines()]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join([*lines, *([f"  {self.advice}"] if self.advice else [])])


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The findings about a cluster. `problems` concern members; each pair has a list of its own."""

    router: str
    pairs: tuple[PairReport, ...]
    problems: tuple[str, ...]
    note: str = ""  # why no pair was measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument(
        "--pair",
        nargs=2,
        metavar=("DECODE", "EXPORTER"),
        help="measure only these two members (default: every decode worker with every prefill worker)",
    )
    parser.add_argument(
        "--blocks", type=int, default=0, metavar="N", help="maximum blocks per read (default: 64 MB of blocks)"
    )
    for name in ("cert", "key"):
        parser.add_argument(
            f"--tls-{name}",
            metavar="FILE",
            help=f"with --tls-ca: {name} file of a member, for the workers (default: TANDEM_TLS_{name.upper()})",
        )
    parser.add_argument(
        "--cluster-key-file",
        metavar="FILE",
        help="the cluster's key file, for the workers (default: TANDEM_CLUSTER_KEY_FILE or that of the local cluster)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    machine = look()
    cluster = _cluster_report(arguments)
    print(_as_json(machine, cluster) if arguments.json else _as_text(machine, cluster))
    is_wrong = any(finding.is_problem for finding in machine) or cluster.problems
    return 1 if is_wrong or any(pair.problems for pair in cluster.pairs) else 0


def _cluster_report(arguments: argparse.Namespace) -> ClusterReport:
    try:
        router = connection.find_address(arguments.address)
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
        f"{member.member_id} is registered, but the router cannot reach it at {member.address}; its log has the reason"
        for member in members
        if member.role != admin_pb2.MEMBER_ROLE_ROUTER and not member.figures and not member.last_seen_s
    ]
    wanted = list(_wanted(members, arguments.pair))
    pairs = [_measured(importer, exporter, arguments) for importer, exporter in wanted]
    note = "" if wanted else "there is no pair of a decode and a prefill worker"
    return ClusterReport(router, tuple(pairs), tuple(problems), note)


def _wanted(
    members: list[admin_pb2.MemberStatus], pair: list[str] | None
) -> Iterator[tuple[admin_pb2.MemberStatus, admin_pb2.MemberStatus]]:
    """Return the wanted pairs of importer and exporter. Raises ConfigError for a name that no worker has."""
    if pair is None:
        for importer in members:
            if importer.role == admin_pb2.MEMBER_ROLE_DECODE:
                yield from ((importer, member) for member in members if member.role == admin_pb2.MEMBER_ROLE_PREFILL)
        return
    workers = {member.member_id: member for member in members if member.role != admin_pb2.MEMBER_ROLE_ROUTER}
    for name in pair:
        if name not in workers:
            raise ConfigError(f"--pair: there is no worker {name}; there are {', '.join(sorted(workers)) or 'none'}")
    yield workers[pair[0]], workers[pair[1]]


def _measured(
    importer: admin_pb2.MemberStatus, exporter: admin_pb2.MemberStatus, arguments: argparse.Namespace
) -> PairReport:
    request = worker_pb2.CheckLinkRequest(
        exporter=f"{exporter.member_id}@{exporter.incarnation}", address=exporter.address, max_blocks=arguments.blocks
    )
    names = importer.member_id, exporter.member_id
    try:
        answer = asyncio.run(_check_link(importer.address, request, arguments))
    except grpc.RpcError as error:
        return unmeasured(*names, error_from_rpc(error).message)
    except MalformedMessage as error:
        return unmeasured(*names, error.message)
    return report(*names, answer, shared=set(importer.kv_transports) & set(exporter.kv_transports))


async def _check_link(
    address: str, request: worker_pb2.CheckLinkRequest, arguments: argparse.Namespace
) -> worker_pb2.CheckLinkResponse:
    """Ask the importer at this address. Raises grpc.RpcError, MalformedMessage, ConfigError."""
    key_file = connection.find_key_file(arguments.cluster_key_file, connection.find_address(arguments.address))
    keys = ClusterKeys(read_key_file(key_file).secrets)
    async with MemberChannel(_worker_channel(address, arguments), keys, f"doctor@{os.getpid()}") as channel:
        asking = worker_pb2_grpc.WorkerStub(channel).CheckLink(request, timeout=_MEASURE_S)
        answer: worker_pb2.CheckLinkResponse = await asking
        return checked(answer)


def _worker_channel(address: str, arguments: argparse.Namespace) -> grpc.aio.Channel:
    """Return a channel to a worker. Raises ConfigError if the cluster uses TLS and no certificate for the workers is
    given."""
    tls_ca = connection.tls_ca(arguments, connection.find_address(arguments.address))
    options: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0)]
    if tls_ca is None:
        return grpc.aio.insecure_channel(address, options=options)
    cert = arguments.tls_cert or setting_outside_flags("tls_cert")
    key = arguments.tls_key or setting_outside_flags("tls_key")
    if not (cert and key):
        raise ConfigError(
            "the workers of this cluster require a certificate: give --tls-cert and --tls-key of a member"
        )
    try:
        credentials = grpc.ssl_channel_credentials(*(Path(path).read_bytes() for path in (tls_ca, key, cert)))
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
    if name := connection.tls_server_name(arguments):
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(address, credentials, options=options)


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


def unmeasured(importer: str, exporter: str, problem: str) -> PairReport:
    return PairReport(importer, exporter, 0, (), (problem,))


def report(
    importer: str, exporter: str, answer: worker_pb2.CheckLinkResponse, *, shared: Collection[str]
) -> PairReport:
    """Return the report about a pair. `shared`: transports that both members announce. A transport that reaches the
    other member and then fails is a problem.
    """
    paths = tuple(PathReport(path.transport, path.bytes_per_s, path.latency_s, path.reason) for path in answer.paths)
    return PairReport(importer, exporter, answer.num_bytes, paths, tuple(_problems(paths, shared)))


def _problems(paths: Sequence[PathReport], shared: Collection[str]) -> list[str]:
    broken = [path for path in paths if path.transport in shared and not path.works]
    problems = [f"{path.transport}: {path.reason}" for path in broken if DOES_NOT_REACH not in path.reason]
    if not any(path.works for path in paths):
        problems.append("no transport works between them: prompts are prefilled on the decode worker")
    return problems


def _row(path: PathReport, is_chosen: bool) -> tuple[str, ...]:
    if not path.works:
        return path.transport, "-", "-", "-", path.reason
    rate, latency = f"{path.bytes_per_s / 1e9:.2f}", f"{path.latency_s * 1e6:.0f} us"
    return path.transport, "yes" if is_chosen else "-", rate, latency, "" if is_chosen else "fallback"
