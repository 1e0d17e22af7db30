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
MEMBER_ROLE_UNSPECIFIED: MemberRole
MEMBER_ROLE_ROUTER: MemberRole
MEMBER_ROLE_PREFILL: MemberRole
MEMBER_ROLE_DECODE: MemberRole
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_STARTING: MemberState
MEMBER_STATE_READY: MemberState
MEMBER_STATE_DRAINING: MemberState
MEMBER_STATE_UNHEALTHY: MemberState
DRAIN_OUTCOME_UNSPECIFIED: DrainOutcome
DRAIN_OUTCOME_DRAINED: DrainOutcome
DRAIN_OUTCOME_INCOMPLETE: DrainOutcome
DRAIN_OUTCOME_LOST: DrainOutcome

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("member_id", "incarnation", "role", "state", "address", "last_seen_s", "figures", "model", "kv_transports", "links")
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
    def __init__(self, member_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[MemberRole, str]] = ..., state: _Optional[_Union[MemberState, str]] = ..., address: _Optional[str] = ..., last_seen_s: _Optional[float] = ..., figures: _Optional[_Mapping[str, float]] = ..., model: _Optional[str] = ..., kv_transports: _Optional[_Iterable[str]] = ..., links: _Optional[_Iterable[_Union[LinkSpeed, _Mapping]]] = ...) -> None: ...

class LinkSpeed(_message.Message):
    __slots__ = ("exporter", "transport", "bytes_per_s", "latency_s")
    EXPORTER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    exporter: str
    transport: str
    bytes_per_s: float
    latency_s: float
    def __init__(self, exporter: _Optional[str] = ..., transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("members", "live_requests", "target")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    live_requests: int
    target: ScaleTarget
    def __init__(self, members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., live_requests: _Optional[int] = ..., target: _Optional[_Union[ScaleTarget, _Mapping]] = ...) -> None: ...

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

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: ScaleTarget
    def __init__(self, target: _Optional[_Union[ScaleTarget, _Mapping]] = ...) -> None: ...

class ScaleTarget(_message.Message):
    __slots__ = ("prefill", "decode", "version", "follower", "reached", "problem")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    version: int
    follower: str
    reached: int
    problem: str
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., version: _Optional[int] = ..., follower: _Optional[str] = ..., reached: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...
