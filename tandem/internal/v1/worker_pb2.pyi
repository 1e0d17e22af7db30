from tandem.v1 import admin_pb2 as _admin_pb2
from tandem.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSessionRequest(_message.Message):
    __slots__ = ("caller", "nonce", "signature")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    caller: str
    nonce: bytes
    signature: bytes
    def __init__(self, caller: _Optional[str] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("callee", "nonce", "session_id", "proof", "frame_port")
    CALLEE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    FRAME_PORT_FIELD_NUMBER: _ClassVar[int]
    callee: str
    nonce: bytes
    session_id: bytes
    proof: bytes
    frame_port: int
    def __init__(self, callee: _Optional[str] = ..., nonce: _Optional[bytes] = ..., session_id: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., frame_port: _Optional[int] = ...) -> None: ...

class ResolvedSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "logprobs_plus_one", "rules")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_PLUS_ONE_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logprobs_plus_one: int
    rules: LogitRules
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., logprobs_plus_one: _Optional[int] = ..., rules: _Optional[_Union[LogitRules, _Mapping]] = ...) -> None: ...

class LogitRules(_message.Message):
    __slots__ = ("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty", "allowed_token_ids", "bad_words")
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    allowed_token_ids: bytes
    bad_words: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., allowed_token_ids: _Optional[bytes] = ..., bad_words: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenStops(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: bytes
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[bytes] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "sampling", "stops", "seeds", "num_committed", "importer", "timeout_s", "cache_salt", "prefix_sources", "priority", "is_batch", "age_s", "is_unproven", "router", "num_expected_cached", "grammar", "tenant", "weight", "prompt_logprobs_plus_one")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    IMPORTER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IS_BATCH_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    IS_UNPROVEN_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPECTED_CACHED_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_PLUS_ONE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: bytes
    sampling: ResolvedSampling
    stops: TokenStops
    seeds: _containers.RepeatedScalarFieldContainer[int]
    num_committed: int
    importer: str
    timeout_s: float
    cache_salt: str
    prefix_sources: _containers.RepeatedCompositeFieldContainer[PrefixSource]
    priority: int
    is_batch: bool
    age_s: float
    is_unproven: bool
    router: str
    num_expected_cached: int
    grammar: _inference_pb2.Grammar
    tenant: str
    weight: int
    prompt_logprobs_plus_one: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[ResolvedSampling, _Mapping]] = ..., stops: _Optional[_Union[TokenStops, _Mapping]] = ..., seeds: _Optional[_Iterable[int]] = ..., num_committed: _Optional[int] = ..., importer: _Optional[str] = ..., timeout_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., prefix_sources: _Optional[_Iterable[_Union[PrefixSource, _Mapping]]] = ..., priority: _Optional[int] = ..., is_batch: bool = ..., age_s: _Optional[float] = ..., is_unproven: bool = ..., router: _Optional[str] = ..., num_expected_cached: _Optional[int] = ..., grammar: _Optional[_Union[_inference_pb2.Grammar, _Mapping]] = ..., tenant: _Optional[str] = ..., weight: _Optional[int] = ..., prompt_logprobs_plus_one: _Optional[int] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("member", "address", "num_tokens")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    member: str
    address: str
    num_tokens: int
    def __init__(self, member: _Optional[str] = ..., address: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("accepted", "first_tokens", "prompt_logprobs")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    first_tokens: FirstTokens
    prompt_logprobs: PromptLogprobs
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "num_top", "logprobs", "ranks", "top_token_ids", "top_logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, first_position: _Optional[int] = ..., num_top: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class AbandonResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "finish_reason")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _inference_pb2.PositionLogprobs
    finish_reason: _inference_pb2.FinishReason
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.PositionLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("tokens", "queue_s", "prefill_s", "num_cached", "num_pulled", "chunks")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    queue_s: float
    prefill_s: float
    num_cached: int
    num_pulled: int
    chunks: _containers.RepeatedCompositeFieldContainer[PrefillChunk]
    def __init__(self, tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., num_cached: _Optional[int] = ..., num_pulled: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[PrefillChunk, _Mapping]]] = ...) -> None: ...

class PrefillChunk(_message.Message):
    __slots__ = ("num_tokens", "ended_s")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    ended_s: float
    def __init__(self, num_tokens: _Optional[int] = ..., ended_s: _Optional[float] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("handle", "seed", "committed_token_ids")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    seed: int
    committed_token_ids: bytes
    def __init__(self, handle: _Optional[int] = ..., seed: _Optional[int] = ..., committed_token_ids: _Optional[bytes] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "router", "prompt_token_ids", "sampling", "stops", "sequences", "ticket", "timeout_s", "cache_salt", "priority", "is_batch", "age_s", "is_unproven", "num_expected_cached", "num_expected_output", "grammar", "tenant", "weight")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IS_BATCH_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    IS_UNPROVEN_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPECTED_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPECTED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    router: str
    prompt_token_ids: bytes
    sampling: ResolvedSampling
    stops: TokenStops
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceStart]
    ticket: bytes
    timeout_s: float
    cache_salt: str
    priority: int
    is_batch: bool
    age_s: float
    is_unproven: bool
    num_expected_cached: int
    num_expected_output: float
    grammar: _inference_pb2.Grammar
    tenant: str
    weight: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., router: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[ResolvedSampling, _Mapping]] = ..., stops: _Optional[_Union[TokenStops, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[SequenceStart, _Mapping]]] = ..., ticket: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., is_batch: bool = ..., age_s: _Optional[float] = ..., is_unproven: bool = ..., num_expected_cached: _Optional[int] = ..., num_expected_output: _Optional[float] = ..., grammar: _Optional[_Union[_inference_pb2.Grammar, _Mapping]] = ..., tenant: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class StartResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FreezeRequest(_message.Message):
    __slots__ = ("router", "handle", "importer", "attempt")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    IMPORTER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    router: str
    handle: int
    importer: str
    attempt: int
    def __init__(self, router: _Optional[str] = ..., handle: _Optional[int] = ..., importer: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class FreezeResponse(_message.Message):
    __slots__ = ("ticket", "num_output")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    num_output: int
    def __init__(self, ticket: _Optional[bytes] = ..., num_output: _Optional[int] = ...) -> None: ...

class ThawRequest(_message.Message):
    __slots__ = ("router", "handle", "new_handle")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NEW_HANDLE_FIELD_NUMBER: _ClassVar[int]
    router: str
    handle: int
    new_handle: int
    def __init__(self, router: _Optional[str] = ..., handle: _Optional[int] = ..., new_handle: _Optional[int] = ...) -> None: ...

class ThawResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("hello", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    cancel: CancelSequences
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., cancel: _Optional[_Union[CancelSequences, _Mapping]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router", "has_no_sequences")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    HAS_NO_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    router: str
    has_no_sequences: bool
    def __init__(self, router: _Optional[str] = ..., has_no_sequences: bool = ...) -> None: ...

class CancelSequences(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    def __init__(self, handles: _Optional[bytes] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "step", "started", "failed", "heartbeat", "leaving", "others")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    step: StepOutput
    started: SequenceStarted
    failed: SequenceFailed
    heartbeat: Heartbeat
    leaving: WorkerLeaving
    others: OthersWork
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., started: _Optional[_Union[SequenceStarted, _Mapping]] = ..., failed: _Optional[_Union[SequenceFailed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., leaving: _Optional[_Union[WorkerLeaving, _Mapping]] = ..., others: _Optional[_Union[OthersWork, _Mapping]] = ...) -> None: ...

class WorkerLeaving(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step", "handles", "token_ids", "indices", "logprobs", "ends")
    STEP_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    handles: bytes
    token_ids: bytes
    indices: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.PositionLogprobs]
    ends: _containers.RepeatedCompositeFieldContainer[SequenceEnd]
    def __init__(self, step: _Optional[int] = ..., handles: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., indices: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.PositionLogprobs, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[SequenceEnd, _Mapping]]] = ...) -> None: ...

class SequenceEnd(_message.Message):
    __slots__ = ("handle", "finish_reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    handle: int
    finish_reason: _inference_pb2.FinishReason
    def __init__(self, handle: _Optional[int] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ...) -> None: ...

class SequenceStarted(_message.Message):
    __slots__ = ("handles", "first_token_ids", "transfer_s", "queue_s", "kv_bytes", "transport", "num_cached")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    first_token_ids: bytes
    transfer_s: float
    queue_s: float
    kv_bytes: int
    transport: str
    num_cached: int
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., first_token_ids: _Optional[bytes] = ..., transfer_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., num_cached: _Optional[int] = ...) -> None: ...

class SequenceFailed(_message.Message):
    __slots__ = ("handles", "reason", "detail")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    detail: str
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step", "running", "waiting", "free_blocks", "links", "step_s", "service_times")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TIMES_FIELD_NUMBER: _ClassVar[int]
    step: int
    running: int
    waiting: int
    free_blocks: int
    links: _containers.RepeatedCompositeFieldContainer[_admin_pb2.LinkSpeed]
    step_s: float
    service_times: ServiceTimes
    def __init__(self, step: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., links: _Optional[_Iterable[_Union[_admin_pb2.LinkSpeed, _Mapping]]] = ..., step_s: _Optional[float] = ..., service_times: _Optional[_Union[ServiceTimes, _Mapping]] = ...) -> None: ...

class OthersWork(_message.Message):
    __slots__ = ("number", "prompt_tokens", "prompt_attended", "first_tokens", "first_attended", "elapsed_s", "num_exported", "num_running", "num_joining", "context", "left")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPORTED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_JOINING_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    number: int
    prompt_tokens: int
    prompt_attended: float
    first_tokens: int
    first_attended: float
    elapsed_s: float
    num_exported: int
    num_running: int
    num_joining: int
    context: int
    left: float
    def __init__(self, number: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prompt_attended: _Optional[float] = ..., first_tokens: _Optional[int] = ..., first_attended: _Optional[float] = ..., elapsed_s: _Optional[float] = ..., num_exported: _Optional[int] = ..., num_running: _Optional[int] = ..., num_joining: _Optional[int] = ..., context: _Optional[int] = ..., left: _Optional[float] = ...) -> None: ...

class ServiceTimes(_message.Message):
    __slots__ = ("prefill", "decode", "mixed", "hand_off", "typical_prefill", "typical_decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    MIXED_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: PrefillTimes
    decode: DecodeTimes
    mixed: MixedTimes
    hand_off: HandOffTimes
    typical_prefill: TimedStep
    typical_decode: TimedStep
    def __init__(self, prefill: _Optional[_Union[PrefillTimes, _Mapping]] = ..., decode: _Optional[_Union[DecodeTimes, _Mapping]] = ..., mixed: _Optional[_Union[MixedTimes, _Mapping]] = ..., hand_off: _Optional[_Union[HandOffTimes, _Mapping]] = ..., typical_prefill: _Optional[_Union[TimedStep, _Mapping]] = ..., typical_decode: _Optional[_Union[TimedStep, _Mapping]] = ...) -> None: ...

class TimedStep(_message.Message):
    __slots__ = ("num_new", "attended", "batch", "context", "seconds")
    NUM_NEW_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_new: int
    attended: float
    batch: int
    context: int
    seconds: float
    def __init__(self, num_new: _Optional[int] = ..., attended: _Optional[float] = ..., batch: _Optional[int] = ..., context: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class PrefillTimes(_message.Message):
    __slots__ = ("step_s", "per_token_s", "per_token_context_s", "relative_error")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    step_s: float
    per_token_s: float
    per_token_context_s: float
    relative_error: float
    def __init__(self, step_s: _Optional[float] = ..., per_token_s: _Optional[float] = ..., per_token_context_s: _Optional[float] = ..., relative_error: _Optional[float] = ...) -> None: ...

class DecodeTimes(_message.Message):
    __slots__ = ("step_s", "per_sequence_s", "per_context_token_s", "relative_error")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PER_SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    PER_CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    step_s: float
    per_sequence_s: float
    per_context_token_s: float
    relative_error: float
    def __init__(self, step_s: _Optional[float] = ..., per_sequence_s: _Optional[float] = ..., per_context_token_s: _Optional[float] = ..., relative_error: _Optional[float] = ...) -> None: ...

class MixedTimes(_message.Message):
    __slots__ = ("factor", "relative_error")
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    factor: float
    relative_error: float
    def __init__(self, factor: _Optional[float] = ..., relative_error: _Optional[float] = ...) -> None: ...

class HandOffTimes(_message.Message):
    __slots__ = ("fixed_s", "relative_error")
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    fixed_s: float
    relative_error: float
    def __init__(self, fixed_s: _Optional[float] = ..., relative_error: _Optional[float] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: _admin_pb2.MemberRole
    def __init__(self, role: _Optional[_Union[_admin_pb2.MemberRole, str]] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("former_role",)
    FORMER_ROLE_FIELD_NUMBER: _ClassVar[int]
    former_role: _admin_pb2.MemberRole
    def __init__(self, former_role: _Optional[_Union[_admin_pb2.MemberRole, str]] = ...) -> None: ...

class ProfileStepsRequest(_message.Message):
    __slots__ = ("num_steps", "timeout_s")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    timeout_s: float
    def __init__(self, num_steps: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ProfileStepsResponse(_message.Message):
    __slots__ = ("num_steps", "trace")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    trace: bytes
    def __init__(self, num_steps: _Optional[int] = ..., trace: _Optional[bytes] = ...) -> None: ...

class CheckLinkRequest(_message.Message):
    __slots__ = ("exporter", "address", "max_blocks")
    EXPORTER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    exporter: str
    address: str
    max_blocks: int
    def __init__(self, exporter: _Optional[str] = ..., address: _Optional[str] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class CheckLinkResponse(_message.Message):
    __slots__ = ("paths", "num_bytes")
    PATHS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    paths: _containers.RepeatedCompositeFieldContainer[MeasuredPath]
    num_bytes: int
    def __init__(self, paths: _Optional[_Iterable[_Union[MeasuredPath, _Mapping]]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class MeasuredPath(_message.Message):
    __slots__ = ("transport", "bytes_per_s", "latency_s", "reason")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transport: str
    bytes_per_s: float
    latency_s: float
    reason: str
    def __init__(self, transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class SubscribeCacheEventsRequest(_message.Message):
    __slots__ = ("member", "since")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    member: str
    since: int
    def __init__(self, member: _Optional[str] = ..., since: _Optional[int] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("cleared", "first_number", "next_number", "stored", "removed", "member")
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NEXT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    cleared: bool
    first_number: int
    next_number: int
    stored: bytes
    removed: bytes
    member: str
    def __init__(self, cleared: bool = ..., first_number: _Optional[int] = ..., next_number: _Optional[int] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., member: _Optional[str] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("member", "blocks", "figures", "violation")
    class BlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    VIOLATION_FIELD_NUMBER: _ClassVar[int]
    member: str
    blocks: _containers.ScalarMap[str, int]
    figures: _containers.ScalarMap[str, float]
    violation: str
    def __init__(self, member: _Optional[str] = ..., blocks: _Optional[_Mapping[str, int]] = ..., figures: _Optional[_Mapping[str, float]] = ..., violation: _Optional[str] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("wait",)
    WAIT_FIELD_NUMBER: _ClassVar[int]
    wait: bool
    def __init__(self, wait: bool = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: _admin_pb2.DrainOutcome
    def __init__(self, outcome: _Optional[_Union[_admin_pb2.DrainOutcome, str]] = ...) -> None: ...
