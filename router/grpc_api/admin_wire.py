"""Converts values of the router, its overview included, and API keys to and from the messages of the Admin service."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from cluster.accounts.keys import Access, Caller, KeyRecord, Limits
from cluster.accounts.usage import KeyUsage
from cluster.errors import InvalidRequest
from cluster.member import Member
from router.grpc_api.inference_wire import ledger_to_wire
from router.overview.history import Event, Sample, quantile_s
from router.policies.breakers import BreakerState, Pair
from router.policies.effect import Comparison, Effect
from router.policies.placement import Candidate, Placement
from router.policies.prediction.latency import Prediction
from router.request.explanations import Explanation, PlacedAttempt
from router.request.live_requests import LiveRequest
from tandem.enum_words import (
    DISAGGREGATION_VERDICTS,
    EFFECT_BASES,
    EVENT_KINDS,
    KEY_ACCESSES,
    MEMBER_ROLES,
    MEMBER_STATES,
    REQUEST_PHASES,
)
from tandem.v1 import admin_pb2

_MAX_BREAKERS = 100


def live_requests_to_wire(requests: Iterable[LiveRequest], now_s: float) -> list[admin_pb2.LiveRequest]:
    """Describe live requests for operators: each one's phase, workers and tokens, in the given order.

    A request is in `prefill_queue` until its first token, because only then the worker reports when prefill began.
    """
    return [_live_request_to_wire(live, now_s) for live in requests]


def _live_request_to_wire(live: LiveRequest, now_s: float) -> admin_pb2.LiveRequest:
    account = live.account
    return admin_pb2.LiveRequest(
        request_id=live.request_id,
        phase=REQUEST_PHASES.number(account.phase),
        age_s=now_s - account.began_s,
        prefill_member=account.prefill_member,
        decode_member=account.decode_member,
        num_tokens=account.num_tokens,
        reasons=account.reasons,
        label=live.request.label,
    )


def explanation_to_wire(explained: Explanation, now_s: float, policy: str) -> admin_pb2.RequestExplanation:
    """`policy`: the router's --placement."""
    first_s = explained.first_token_s
    return admin_pb2.RequestExplanation(
        request_id=explained.request_id,
        label=explained.label,
        outcome=explained.outcome,
        age_s=now_s - explained.began_s,
        num_prompt_tokens=explained.num_prompt_tokens,
        num_tokens=explained.num_tokens,
        ttft_s=None if first_s is None else first_s - explained.began_s,
        itl_s=explained.itl_s,
        placements=[_placement_to_wire(attempt, explained.began_s) for attempt in explained.attempts],
        policy=policy,
        trace_id=explained.trace_id,
    )


def _placement_to_wire(attempt: PlacedAttempt, began_s: float) -> admin_pb2.PlacementExplanation:
    placement = attempt.placement
    return admin_pb2.PlacementExplanation(
        reason=placement.reason,
        after_s=attempt.at_s - began_s,
        failure=attempt.failure,
        candidates=[_candidate_to_wire(candidate, placement) for candidate in placement.considered],
        num_candidates=placement.num_candidates,
        propensity=placement.propensity,
    )


def _candidate_to_wire(candidate: Candidate, placement: Placement) -> admin_pb2.PlacementCandidate:
    return admin_pb2.PlacementCandidate(
        prefill_member=str(candidate.prefill or ""),
        decode_member=str(candidate.decode),
        is_chosen=candidate is placement.chosen,
        is_alternative=candidate is placement.alternative,
        depth=candidate.depth,
        num_cached=candidate.num_cached,
        num_violations=candidate.num_violations,
        expected_misses=candidate.expected_misses,
        prediction=_prediction_to_wire(candidate.prediction) if candidate.prediction is not None else None,
    )


def _prediction_to_wire(prediction: Prediction) -> admin_pb2.PlacementPrediction:
    return admin_pb2.PlacementPrediction(
        ttft_s=prediction.ttft_s,
        itl_s=prediction.itl_s,
        running_itl_s=prediction.running_itl_s,
        delay_s=prediction.delay_s,
        kv_bytes=prediction.kv_bytes,
    )


def comparison_to_wire(found: Comparison, placement: str, explore: float) -> admin_pb2.Disaggregation:
    """`placement`, `explore`: the router's settings of these names."""
    return admin_pb2.Disaggregation(
        verdict=DISAGGREGATION_VERDICTS.number(found.verdict),
        ttft=_effect_to_wire(found.ttft),
        itl=_effect_to_wire(found.itl),
        running_itl=_effect_to_wire(found.running_itl),
        placement=placement,
        explore=explore,
        goodput=admin_pb2.GoodputEffect(
            basis=EFFECT_BASES.number(found.goodput.basis),
            pair_share=found.goodput.pair_share,
            alone_share=found.goodput.alone_share,
            num_requests=found.goodput.num_requests,
        ),
    )


def _effect_to_wire(effect: Effect) -> admin_pb2.LatencyEffect:
    return admin_pb2.LatencyEffect(
        basis=EFFECT_BASES.number(effect.basis),
        mean_s=effect.mean_s,
        low_s=effect.low_s,
        high_s=effect.high_s,
        alone_s=effect.alone_s,
        num_requests=effect.num_requests,
        num_explored=effect.num_explored,
    )


def record_to_wire(record: KeyRecord) -> admin_pb2.KeyRecord:
    caller = record.caller
    return admin_pb2.KeyRecord(
        key_id=record.key_id,
        tenant=caller.tenant,
        access=[KEY_ACCESSES.number(access) for access in sorted(caller.access)],
        limits=admin_pb2.KeyLimits(**asdict(caller.limits)),
        weight=caller.weight,
        max_priority=caller.max_priority if caller.max_priority != Caller().max_priority else None,
    )


def caller_from_wire(record: admin_pb2.KeyRecord) -> Caller:
    """Return the caller for a new key. Raises InvalidRequest."""
    known = {KEY_ACCESSES.number(access): access for access in Access}
    if not set(record.access) <= set(known):
        raise InvalidRequest(f"access must name some of {', '.join(Access)}")
    limits = {item.name: getattr(record.limits, item.name) for item in record.limits.DESCRIPTOR.fields}
    return Caller(
        tenant=record.tenant,
        access=frozenset(known[number] for number in record.access),
        limits=Limits(**limits),
        weight=record.weight,
        max_priority=record.max_priority if record.HasField("max_priority") else Caller().max_priority,
    )


def usage_to_wire(found: KeyUsage) -> admin_pb2.KeyUsage:
    return admin_pb2.KeyUsage(tenant=found.tenant, key_id=found.key_id, **asdict(found.usage))


def member_to_wire(member: Member) -> admin_pb2.MemberStatus:
    """Describe a member as the registry has it."""
    return admin_pb2.MemberStatus(
        member_id=member.id.id,
        incarnation=member.id.incarnation,
        role=MEMBER_ROLES.number(member.role),
        state=MEMBER_STATES.number(member.state),
        address=member.address,
        model=member.model,
        kv_transports=member.transports,
        metrics_address=member.metrics_address,
        http_address=member.http_address,
    )


def timelines_to_wire(requests: Iterable[Explanation], origin_s: float) -> list[admin_pb2.RequestTimeline]:
    """`origin_s`: the Unix time at which the router's monotonic clock was 0."""
    return [_timeline_to_wire(request, origin_s) for request in requests]


def _timeline_to_wire(request: Explanation, origin_s: float) -> admin_pb2.RequestTimeline:
    first_s = request.first_token_s
    last = request.attempts[-1].placement if request.attempts else None
    prefill, decode = request.workers
    if last is not None and not (prefill or decode):
        prefill, decode = str(last.prefill or ""), str(last.decode)
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
        prefill_member=prefill,
        decode_member=decode,
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
