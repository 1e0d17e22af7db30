"""Converts the parts of an overview into messages of tandem.v1."""

from collections.abc import Iterable, Mapping, Sequence

from router.grpc_api.inference_wire import ledger_to_wire
from router.overview.events import Event
from router.overview.history import Sample, quantile_s
from router.policies.breakers import BreakerState, Pair
from router.request.explanations import Explanation
from tandem.enum_words import EVENT_KINDS, REQUEST_PHASES
from tandem.v1 import admin_pb2

_MAX_BREAKERS = 100


def timelines_to_wire(requests: Iterable[Explanation], origin_s: float) -> list[admin_pb2.RequestTimeline]:
    """`origin_s`: the Unix time at which the router's monotonic clock was 0."""
    return [_timeline_to_wire(request, origin_s) for request in requests]


def _timeline_to_wire(request: Explanation, origin_s: float) -> admin_pb2.RequestTimeline:
    first_s = request.first_token_s
    last = request.attempts[-1].placement if request.attempts else None
    return admin_pb2.RequestTimeline(
        request_id=request.request_id,
        label=request.label,
        outcome=request.outcome,
        arrived_s=origin_s + request.began_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=request.num_tokens,
        ttft_s=None if first_s is None else first_s - request.began_s,
        itl_s=request.itl_s,
        spans=[
            admin_pb2.PhaseSpan(
                phase=REQUEST_PHASES.number(span.phase), start_s=span.start_s, duration_s=span.duration_s
            )
            for span in request.spans
        ],
        ledger=ledger_to_wire(request.ledger) if request.ledger is not None else None,
        num_placements=len(request.attempts),
        placement_reason=last.reason if last is not None else "",
        prefill_member=str(last.prefill or "") if last is not None else "",
        decode_member=str(last.decode) if last is not None else "",
    )


def event_to_wire(event: Event) -> admin_pb2.ClusterEvent:
    return admin_pb2.ClusterEvent(
        at_s=event.at_s, kind=EVENT_KINDS.number(event.kind), member=event.member, text=event.text
    )


def sample_to_wire(sample: Sample) -> admin_pb2.RateSample:
    return admin_pb2.RateSample(
        at_s=sample.at_s,
        period_s=sample.period_s,
        num_ended=sample.num_ended,
        num_failed=sample.num_failed,
        num_prompt_tokens=sample.num_prompt_tokens,
        num_tokens=sample.num_tokens,
        num_live=sample.num_live,
        ttft_p50_s=sample.ttft_s[0] if sample.ttft_s else None,
        ttft_p99_s=sample.ttft_s[1] if sample.ttft_s else None,
        itl_p50_s=sample.itl_s[0] if sample.itl_s else None,
        itl_p99_s=sample.itl_s[1] if sample.itl_s else None,
    )


def latencies_to_wire(
    bounds_s: Sequence[float], latencies: Mapping[str, Sequence[int]]
) -> list[admin_pb2.LatencyHistogram]:
    return [
        admin_pb2.LatencyHistogram(
            name=name,
            bounds_s=bounds_s,
            counts=counts,
            p50_s=quantile_s(bounds_s, counts, 0.5),
            p90_s=quantile_s(bounds_s, counts, 0.9),
            p99_s=quantile_s(bounds_s, counts, 0.99),
        )
        for name, counts in latencies.items()
    ]


def breakers_to_wire(failing: Mapping[Pair, BreakerState]) -> list[admin_pb2.PairBreaker]:
    pairs = sorted(failing.items())[:_MAX_BREAKERS]
    return [
        admin_pb2.PairBreaker(exporter=str(exporter), importer=str(importer), state=state)
        for (exporter, importer), state in pairs
    ]
