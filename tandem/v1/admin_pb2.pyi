from tandem.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_ROLE_UNSPECIFIED: _ClassVar[MemberRole]
    MEMBER_ROLE_ROUTER: _ClassVar[MemberRole]
    MEMBER_ROLE_PREFILL: _ClassVar[MemberRole]
    MEMBER_ROLE_DECODE: _ClassVar[MemberRole]
    MEMBER_ROLE_BOTH: _ClassVar[MemberRole]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_STARTING: _ClassVar[MemberState]
    MEMBER_STATE_READY: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]
    MEMBER_STATE_UNHEALTHY: _ClassVar[MemberState]

class DrainOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAIN_OUTCOME_UNSPECIFIED: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_DRAINED: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_INCOMPLETE: _ClassVar[DrainOutcome]
    DRAIN_OUTCOME_LOST: _ClassVar[DrainOutcome]

class DisaggregationVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISAGGREGATION_VERDICT_UNSPECIFIED: _ClassVar[DisaggregationVerdict]
    DISAGGREGATION_VERDICT_NOT_KNOWN: _ClassVar[DisaggregationVerdict]
    DISAGGREGATION_VERDICT_WORTH_IT: _ClassVar[DisaggregationVerdict]
    DISAGGREGATION_VERDICT_NOT_WORTH_IT: _ClassVar[DisaggregationVerdict]
    DISAGGREGATION_VERDICT_TRADE_OFF: _ClassVar[DisaggregationVerdict]
    DISAGGREGATION_VERDICT_NO_DIFFERENCE: _ClassVar[DisaggregationVerdict]

class EffectBasis(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EFFECT_BASIS_UNSPECIFIED: _ClassVar[EffectBasis]
    EFFECT_BASIS_UNKNOWN: _ClassVar[EffectBasis]
    EFFECT_BASIS_PREDICTED: _ClassVar[EffectBasis]
    EFFECT_BASIS_MEASURED: _ClassVar[EffectBasis]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_MEMBER: _ClassVar[EventKind]
    EVENT_KIND_SCALE: _ClassVar[EventKind]
    EVENT_KIND_FAULT: _ClassVar[EventKind]

class KeyAccess(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KEY_ACCESS_UNSPECIFIED: _ClassVar[KeyAccess]
    KEY_ACCESS_INFERENCE: _ClassVar[KeyAccess]
    KEY_ACCESS_METRICS: _ClassVar[KeyAccess]
    KEY_ACCESS_ADMIN: _ClassVar[KeyAccess]
MEMBER_ROLE_UNSPECIFIED: MemberRole
MEMBER_ROLE_ROUTER: MemberRole
MEMBER_ROLE_PREFILL: MemberRole
MEMBER_ROLE_DECODE: MemberRole
MEMBER_ROLE_BOTH: MemberRole
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_STARTING: MemberState
MEMBER_STATE_READY: MemberState
MEMBER_STATE_DRAINING: MemberState
MEMBER_STATE_UNHEALTHY: MemberState
DRAIN_OUTCOME_UNSPECIFIED: DrainOutcome
DRAIN_OUTCOME_DRAINED: DrainOutcome
DRAIN_OUTCOME_INCOMPLETE: DrainOutcome
DRAIN_OUTCOME_LOST: DrainOutcome
DISAGGREGATION_VERDICT_UNSPECIFIED: DisaggregationVerdict
DISAGGREGATION_VERDICT_NOT_KNOWN: DisaggregationVerdict
DISAGGREGATION_VERDICT_WORTH_IT: DisaggregationVerdict
DISAGGREGATION_VERDICT_NOT_WORTH_IT: DisaggregationVerdict
DISAGGREGATION_VERDICT_TRADE_OFF: DisaggregationVerdict
DISAGGREGATION_VERDICT_NO_DIFFERENCE: DisaggregationVerdict
EFFECT_BASIS_UNSPECIFIED: EffectBasis
EFFECT_BASIS_UNKNOWN: EffectBasis
EFFECT_BASIS_PREDICTED: EffectBasis
EFFECT_BASIS_MEASURED: EffectBasis
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_MEMBER: EventKind
EVENT_KIND_SCALE: EventKind
EVENT_KIND_FAULT: EventKind
KEY_ACCESS_UNSPECIFIED: KeyAccess
KEY_ACCESS_INFERENCE: KeyAccess
KEY_ACCESS_METRICS: KeyAccess
KEY_ACCESS_ADMIN: KeyAccess

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("member_id", "incarnation", "role", "state", "address", "last_seen_s", "figures", "model", "kv_transports", "links", "metrics_address", "http_address")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_S_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    incarnation: str
    role: MemberRole
    state: MemberState
    address: str
    last_seen_s: float
    figures: _containers.ScalarMap[str, float]
    model: str
    kv_transports: _containers.RepeatedScalarFieldContainer[str]
    links: _containers.RepeatedCompositeFieldContainer[LinkSpeed]
    metrics_address: str
    http_address: str
    def __init__(self, member_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[MemberRole, str]] = ..., state: _Optional[_Union[MemberState, str]] = ..., address: _Optional[str] = ..., last_seen_s: _Optional[float] = ..., figures: _Optional[_Mapping[str, float]] = ..., model: _Optional[str] = ..., kv_transports: _Optional[_Iterable[str]] = ..., links: _Optional[_Iterable[_Union[LinkSpeed, _Mapping]]] = ..., metrics_address: _Optional[str] = ..., http_address: _Optional[str] = ...) -> None: ...

class LinkSpeed(_message.Message):
    __slots__ = ("exporter", "transport", "bytes_per_s", "latency_s", "slowdown")
    EXPORTER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    exporter: str
    transport: str
    bytes_per_s: float
    latency_s: float
    slowdown: float
    def __init__(self, exporter: _Optional[str] = ..., transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ..., slowdown: _Optional[float] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("members", "live_requests", "target", "disaggregation")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DISAGGREGATION_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    live_requests: int
    target: ScaleTarget
    disaggregation: Disaggregation
    def __init__(self, members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., live_requests: _Optional[int] = ..., target: _Optional[_Union[ScaleTarget, _Mapping]] = ..., disaggregation: _Optional[_Union[Disaggregation, _Mapping]] = ...) -> None: ...

class LatencyEffect(_message.Message):
    __slots__ = ("basis", "mean_s", "low_s", "high_s", "alone_s", "num_requests", "num_explored")
    BASIS_FIELD_NUMBER: _ClassVar[int]
    MEAN_S_FIELD_NUMBER: _ClassVar[int]
    LOW_S_FIELD_NUMBER: _ClassVar[int]
    HIGH_S_FIELD_NUMBER: _ClassVar[int]
    ALONE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPLORED_FIELD_NUMBER: _ClassVar[int]
    basis: EffectBasis
    mean_s: float
    low_s: float
    high_s: float
    alone_s: float
    num_requests: int
    num_explored: int
    def __init__(self, basis: _Optional[_Union[EffectBasis, str]] = ..., mean_s: _Optional[float] = ..., low_s: _Optional[float] = ..., high_s: _Optional[float] = ..., alone_s: _Optional[float] = ..., num_requests: _Optional[int] = ..., num_explored: _Optional[int] = ...) -> None: ...

class GoodputEffect(_message.Message):
    __slots__ = ("basis", "pair_share", "alone_share", "num_requests")
    BASIS_FIELD_NUMBER: _ClassVar[int]
    PAIR_SHARE_FIELD_NUMBER: _ClassVar[int]
    ALONE_SHARE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    basis: EffectBasis
    pair_share: float
    alone_share: float
    num_requests: int
    def __init__(self, basis: _Optional[_Union[EffectBasis, str]] = ..., pair_share: _Optional[float] = ..., alone_share: _Optional[float] = ..., num_requests: _Optional[int] = ...) -> None: ...

class Disaggregation(_message.Message):
    __slots__ = ("verdict", "ttft", "itl", "running_itl", "placement", "explore", "goodput")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    ITL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ITL_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    EXPLORE_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    verdict: DisaggregationVerdict
    ttft: LatencyEffect
    itl: LatencyEffect
    running_itl: LatencyEffect
    placement: str
    explore: float
    goodput: GoodputEffect
    def __init__(self, verdict: _Optional[_Union[DisaggregationVerdict, str]] = ..., ttft: _Optional[_Union[LatencyEffect, _Mapping]] = ..., itl: _Optional[_Union[LatencyEffect, _Mapping]] = ..., running_itl: _Optional[_Union[LatencyEffect, _Mapping]] = ..., placement: _Optional[str] = ..., explore: _Optional[float] = ..., goodput: _Optional[_Union[GoodputEffect, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("member_id", "wait")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    wait: bool
    def __init__(self, member_id: _Optional[str] = ..., wait: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("member", "outcome")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    member: str
    outcome: DrainOutcome
    def __init__(self, member: _Optional[str] = ..., outcome: _Optional[_Union[DrainOutcome, str]] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("member_id", "role")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    role: MemberRole
    def __init__(self, member_id: _Optional[str] = ..., role: _Optional[_Union[MemberRole, str]] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("member", "former_role", "target")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    FORMER_ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    member: str
    former_role: MemberRole
    target: ScaleTarget
    def __init__(self, member: _Optional[str] = ..., former_role: _Optional[_Union[MemberRole, str]] = ..., target: _Optional[_Union[ScaleTarget, _Mapping]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("member_id", "num_steps", "timeout_s")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    num_steps: int
    timeout_s: float
    def __init__(self, member_id: _Optional[str] = ..., num_steps: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("member", "num_steps", "trace")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    member: str
    num_steps: int
    trace: bytes
    def __init__(self, member: _Optional[str] = ..., num_steps: _Optional[int] = ..., trace: _Optional[bytes] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("source", "target", "max_sequences")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    max_sequences: int
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., max_sequences: _Optional[int] = ...) -> None: ...

class MigrateResponse(_message.Message):
    __slots__ = ("num_moved", "num_kept")
    NUM_MOVED_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    num_moved: int
    num_kept: int
    def __init__(self, num_moved: _Optional[int] = ..., num_kept: _Optional[int] = ...) -> None: ...

class RequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "phase", "age_s", "prefill_member", "decode_member", "num_tokens", "reasons", "label")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MEMBER_FIELD_NUMBER: _ClassVar[int]
    DECODE_MEMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    phase: _inference_pb2.RequestPhase
    age_s: float
    prefill_member: str
    decode_member: str
    num_tokens: int
    reasons: _containers.RepeatedScalarFieldContainer[str]
    label: str
    def __init__(self, request_id: _Optional[str] = ..., phase: _Optional[_Union[_inference_pb2.RequestPhase, str]] = ..., age_s: _Optional[float] = ..., prefill_member: _Optional[str] = ..., decode_member: _Optional[str] = ..., num_tokens: _Optional[int] = ..., reasons: _Optional[_Iterable[str]] = ..., label: _Optional[str] = ...) -> None: ...

class RequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: str
    def __init__(self, request: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestExplanation]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestExplanation, _Mapping]]] = ...) -> None: ...

class RequestExplanation(_message.Message):
    __slots__ = ("request_id", "label", "outcome", "age_s", "num_prompt_tokens", "num_tokens", "ttft_s", "itl_s", "placements", "policy", "trace_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    label: str
    outcome: str
    age_s: float
    num_prompt_tokens: int
    num_tokens: int
    ttft_s: float
    itl_s: float
    placements: _containers.RepeatedCompositeFieldContainer[PlacementExplanation]
    policy: str
    trace_id: str
    def __init__(self, request_id: _Optional[str] = ..., label: _Optional[str] = ..., outcome: _Optional[str] = ..., age_s: _Optional[float] = ..., num_prompt_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., itl_s: _Optional[float] = ..., placements: _Optional[_Iterable[_Union[PlacementExplanation, _Mapping]]] = ..., policy: _Optional[str] = ..., trace_id: _Optional[str] = ...) -> None: ...

class PlacementExplanation(_message.Message):
    __slots__ = ("reason", "after_s", "failure", "candidates", "num_candidates", "propensity")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PROPENSITY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    after_s: float
    failure: str
    candidates: _containers.RepeatedCompositeFieldContainer[PlacementCandidate]
    num_candidates: int
    propensity: float
    def __init__(self, reason: _Optional[str] = ..., after_s: _Optional[float] = ..., failure: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[PlacementCandidate, _Mapping]]] = ..., num_candidates: _Optional[int] = ..., propensity: _Optional[float] = ...) -> None: ...

class PlacementCandidate(_message.Message):
    __slots__ = ("prefill_member", "decode_member", "is_chosen", "is_alternative", "depth", "num_cached", "num_violations", "prediction", "expected_misses")
    PREFILL_MEMBER_FIELD_NUMBER: _ClassVar[int]
    DECODE_MEMBER_FIELD_NUMBER: _ClassVar[int]
    IS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    IS_ALTERNATIVE_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_MISSES_FIELD_NUMBER: _ClassVar[int]
    prefill_member: str
    decode_member: str
    is_chosen: bool
    is_alternative: bool
    depth: int
    num_cached: int
    num_violations: int
    prediction: PlacementPrediction
    expected_misses: float
    def __init__(self, prefill_member: _Optional[str] = ..., decode_member: _Optional[str] = ..., is_chosen: bool = ..., is_alternative: bool = ..., depth: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_violations: _Optional[int] = ..., prediction: _Optional[_Union[PlacementPrediction, _Mapping]] = ..., expected_misses: _Optional[float] = ...) -> None: ...

class PlacementPrediction(_message.Message):
    __slots__ = ("ttft_s", "itl_s", "running_itl_s", "delay_s", "kv_bytes")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ITL_S_FIELD_NUMBER: _ClassVar[int]
    DELAY_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    itl_s: float
    running_itl_s: float
    delay_s: float
    kv_bytes: float
    def __init__(self, ttft_s: _Optional[float] = ..., itl_s: _Optional[float] = ..., running_itl_s: _Optional[float] = ..., delay_s: _Optional[float] = ..., kv_bytes: _Optional[float] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode", "colocated")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    colocated: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., colocated: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: ScaleTarget
    def __init__(self, target: _Optional[_Union[ScaleTarget, _Mapping]] = ...) -> None: ...

class ScaleTarget(_message.Message):
    __slots__ = ("prefill", "decode", "colocated", "version", "follower", "reached", "problem", "counts_roles")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    COUNTS_ROLES_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    colocated: int
    version: int
    follower: str
    reached: int
    problem: str
    counts_roles: bool
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., colocated: _Optional[int] = ..., version: _Optional[int] = ..., follower: _Optional[str] = ..., reached: _Optional[int] = ..., problem: _Optional[str] = ..., counts_roles: bool = ...) -> None: ...

class OverviewRequest(_message.Message):
    __slots__ = ("seen", "only_this_router")
    class SeenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: OverviewPosition
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[OverviewPosition, _Mapping]] = ...) -> None: ...
    SEEN_FIELD_NUMBER: _ClassVar[int]
    ONLY_THIS_ROUTER_FIELD_NUMBER: _ClassVar[int]
    seen: _containers.MessageMap[str, OverviewPosition]
    only_this_router: bool
    def __init__(self, seen: _Optional[_Mapping[str, OverviewPosition]] = ..., only_this_router: bool = ...) -> None: ...

class OverviewPosition(_message.Message):
    __slots__ = ("ended", "events", "samples")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ended: int
    events: int
    samples: int
    def __init__(self, ended: _Optional[int] = ..., events: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class OverviewResponse(_message.Message):
    __slots__ = ("members", "target", "routers")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    target: ScaleTarget
    routers: _containers.RepeatedCompositeFieldContainer[RouterOverview]
    def __init__(self, members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., target: _Optional[_Union[ScaleTarget, _Mapping]] = ..., routers: _Optional[_Iterable[_Union[RouterOverview, _Mapping]]] = ...) -> None: ...

class RouterOverview(_message.Message):
    __slots__ = ("router", "problem", "time_s", "position", "num_live", "live", "ended", "events", "samples", "latencies", "registry_age_s", "breakers", "slow")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    BREAKERS_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    router: str
    problem: str
    time_s: float
    position: OverviewPosition
    num_live: int
    live: _containers.RepeatedCompositeFieldContainer[RequestTimeline]
    ended: _containers.RepeatedCompositeFieldContainer[RequestTimeline]
    events: _containers.RepeatedCompositeFieldContainer[ClusterEvent]
    samples: _containers.RepeatedCompositeFieldContainer[RateSample]
    latencies: _containers.RepeatedCompositeFieldContainer[LatencyHistogram]
    registry_age_s: float
    breakers: _containers.RepeatedCompositeFieldContainer[PairBreaker]
    slow: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, router: _Optional[str] = ..., problem: _Optional[str] = ..., time_s: _Optional[float] = ..., position: _Optional[_Union[OverviewPosition, _Mapping]] = ..., num_live: _Optional[int] = ..., live: _Optional[_Iterable[_Union[RequestTimeline, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[RequestTimeline, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[ClusterEvent, _Mapping]]] = ..., samples: _Optional[_Iterable[_Union[RateSample, _Mapping]]] = ..., latencies: _Optional[_Iterable[_Union[LatencyHistogram, _Mapping]]] = ..., registry_age_s: _Optional[float] = ..., breakers: _Optional[_Iterable[_Union[PairBreaker, _Mapping]]] = ..., slow: _Optional[_Iterable[str]] = ...) -> None: ...

class RequestTimeline(_message.Message):
    __slots__ = ("request_id", "label", "outcome", "arrived_s", "num_prompt_tokens", "num_tokens", "ttft_s", "itl_s", "spans", "ledger", "num_placements", "placement_reason", "prefill_member", "decode_member")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MEMBER_FIELD_NUMBER: _ClassVar[int]
    DECODE_MEMBER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    label: str
    outcome: str
    arrived_s: float
    num_prompt_tokens: int
    num_tokens: int
    ttft_s: float
    itl_s: float
    spans: _containers.RepeatedCompositeFieldContainer[PhaseSpan]
    ledger: _inference_pb2.Ledger
    num_placements: int
    placement_reason: str
    prefill_member: str
    decode_member: str
    def __init__(self, request_id: _Optional[str] = ..., label: _Optional[str] = ..., outcome: _Optional[str] = ..., arrived_s: _Optional[float] = ..., num_prompt_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., itl_s: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[PhaseSpan, _Mapping]]] = ..., ledger: _Optional[_Union[_inference_pb2.Ledger, _Mapping]] = ..., num_placements: _Optional[int] = ..., placement_reason: _Optional[str] = ..., prefill_member: _Optional[str] = ..., decode_member: _Optional[str] = ...) -> None: ...

class PhaseSpan(_message.Message):
    __slots__ = ("phase", "start_s", "duration_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    phase: _inference_pb2.RequestPhase
    start_s: float
    duration_s: float
    def __init__(self, phase: _Optional[_Union[_inference_pb2.RequestPhase, str]] = ..., start_s: _Optional[float] = ..., duration_s: _Optional[float] = ...) -> None: ...

class ClusterEvent(_message.Message):
    __slots__ = ("at_s", "kind", "member", "text")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    kind: EventKind
    member: str
    text: str
    def __init__(self, at_s: _Optional[float] = ..., kind: _Optional[_Union[EventKind, str]] = ..., member: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class RateSample(_message.Message):
    __slots__ = ("at_s", "period_s", "num_ended", "num_failed", "num_prompt_tokens", "num_tokens", "num_live", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_S_FIELD_NUMBER: _ClassVar[int]
    ITL_P50_S_FIELD_NUMBER: _ClassVar[int]
    ITL_P99_S_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    period_s: float
    num_ended: int
    num_failed: int
    num_prompt_tokens: int
    num_tokens: int
    num_live: int
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    def __init__(self, at_s: _Optional[float] = ..., period_s: _Optional[float] = ..., num_ended: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_live: _Optional[int] = ..., ttft_p50_s: _Optional[float] = ..., ttft_p99_s: _Optional[float] = ..., itl_p50_s: _Optional[float] = ..., itl_p99_s: _Optional[float] = ...) -> None: ...

class LatencyHistogram(_message.Message):
    __slots__ = ("name", "bounds_s", "counts", "p50_s", "p90_s", "p99_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P90_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    bounds_s: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    p50_s: float
    p90_s: float
    p99_s: float
    def __init__(self, name: _Optional[str] = ..., bounds_s: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., p50_s: _Optional[float] = ..., p90_s: _Optional[float] = ..., p99_s: _Optional[float] = ...) -> None: ...

class PairBreaker(_message.Message):
    __slots__ = ("exporter", "importer", "state")
    EXPORTER_FIELD_NUMBER: _ClassVar[int]
    IMPORTER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    exporter: str
    importer: str
    state: str
    def __init__(self, exporter: _Optional[str] = ..., importer: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class KeyLimits(_message.Message):
    __slots__ = ("requests_per_minute", "tokens_per_minute", "max_concurrency", "max_sequences", "max_buffered_bytes")
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_BUFFERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    requests_per_minute: int
    tokens_per_minute: int
    max_concurrency: int
    max_sequences: int
    max_buffered_bytes: int
    def __init__(self, requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., max_concurrency: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_buffered_bytes: _Optional[int] = ...) -> None: ...

class KeyRecord(_message.Message):
    __slots__ = ("key_id", "tenant", "access", "limits", "weight", "max_priority")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    tenant: str
    access: _containers.RepeatedScalarFieldContainer[KeyAccess]
    limits: KeyLimits
    weight: int
    max_priority: int
    def __init__(self, key_id: _Optional[str] = ..., tenant: _Optional[str] = ..., access: _Optional[_Iterable[_Union[KeyAccess, str]]] = ..., limits: _Optional[_Union[KeyLimits, _Mapping]] = ..., weight: _Optional[int] = ..., max_priority: _Optional[int] = ...) -> None: ...

class AddKeyRequest(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: KeyRecord
    def __init__(self, record: _Optional[_Union[KeyRecord, _Mapping]] = ...) -> None: ...

class AddKeyResponse(_message.Message):
    __slots__ = ("key", "record")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    key: str
    record: KeyRecord
    def __init__(self, key: _Optional[str] = ..., record: _Optional[_Union[KeyRecord, _Mapping]] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[KeyRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[KeyRecord, _Mapping]]] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("key_id",)
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    def __init__(self, key_id: _Optional[str] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UsageResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[KeyUsage]
    def __init__(self, keys: _Optional[_Iterable[_Union[KeyUsage, _Mapping]]] = ...) -> None: ...

class KeyUsage(_message.Message):
    __slots__ = ("tenant", "key_id", "requests", "prompt_tokens", "cached_tokens", "output_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key_id: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., key_id: _Optional[str] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...
