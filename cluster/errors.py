"""Every error that crosses a boundary of Tandem, and the one table of their names on the wire.

    TandemError
    ├── InvalidRequest            the client must change something
    │   ├── ContextLengthExceeded
    │   ├── RequestTooLarge       it would not fit one message when it is resumed
    │   ├── UnknownModel
    │   ├── UnsupportedField
    │   ├── InvalidGrammar        the schema, regex or grammar of the answer cannot be compiled within the bounds
    │   ├── GrammarRejected       committed tokens do not follow the request's grammar
    │   └── NoTokenizer / NoChatTemplate
    ├── Unauthenticated
    ├── PermissionDenied          the API key does not allow it
    ├── DuplicateRequest          the id belongs to a live request
    ├── ResumeRefused             the request cannot be resumed here as it was accepted
    │   ├── AcceptanceMissing / AcceptanceInvalid / AcceptanceOfAnotherClient
    │   ├── ResumeSuperseded      this router serves a newer stream of the request, which continues
    │   └── PromptChanged / RequestChanged    this router derives another prompt or other parameters
    ├── NotFound                  no such member, or no such sequence there
    ├── Overloaded                try again later
    │   ├── QueueFull
    │   ├── LimitReached          a limit of the caller's API key, named in `param`
    │   ├── SloUnattainable       no worker can keep the latency targets that the client asked for, as predicted
    │   ├── TooManyFrozen
    │   ├── SlowClient
    │   └── BuffersFull           the tokens buffered for clients would exceed the router's limit
    ├── Unavailable               the cluster cannot do it now
    │   ├── NoWorkers
    │   ├── NoWorkerLargeEnough   no worker can hold the request's prompt and max_tokens
    │   ├── NoGrammarWorker       no worker applies grammars as this router does
    │   ├── WorkerTooSmall        this worker cannot hold the request, another may. Never reaches a client
    │   ├── Draining
    │   ├── Unhealthy             a worker's step thread or event loop is stuck, or its tokens are wrong
    │   ├── WorkerLost
    │   │   └── AllWorkersSilent  the router receives nothing from any worker, and may be cut off itself
    │   ├── MemberRefused         the callee does not accept the caller as a member of its cluster
    │   ├── StepFailed            a worker's step raised an exception: its device, memory or model failed
    │   └── WrongTokens           a worker sent tokens that break the protocol
    ├── MalformedMessage          another member sent a message with a field out of its bounds
    ├── DeadlineExceeded
    ├── Cancelled
    ├── HandOffFailed             carries one of HandOffReason
    ├── RegistryUnavailable
    ├── Fenced                    a newer incarnation of this member exists
    ├── DrainIncomplete           the grace period of a drain ended with work left
    ├── ConfigError               wrong flag, environment variable or file; refused before anything starts
    │   └── ModelRefused          the model would be silently wrong, or cannot be loaded
    └── InternalError             a bug in Tandem

An error's `reason` is its stable name: it goes into counters, ledgers and wire messages. Its text says what happened,
with the numbers, and what to change.
"""

from enum import StrEnum
from http import HTTPStatus


class TandemError(Exception):
    """The base class of all errors. `reason` is the stable name of the kind."""

    reason = "internal"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(TandemError):
    reason = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        """`param`: the field of the request that must change, if it is one."""
        super().__init__(message, retry_after_s=retry_after_s)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """OpenAI's code: many clients shorten the conversation when they receive it."""

    reason = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        num_prompt: int | None = None,
        most: int | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`num_prompt`: the tokens of the prompt. `most`: the tokens that a prompt of this request may have. None: the
        error came from another member."""
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.num_prompt = num_prompt
        self.most = most


class RequestTooLarge(InvalidRequest):
    reason = "request_too_large"


class UnknownModel(InvalidRequest):
    reason = "unknown_model"


class UnsupportedField(InvalidRequest):
    reason = "unsupported_field"


class InvalidGrammar(InvalidRequest):
    reason = "invalid_grammar"


class GrammarRejected(InvalidRequest):
    """The tokens that a request continues from do not follow its grammar, or the grammar cannot continue from them.
    The request ends: it is never continued without its grammar."""

    reason = "grammar_rejected"


class NoTokenizer(InvalidRequest):
    reason = "no_tokenizer"


class NoChatTemplate(InvalidRequest):
    reason = "no_chat_template"


class Unauthenticated(TandemError):
    reason = "unauthenticated"


class PermissionDenied(TandemError):
    reason = "permission_denied"


class DuplicateRequest(TandemError):
    reason = "duplicate_request"


class ResumeRefused(TandemError):
    reason = "resume_refused"


class AcceptanceMissing(ResumeRefused):
    reason = "acceptance_missing"


class AcceptanceInvalid(ResumeRefused):
    reason = "acceptance_invalid"


class AcceptanceOfAnotherClient(ResumeRefused):
    reason = "acceptance_of_another_client"


class PromptChanged(ResumeRefused):
    reason = "prompt_changed"


class RequestChanged(ResumeRefused):
    reason = "request_changed"


class ResumeSuperseded(ResumeRefused):
    reason = "resume_superseded"


class NotFound(TandemError):
    reason = "not_found"


class Overloaded(TandemError):
    reason = "overloaded"


class QueueFull(Overloaded):
    reason = "queue_full"


class LimitReached(Overloaded):
    reason = "limit_reached"

    def __init__(self, limit: str, message: str = "", *, retry_after_s: float | None = None) -> None:
        """`limit`: the name of the limit, such as requests_per_minute."""
        super().__init__(f"{limit}: {message}" if message else limit, retry_after_s=retry_after_s)
        self.param = limit


class SloUnattainable(Overloaded):
    reason = "slo_unattainable"


class TooManyFrozen(Overloaded):
    """A decode worker has its maximum number of frozen sequences. It freezes another one only after one of them has
    left or continues.
    """

    reason = "too_many_frozen"


class SlowClient(Overloaded):
    reason = "slow_client"


class BuffersFull(Overloaded):
    reason = "buffers_full"


class Unavailable(TandemError):
    reason = "unavailable"


class NoWorkers(Unavailable):
    reason = "no_workers"


class NoWorkerLargeEnough(Unavailable):
    reason = "no_worker_large_enough"


class NoGrammarWorker(Unavailable):
    reason = "no_grammar_worker"


class WorkerTooSmall(Unavailable):
    reason = "worker_too_small"


class Draining(Unavailable):
    reason = "draining"


class Unhealthy(Unavailable):
    reason = "unhealthy"


class WorkerLost(Unavailable):
    reason = "worker_lost"


class AllWorkersSilent(WorkerLost):
    """The worker does not answer, and no other worker has sent anything since it was asked. It uses up no attempt, so
    clients never receive it."""

    reason = "all_workers_silent"


class MemberRefused(Unavailable):
    """The caller has not proved that it is a member of the callee's cluster. `refusal` says why."""

    reason = "member_refused"

    def __init__(self, message: str, *, refusal: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.refusal = refusal


class StepFailed(Unavailable):
    reason = "step_failed"


class WrongTokens(Unavailable):
    """A worker sent too few or too many tokens, a different first token, or a token with a wrong index or end, or
    outside the vocabulary. Clients never receive such tokens."""

    reason = "wrong_tokens"


class MalformedMessage(TandemError):
    """The sending member is at fault, never the client; another attempt may succeed."""

    reason = "malformed_message"


class DeadlineExceeded(TandemError):
    reason = "deadline_exceeded"


class Cancelled(TandemError):
    reason = "cancelled"


class HandOffReason(StrEnum):
    """Why a hand-off was refused or ended without its blocks."""

    BAD_SIGNATURE = "bad_signature"
    TICKET_EXPIRED = "ticket_expired"
    FOREIGN_TICKET = "foreign_ticket"  # issued to another importer
    UNKNOWN_TICKET = "unknown_ticket"  # this worker does not hold it, or no longer does
    REPLAYED_TICKET = "replayed_ticket"  # this attempt has already attached or settled
    STALE_INCARNATION = "stale_incarnation"
    LAYOUT_MISMATCH = "layout_mismatch"
    NO_COMMON_PROTOCOL = "no_common_protocol"
    NO_COMMON_TRANSPORT = "no_common_transport"
    LEASE_LAPSED = "lease_lapsed"
    DIGEST_MISMATCH = "digest_mismatch"
    UNVERIFIABLE = "unverifiable"  # the exporter gives no digests, and this importer verifies
    UNVERIFIED_PROVENANCE = "unverified_provenance"  # the exporter did not verify its copy, and this importer verifies
    COUNT_MISMATCH = "count_mismatch"
    PROMPT_MISMATCH = "prompt_mismatch"
    READ_FAILED = "read_failed"
    READ_TIMEOUT = "read_timeout"
    EXPORTER_LOST = "exporter_lost"
    IMPORTER_LOST = "importer_lost"
    PREFILL_FAILED = "prefill_failed"
    NOT_ENOUGH_BLOCKS = "not_enough_blocks"
    CANCELLED = "cancelled"
    PROTOCOL = "protocol"  # a message that the state machine does not allow
    MALFORMED_MESSAGE = "malformed_handoff_message"  # a message with a field out of its bounds


class HandOffFailed(TandemError):
    """A hand-off ended without usable blocks; `handoff_reason` says why."""

    reason = "handoff_failed"

    def __init__(self, handoff_reason: HandOffReason, message: str) -> None:
        super().__init__(f"{handoff_reason}: {message}")
        self.handoff_reason = handoff_reason
        self.detail = message


class RegistryUnavailable(TandemError):
    reason = "registry_unavailable"


class Fenced(TandemError):
    reason = "fenced"


class DrainIncomplete(TandemError):
    reason = "drain_incomplete"


class ConfigError(TandemError):
    reason = "config"


class ModelRefused(ConfigError):
    reason = "model_refused"


class InternalError(TandemError):
    reason = "internal"


# (reason's class) -> (gRPC status name, HTTP status, OpenAI error type). The nearest base class counts.
_STATUS: dict[type[TandemError], tuple[str, HTTPStatus, str]] = {
    TandemError: ("INTERNAL", HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error"),
    InvalidRequest: ("INVALID_ARGUMENT", HTTPStatus.BAD_REQUEST, "invalid_request_error"),
    UnknownModel: ("NOT_FOUND", HTTPStatus.NOT_FOUND, "invalid_request_error"),
    Unauthenticated: ("UNAUTHENTICATED", HTTPStatus.UNAUTHORIZED, "authentication_error"),
    PermissionDenied: ("PERMISSION_DENIED", HTTPStatus.FORBIDDEN, "permission_error"),
    DuplicateRequest: ("ALREADY_EXISTS", HTTPStatus.CONFLICT, "invalid_request_error"),
    ResumeRefused: ("FAILED_PRECONDITION", HTTPStatus.CONFLICT, "invalid_request_error"),
    NotFound: ("NOT_FOUND", HTTPStatus.NOT_FOUND, "invalid_request_error"),
    Overloaded: ("RESOURCE_EXHAUSTED", HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error"),
    Unavailable: ("UNAVAILABLE", HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable"),
    MemberRefused: ("UNAUTHENTICATED", HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable"),
    NoWorkerLargeEnough: ("UNAVAILABLE", HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable"),
    MalformedMessage: ("INTERNAL", HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error"),
    DeadlineExceeded: ("DEADLINE_EXCEEDED", HTTPStatus.REQUEST_TIMEOUT, "timeout_error"),
    Cancelled: ("CANCELLED", HTTPStatus.REQUEST_TIMEOUT, "cancelled"),
    HandOffFailed: ("UNAVAILABLE", HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable"),
    RegistryUnavailable: ("UNAVAILABLE", HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable"),
    Fenced: ("FAILED_PRECONDITION", HTTPStatus.CONFLICT, "internal_error"),
    ConfigError: ("FAILED_PRECONDITION", HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error"),
}


def _row(error: TandemError) -> tuple[str, HTTPStatus, str]:
    return next(_STATUS[base] for base in type(error).__mro__ if base in _STATUS)


def grpc_status(error: TandemError) -> str:
    """Return the name of the `grpc.StatusCode` for this error."""
    return _row(error)[0]


def http_status(error: TandemError) -> int:
    return int(_row(error)[1])


def openai_error_type(error: TandemError) -> str:
    """Return the `error.type` of an OpenAI-style error body."""
    return _row(error)[2]
