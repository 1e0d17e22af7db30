"""`tandem status`: the cluster as its router sees it."""

import argparse
import json
import sys

from cli import connection
from cli.table import table
from cli.top.watch import num_live, num_waiting
from cluster.registry.scale_target import POOLS, sizes_text
from tandem.enum_words import DISAGGREGATION_VERDICTS, EFFECT_BASES, MEMBER_ROLES, MEMBER_STATES
from tandem.v1 import admin_pb2

HELP = "show the members of the cluster, their blocks and queues, and whether disaggregation is worth it"
_TIMEOUT_S = 10.0
_BLOCKS = "blocks_"
_LATENCIES = ("time to first token", "time between tokens", "the same of running sequences")
_VERDICTS = {
    admin_pb2.DISAGGREGATION_VERDICT_WORTH_IT: "worth it here",
    admin_pb2.DISAGGREGATION_VERDICT_NOT_WORTH_IT: "not worth it here",
    admin_pb2.DISAGGREGATION_VERDICT_TRADE_OFF: "better in one respect here and worse in another one",
    admin_pb2.DISAGGREGATION_VERDICT_NO_DIFFERENCE: "no clear difference here",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    address = connection.find_address(arguments.address)
    status = ask(arguments)
    if arguments.json:
        json.dump(status_object(address, status), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print(status_text(address, status))
    return 0


def status_object(address: str, status: admin_pb2.StatusResponse) -> dict[str, object]:
    members = [
        {
            "member": member.member_id,
            "incarnation": member.incarnation,
            "role": MEMBER_ROLES.label(member.role),
            "state": MEMBER_STATES.label(member.state),
            "address": member.address,
            "metrics_address": member.metrics_address,
            "model": member.model,
            "kv_transports": list(member.kv_transports),
            "last_seen_s": member.last_seen_s,
            "figures": dict(sorted(member.figures.items())),
            "links": [
                {
                    "exporter": link.exporter,
                    "transport": link.transport,
                    "bytes_per_s": link.bytes_per_s,
                    "latency_s": link.latency_s,
                    "slowdown": link.slowdown,
                }
                for link in member.links
            ],
        }
        for member in _sorted(status)
    ]
    return {
        "router": address,
        "live_requests": status.live_requests,
        **({"target": target_object(status.target)} if status.HasField("target") else {}),
        "disaggregation": disaggregation_object(status.disaggregation),
        "members": members,
    }


def target_object(target: admin_pb2.ScaleTarget) -> dict[str, object]:
    return {
        "prefill": target.prefill,
        "decode": target.decode,
        "colocated": target.colocated,
        "version": target.version,
        "follower": target.follower,
        "is_reached": target.reached >= target.version,
        "problem": target.problem,
        "counts_roles": target.counts_roles,
    }


def status_text(address: str, status: admin_pb2.StatusResponse) -> str:
    rows = [
        (
            MEMBER_ROLES.label(member.role),
            member.member_id,
            MEMBER_STATES.label(member.state),
            member.address,
            f"{member.last_seen_s:.1f}" if member.last_seen_s else "-",
            *((str(num_live(member)), str(num_waiting(member)), _handoffs(member)) if member.figures else "---"),
            _blocks(member),
        )
        for member in _sorted(status)
    ]
    heading = ("role", "member", "state", "address", "silent for s", "live", "waiting", "hand-offs", "blocks")
    lines = [f"router {address}: {status.live_requests} live request(s)"]
    if status.HasField("target"):
        lines.append(target_text(status.target))
        lines += other_roles_text(status)
    lines.append(disaggregation_text(status.disaggregation))
    return "\n".join([*lines, "", table(heading, rows)])


def target_text(target: admin_pb2.ScaleTarget) -> str:
    if not target.follower:
        how = "no process follows it"
    elif target.reached >= target.version:
        how = f"reached; followed by {target.follower}"
    else:
        how = f"in progress; followed by {target.follower}"
    problem = f" ({target.problem})" if target.problem else ""
    return f"target: {sizes_text(target.prefill, target.decode, target.colocated)}: {how}{problem}"


def other_roles_text(status: admin_pb2.StatusResponse) -> list[str]:
    """Return a line with the workers by their present roles, where these differ from a target that is reached: its
    follower counts each worker for the pool that it was started in."""
    target, roles = status.target, [member.role for member in status.members]
    present = [roles.count(MEMBER_ROLES.number(role)) for role in POOLS.values()]
    sizes = [target.prefill, target.decode, target.colocated]
    if target.counts_roles or target.reached < target.version or not target.follower or present == sizes:
        return []
    return [f"by present roles: {sizes_text(*present)}; the target counts pools, which `tandem role` does not change"]


def disaggregation_object(found: admin_pb2.Disaggregation) -> dict[str, object]:
    return {
        "verdict": DISAGGREGATION_VERDICTS.label(found.verdict),
        "placement": found.placement,
        "explore": found.explore,
        **{name: _effect_object(effect) for name, effect in _effects(found).items()},
        "goodput": {
            "basis": EFFECT_BASES.label(found.goodput.basis),
            "pair_share": found.goodput.pair_share,
            "alone_share": found.goodput.alone_share,
            "num_requests": found.goodput.num_requests,
        },
    }


def _effects(found: admin_pb2.Disaggregation) -> dict[str, admin_pb2.LatencyEffect]:
    return {"ttft": found.ttft, "itl": found.itl, "running_itl": found.running_itl}


def _effect_object(effect: admin_pb2.LatencyEffect) -> dict[str, object]:
    return {
        "basis": EFFECT_BASES.label(effect.basis),
        "mean_s": effect.mean_s,
        "low_s": effect.low_s,
        "high_s": effect.high_s,
        "alone_s": effect.alone_s,
        "num_requests": effect.num_requests,
        "num_explored": effect.num_explored,
    }


def disaggregation_text(found: admin_pb2.Disaggregation) -> str:
    """Return whether disaggregation pays, by how much, and the basis of the estimate."""
    if found.verdict not in _VERDICTS:
        return f"disaggregation: not known yet whether it is worth it here; {_advice(found)}"
    rows = [
        (name, _difference(effect), _range(effect), _basis(effect))
        for name, effect in zip(_LATENCIES, _effects(found).values(), strict=True)
        if effect.basis != admin_pb2.EFFECT_BASIS_UNKNOWN
    ]
    if found.goodput.num_requests and min(found.goodput.pair_share, found.goodput.alone_share) < 1:
        rows.append(_goodput_row(found.goodput))
    lines = [f"disaggregation: {_VERDICTS[found.verdict]} (a pair of workers, compared with one worker alone)"]
    lines.append(table(("of a request", "difference", "range", "known from"), rows))
    if found.ttft.basis == admin_pb2.EFFECT_BASIS_PREDICTED:
        lines.append(_advice(found))
    return "\n".join(lines)


def _advice(found: admin_pb2.Disaggregation) -> str:
    """Return advice to the operator on getting a better estimate."""
    if found.placement != "auto":
        return "start routers with --placement auto to predict it, and with --explore 0.02 to measure it"
    if found.verdict == admin_pb2.DISAGGREGATION_VERDICT_NOT_KNOWN:
        return "no request could yet be served both by a pair and by one worker alone"
    if not found.explore:
        return "start routers with --explore 0.02 to measure the time to first token"
    return f"measured once 20 requests are explored (--explore {found.explore:g})"


def _goodput_row(goodput: admin_pb2.GoodputEffect) -> tuple[str, str, str, str]:
    pair, alone = 100 * goodput.pair_share, 100 * goodput.alone_share
    basis = f"{EFFECT_BASES.label(goodput.basis)} for {goodput.num_requests} requests"
    return ("latency targets kept", f"{pair - alone:+.0f} points", f"{pair:.0f} % and {alone:.0f} %", basis)


def _difference(effect: admin_pb2.LatencyEffect) -> str:
    share = f" ({100 * effect.mean_s / effect.alone_s:+.0f} %)" if effect.alone_s else ""
    return f"{_ms(effect.mean_s)} ms{share}"


def _range(effect: admin_pb2.LatencyEffect) -> str:
    is_measured = effect.basis == admin_pb2.EFFECT_BASIS_MEASURED
    of_what = "95 % interval" if is_measured else "9 of 10 requests"
    return f"{_ms(effect.low_s)} to {_ms(effect.high_s)} ms ({of_what})"


def _basis(effect: admin_pb2.LatencyEffect) -> str:
    if effect.basis == admin_pb2.EFFECT_BASIS_MEASURED:
        return f"measured: {effect.num_explored} of {effect.num_requests} requests explored"
    return f"{EFFECT_BASES.label(effect.basis)} for {effect.num_requests} requests"


def _ms(seconds: float) -> str:
    """Return milliseconds with their sign and three digits."""
    seconds = round(seconds, 5) + 0.0  # differences below 10 us are rounding errors; -0.0 becomes 0.0
    return f"{1e3 * seconds:+.3g}" if abs(seconds) < 1 else f"{1e3 * seconds:+.0f}"


def _handoffs(member: admin_pb2.MemberStatus) -> str:
    """Return how many hand-offs were completed, as exporter or importer: `120`, or `120 (2 failed)`."""
    failed = int(member.figures.get("handoffs_failed", 0))
    return f"{member.figures.get('handoffs_ok', 0):.0f}{f' ({failed} failed)' if failed else ''}"


def _blocks(member: admin_pb2.MemberStatus) -> str:
    """Return used and total blocks and the used ones by state: `17/1024 (leased 12, held 5)`."""
    blocks = {name.removeprefix(_BLOCKS): int(value) for name, value in member.figures.items() if name[:7] == _BLOCKS}
    if not blocks:
        return "-"
    used = {name: number for name, number in sorted(blocks.items()) if number and name != "free"}
    detail = f" ({', '.join(f'{name} {number}' for name, number in used.items())})" if used else ""
    return f"{sum(used.values())}/{sum(blocks.values())}{detail}"


def _sorted(status: admin_pb2.StatusResponse) -> list[admin_pb2.MemberStatus]:
    """Sort members in the order of the enum: routers, prefill workers, decode workers."""
    return sorted(status.members, key=lambda member: (member.role, member.member_id))


def ask(arguments: argparse.Namespace) -> admin_pb2.StatusResponse:
    """Request the router's status of the cluster. Raises ConfigError, and the client library's errors."""
    request = admin_pb2.StatusRequest()
    answer: admin_pb2.StatusResponse = connection.ask(
        arguments, lambda admin, metadata: admin.Status(request, timeout=_TIMEOUT_S, metadata=metadata)
    )
    return answer
