"""What a client of Tandem can meet.

TandemError              `reason` is the stable name that the server gives, `retry_after_s` when to come back;
│                        `is_lost`: no router said it, the connection broke or could not be made
├── InvalidRequest       change something; the message says what
│   └── UnknownModel
├── Unauthenticated      the router wants its API key, or another one
├── Overloaded           nothing was done; try again after `retry_after_s`
├── Unavailable          no router answers there, or its cluster cannot serve now
├── DeadlineExceeded
├── Cancelled
└── InternalError        the server's own fault; its log has more under the request id
"""

import grpc

from tandem.channel import explained

_REASON = "tandem-reason"
_RETRY_AFTER_S = "tandem-retry-after-s"


class TandemError(Exception):
    def __init__(
        self, message: str, *, reason: str = "", retry_after_s: float | None = None, is_lost: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.is_lost = is_lost


class InvalidRequest(TandemError):
    pass


class UnknownModel(InvalidRequest):
    pass


class Unauthenticated(TandemError):
    pass


class Overloaded(TandemError):
    pass


class Unavailable(TandemError):
    pass


class DeadlineExceeded(TandemError):
    pass


class Cancelled(TandemError):
    pass


class InternalError(TandemError):
    pass


_KINDS: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def error_from_rpc(error: grpc.RpcError) -> TandemError:
    """The call's status as one of this module's errors. Where the server gave no reason it is the status's name."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    trailing = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    retry_after = trailing.get(_RETRY_AFTER_S)
    details = explained(error.details() or error.code().name)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and _REASON not in trailing:  # by gRPC's own clock, here
        details = "no answer came within the time that it was given: timeout_s"
    return _KINDS.get(error.code(), InternalError)(
        details,
        reason=trailing.get(_REASON) or error.code().name.lower(),
        retry_after_s=float(retry_after) if retry_after is not None else None,
        is_lost=error.code() is grpc.StatusCode.UNAVAILABLE and _REASON not in trailing,
    )
