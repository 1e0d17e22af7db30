from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WireDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_DTYPE_UNSPECIFIED: _ClassVar[WireDtype]
    WIRE_DTYPE_NATIVE: _ClassVar[WireDtype]
    WIRE_DTYPE_INT8: _ClassVar[WireDtype]
    WIRE_DTYPE_FP8: _ClassVar[WireDtype]
    WIRE_DTYPE_INT4: _ClassVar[WireDtype]
WIRE_DTYPE_UNSPECIFIED: WireDtype
WIRE_DTYPE_NATIVE: WireDtype
WIRE_DTYPE_INT8: WireDtype
WIRE_DTYPE_FP8: WireDtype
WIRE_DTYPE_INT4: WireDtype

class LeasePrefixRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "importer", "block_hashes", "min_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IMPORTER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    MIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    importer: str
    block_hashes: bytes
    min_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., importer: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., min_blocks: _Optional[int] = ...) -> None: ...

class LeasePrefixResponse(_message.Message):
    __slots__ = ("ticket", "num_blocks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    num_blocks: int
    def __init__(self, ticket: _Optional[bytes] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class OpenLinkCheckRequest(_message.Message):
    __slots__ = ("importer", "signature", "layout", "transports", "endpoints")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    IMPORTER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    importer: str
    signature: bytes
    layout: LayoutFingerprint
    transports: _containers.RepeatedScalarFieldContainer[str]
    endpoints: _containers.ScalarMap[str, bytes]
    def __init__(self, importer: _Optional[str] = ..., signature: _Optional[bytes] = ..., layout: _Optional[_Union[LayoutFingerprint, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., endpoints: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class LinkCheckPath(_message.Message):
    __slots__ = ("transport", "endpoint", "reason")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transport: str
    endpoint: bytes
    reason: str
    def __init__(self, transport: _Optional[str] = ..., endpoint: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class OpenLinkCheckResponse(_message.Message):
    __slots__ = ("epoch", "paths", "block_ids", "open_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    OPEN_S_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    paths: _containers.RepeatedCompositeFieldContainer[LinkCheckPath]
    block_ids: bytes
    open_s: float
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., paths: _Optional[_Iterable[_Union[LinkCheckPath, _Mapping]]] = ..., block_ids: _Optional[bytes] = ..., open_s: _Optional[float] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("ticket_id", "exporter_id", "exporter_incarnation", "exporter_address", "importer", "request_id", "attempt", "num_tokens", "prompt_hash", "num_choices", "expires_at_s")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    EXPORTER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPORTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EXPORTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IMPORTER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_S_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    exporter_id: str
    exporter_incarnation: str
    exporter_address: str
    importer: str
    request_id: str
    attempt: int
    num_tokens: int
    prompt_hash: bytes
    num_choices: int
    expires_at_s: float
    def __init__(self, ticket_id: _Optional[bytes] = ..., exporter_id: _Optional[str] = ..., exporter_incarnation: _Optional[str] = ..., exporter_address: _Optional[str] = ..., importer: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_tokens: _Optional[int] = ..., prompt_hash: _Optional[bytes] = ..., num_choices: _Optional[int] = ..., expires_at_s: _Optional[float] = ...) -> None: ...

class SignedTicket(_message.Message):
    __slots__ = ("ticket", "signature")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    signature: bytes
    def __init__(self, ticket: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Epoch(_message.Message):
    __slots__ = ("member_id", "incarnation", "ticket_id", "attempt")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    incarnation: str
    ticket_id: bytes
    attempt: int
    def __init__(self, member_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., ticket_id: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class ImporterMessage(_message.Message):
    __slots__ = ("attach", "renew", "settle")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    renew: Renew
    settle: Settle
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., settle: _Optional[_Union[Settle, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("ticket", "transports", "layout", "endpoints", "protocol_oldest", "protocol_newest", "digests", "reads_then")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_OLDEST_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_NEWEST_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    READS_THEN_FIELD_NUMBER: _ClassVar[int]
    ticket: SignedTicket
    transports: _containers.RepeatedScalarFieldContainer[str]
    layout: LayoutFingerprint
    endpoints: _containers.ScalarMap[str, bytes]
    protocol_oldest: int
    protocol_newest: int
    digests: _containers.RepeatedScalarFieldContainer[str]
    reads_then: bool
    def __init__(self, ticket: _Optional[_Union[SignedTicket, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., layout: _Optional[_Union[LayoutFingerprint, _Mapping]] = ..., endpoints: _Optional[_Mapping[str, bytes]] = ..., protocol_oldest: _Optional[int] = ..., protocol_newest: _Optional[int] = ..., digests: _Optional[_Iterable[str]] = ..., reads_then: bool = ...) -> None: ...

class LayoutFingerprint(_message.Message):
    __slots__ = ("weights", "model_config", "dtype", "block_table", "wire_dtype", "kv_format")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    weights: str
    model_config: str
    dtype: str
    block_table: str
    wire_dtype: WireDtype
    kv_format: int
    def __init__(self, weights: _Optional[str] = ..., model_config: _Optional[str] = ..., dtype: _Optional[str] = ..., block_table: _Optional[str] = ..., wire_dtype: _Optional[_Union[WireDtype, str]] = ..., kv_format: _Optional[int] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("wait_depth", "wait_mark")
    WAIT_DEPTH_FIELD_NUMBER: _ClassVar[int]
    WAIT_MARK_FIELD_NUMBER: _ClassVar[int]
    wait_depth: int
    wait_mark: int
    def __init__(self, wait_depth: _Optional[int] = ..., wait_mark: _Optional[int] = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ("epoch", "outcome", "reason")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[Settle.Outcome]
        OUTCOME_OK: _ClassVar[Settle.Outcome]
        OUTCOME_UNNEEDED: _ClassVar[Settle.Outcome]
        OUTCOME_FAILED: _ClassVar[Settle.Outcome]
    OUTCOME_UNSPECIFIED: Settle.Outcome
    OUTCOME_OK: Settle.Outcome
    OUTCOME_UNNEEDED: Settle.Outcome
    OUTCOME_FAILED: Settle.Outcome
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    outcome: Settle.Outcome
    reason: str
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., outcome: _Optional[_Union[Settle.Outcome, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ExporterMessage(_message.Message):
    __slots__ = ("accepted", "refused", "sealed", "finished", "failed", "settled", "then")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    refused: Refused
    sealed: Sealed
    finished: Finished
    failed: Failed
    settled: Settled
    then: _containers.RepeatedCompositeFieldContainer[ExporterMessage]
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., then: _Optional[_Iterable[_Union[ExporterMessage, _Mapping]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("epoch", "transport", "endpoint", "lease_s", "max_lease_s", "alternatives", "protocol", "digest")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    transport: str
    endpoint: bytes
    lease_s: float
    max_lease_s: float
    alternatives: _containers.RepeatedCompositeFieldContainer[TransportEndpoint]
    protocol: int
    digest: str
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., transport: _Optional[str] = ..., endpoint: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., max_lease_s: _Optional[float] = ..., alternatives: _Optional[_Iterable[_Union[TransportEndpoint, _Mapping]]] = ..., protocol: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class TransportEndpoint(_message.Message):
    __slots__ = ("transport", "endpoint")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    transport: str
    endpoint: bytes
    def __init__(self, transport: _Optional[str] = ..., endpoint: _Optional[bytes] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    detail: str
    def __init__(self, reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("epoch", "first_index", "block_ids", "digests", "unverified_block_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    first_index: int
    block_ids: bytes
    digests: bytes
    unverified_block_ids: bytes
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., first_index: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., unverified_block_ids: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("epoch", "first_tokens", "num_tokens", "prompt_hash", "tail", "age_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    num_tokens: int
    prompt_hash: bytes
    tail: TailBlock
    age_s: float
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., num_tokens: _Optional[int] = ..., prompt_hash: _Optional[bytes] = ..., tail: _Optional[_Union[TailBlock, _Mapping]] = ..., age_s: _Optional[float] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "ended")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    ended: bool
    def __init__(self, token_id: _Optional[int] = ..., ended: bool = ...) -> None: ...

class TailBlock(_message.Message):
    __slots__ = ("block_id", "digest", "num_valid", "is_unverified")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_VALID_FIELD_NUMBER: _ClassVar[int]
    IS_UNVERIFIED_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    digest: bytes
    num_valid: int
    is_unverified: bool
    def __init__(self, block_id: _Optional[int] = ..., digest: _Optional[bytes] = ..., num_valid: _Optional[int] = ..., is_unverified: bool = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("epoch", "reason", "detail")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    reason: str
    detail: str
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("epoch", "valid")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    valid: bool
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ..., valid: bool = ...) -> None: ...
