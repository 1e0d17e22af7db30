"""`tandem explain`: the reasons for the choice of a request's workers, and the predicted and the measured times."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

from cli import connection
from cli.table import bytes_text, table
from cluster.errors import NotFound
from tandem.errors import TandemError
from tandem.v1 import admin_pb2, admin_pb2_grpc

HELP = "show why a request's workers were chosen: all candidates, their predictions, and the real times"
_TIMEOUT_S = 10.0
_NOT_FOUND = "not_found"
_BY_LOAD = ("", "prefill", "decode", "ahead", "cached")
_PREDICTED = (*_BY_LOAD, "TTFT ms", "ITL ms", "running ms", "KV", "targets missed", "expected misses")
# What decided, in words.
_REASONS = {
    "only_candidate": "there was no other candidate",
    "lowest_load": "it has the fewest sequences ahead",
    "cached_prefix": "the beginning of the prompt is cached there",
    "turn": "it was its turn",
    "slo": "the fewest requests are expected to miss a latency target, this one, running and later ones",
    "ttft": "its first token is predicted to be the earliest",
    "token_delay": "first tokens are equally early; it delays later tokens, of running sequences too, the least",
    "kv_bytes": "latencies are equal; it moves the least KV",
    "tie": "drawn from candidates that are equal in everything",
    "explored": "drawn by --explore instead of the best one",
    "unknown_speed": "a worker has not reported its speed yet: chosen by load and cached prefix",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_arguments(parser)
    parser.add_argument(
        "request",
        metavar="REQUEST",
        help="the request's id, its label (over HTTP its x-request-id), or the id of its trace",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ask all routers of the cluster, because each explains its own requests. A router that cannot be reached is
    reported on stderr. Raises ConfigError, NotFound, and the last router's error if none answered."""
    found: list[admin_pb2.RequestExplanation] = []
    failures: list[TandemError] = []
    routers = connection.every_router(arguments)
    for address in routers:
        try:
            found += connection.ask_one(arguments, address, _asking(arguments.request))
        except TandemError as error:
            if error.reason == _NOT_FOUND:
                continue
            failures.append(error)
            if len(failures) == len(routers):
                raise
            sys.stderr.write(f"tandem: router {address}: {error.message}\n")
    if not found:
        asked = f"{len(routers) - len(failures)} router(s) asked"
        missing = f"; {len(failures)} could not be asked" if failures else ""
        raise NotFound(
            f"no request {arguments.request!r} is live or among the last 1,000 of a router ({asked}{missing})"
        )
    explained = _different(found)
    if arguments.json:
        json.dump(explained_object(explained), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print("\n\n".join(map(explained_text, explained)))
    return 0


def _asking(name: str) -> connection.Call[Sequence[admin_pb2.RequestExplanation]]:
    def ask(admin: admin_pb2_grpc.AdminStub, metadata: connection.Metadata) -> Sequence[admin_pb2.RequestExplanation]:
        request = admin_pb2.ExplainRequest(request=name)
        return list(admin.Explain(request, timeout=_TIMEOUT_S, metadata=metadata).requests)

    return ask


def _different(found: Iterable[admin_pb2.RequestExplanation]) -> list[admin_pb2.RequestExplanation]:
    """Return each explanation once: a router that is known by two addresses was asked twice."""
    different: dict[bytes, admin_pb2.RequestExplanation] = {}
    for explained in found:
        key = admin_pb2.RequestExplanation()
        key.CopyFrom(explained)
        key.ClearField("age_s")
        different.setdefault(key.SerializeToString(deterministic=True), explained)
    return list(different.values())


def explained_object(explained: Sequence[admin_pb2.RequestExplanation]) -> dict[str, object]:
    return {"requests": [_request_object(request) for request in explained]}


def _request_object(request: admin_pb2.RequestExplanation) -> dict[str, object]:
    return {
        "request_id": request.request_id,
        "label": request.label,
        "outcome": request.outcome,
        "age_s": request.age_s,
        "policy": request.policy,
        "trace_id": request.trace_id,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_tokens": request.num_tokens,
        "ttft_s": _optional(request, "ttft_s"),
        "itl_s": _optional(request, "itl_s"),
        "placements": [
            {
                "reason": placement.reason,
                "after_s": placement.after_s,
                "failure": placement.failure,
                "propensity": placement.propensity,
                "num_candidates": placement.num_candidates,
                "candidates": [_candidate_object(candidate) for candidate in placement.candidates],
            }
            for placement in request.placements
        ],
    }


def _candidate_object(candidate: admin_pb2.PlacementCandidate) -> dict[str, object]:
    predicted = candidate.prediction
    return {
        "prefill": candidate.prefill_member,
        "decode": candidate.decode_member,
        "is_chosen": candidate.is_chosen,
        "is_alternative": candidate.is_alternative,
        "depth": candidate.depth,
        "num_cached": candidate.num_cached,
        "num_violations": candidate.num_violations,
        "expected_misses": candidate.expected_misses,
        "prediction": {
            "ttft_s": predicted.ttft_s,
            "itl_s": predicted.itl_s,
            "running_itl_s": predicted.running_itl_s,
            "delay_s": predicted.delay_s,
            "kv_bytes": predicted.kv_bytes,
        }
        if candidate.HasField("prediction")
        else None,
    }


def explained_text(request: admin_pb2.RequestExplanation) -> str:
    """Return the text about one request: a table of candidates for each attempt, then the measured times beside the
    first prediction.
    """
    names = [f"{kind} {name}" for kind, name in (("label", request.label), ("trace", request.trace_id)) if name]
    label = f" ({', '.join(names)})" if names else ""
    lines = [
        f"request {request.request_id}{label}: {request.outcome or 'live'}, {request.num_prompt_tokens} prompt tokens,"
        f" {request.num_tokens} generated, arrived {request.age_s:.1f} s ago, placed by {request.policy}"
    ]
    if not request.placements:
        lines.append("no workers were chosen yet")
    for number, placement in enumerate(request.placements, start=1):
        lines += ["", _placement_text(number, placement)]
    return "\n".join([*lines, "", _real_text(request)])


def _placement_text(number: int, placement: admin_pb2.PlacementExplanation) -> str:
    why = _REASONS.get(placement.reason, placement.reason)
    lines = [f"placement {number}, {1e3 * placement.after_s:.1f} ms after arrival, by {placement.reason}: {why}"]
    if placement.propensity < 1:
        lines.append(f"drawn with probability {placement.propensity:g}; ~ marks other pairs that could have been drawn")
    is_predicted = any(candidate.HasField("prediction") for candidate in placement.candidates)
    rows = [_row(candidate, is_predicted=is_predicted) for candidate in placement.candidates]
    lines.append(table(_PREDICTED if is_predicted else _BY_LOAD, rows))
    if (num_more := placement.num_candidates - len(placement.candidates)) > 0:
        lines.append(f"and {num_more} more")
    if placement.failure:
        lines.append(f"ended early: {placement.failure}")
    return "\n".join(lines)


def _row(candidate: admin_pb2.PlacementCandidate, *, is_predicted: bool) -> tuple[str, ...]:
    mark = "*" if candidate.is_chosen else "~" if candidate.is_alternative else ""
    workers = (_name(candidate.prefill_member), _name(candidate.decode_member))
    by_load = (mark, *workers, str(candidate.depth), str(candidate.num_cached))
    if not is_predicted:
        return by_load
    predicted = candidate.prediction
    return (
        *by_load,
        _ms(predicted.ttft_s),
        _ms(predicted.itl_s),
        _ms(predicted.running_itl_s) if predicted.running_itl_s else "-",
        bytes_text(predicted.kv_bytes) if predicted.kv_bytes else "-",
        str(candidate.num_violations),
        f"{candidate.expected_misses:.2f}",
    )


def _real_text(request: admin_pb2.RequestExplanation) -> str:
    """Return the measured times beside those predicted at the first placement."""
    first = request.placements[0] if request.placements else admin_pb2.PlacementExplanation()
    chosen = next((each for each in first.candidates if each.is_chosen and each.HasField("prediction")), None)
    real = []
    if request.HasField("ttft_s"):
        predicted = f" (predicted {_ms(chosen.prediction.ttft_s)})" if chosen is not None else ""
        real.append(f"first token {_ms(request.ttft_s - first.after_s)} ms after placement{predicted}")
    if request.HasField("itl_s"):
        predicted = f" (predicted {_ms(chosen.prediction.itl_s)})" if chosen is not None else ""
        real.append(f"{_ms(request.itl_s)} ms between tokens{predicted}")
    return f"real: {', '.join(real) or 'no token yet'}" if not request.outcome or real else "real: no token"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _name(member: str) -> str:
    """Return the member's id without its incarnation, which --json includes."""
    return member.partition("@")[0] or "-"


def _optional(request: admin_pb2.RequestExplanation, name: str) -> float | None:
    return float(getattr(request, name)) if request.HasField(name) else None
