"""The errors of the client library.

TandemError              `reason`: the error's stable name; `retry_after_s`: when to try again, in seconds;
│                        `param`: the field of the request that must change, or the key's limit that was reached;
│                        `is_lost`: the error is not a router's: the connection broke or could not be made
├── InvalidRequest       the request must change; the message says how
│   └── UnknownModel     the cluster does not serve this model
├── Unauthenticated      the API key is missing or wrong
├── PermissionDenied     the API key does not allow it
├── Overloaded           the request was not started; try again after `retry_after_s`
├── Unavailable          no router responds, or its cluster cannot serve now
├── DeadlineExceeded     `timeout_s` has passed
├── Cancelled            the generation or its client was closed
└── InternalError        a fault of the server; its log has the details under the request id
"""

import re

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tandem.channel import explained, is_failed_handshake

DETAILS_KEY = "grpc-status-details-bin"  # metadata: the google.rpc.Status of a failed call
DOMAIN = "tandem"  # of ErrorInfo
HANDSHAKE_FAILED = "handshake_failed"  # reason of Unavailable: TLS or the protocol differs, which waiting does not end
LIMIT_KEY = "limit"  # metadata of ErrorInfo: the limit of the API key that was reached

_REASON = "tandem-reason"
_TOO_LARGE = re.compile(r"SERVER: Received message larger than max \((\d+) vs\. (\d+)\)")
_RETRY_AFTER_S = "tandem-retry-after-s"


class TandemError(Exception):
    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after_s: float | None = None,
        param: str | None = None,
        is_lost: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.param = param
        self.is_lost = is_lost


class InvalidRequest(TandemError):
    pass


class UnknownModel(InvalidRequest):
    pass


class Unauthenticated(TandemError):
    pass


class PermissionDenied(TandemError):
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
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def error_from_rpc(error: grpc.RpcError) -> TandemError:
    """Convert the status of a call to an error of this module. Without a reason from the server, `reason` is the name
    of the status."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    if large := _TOO_LARGE.search(error.details() or ""):  # gRPC's status is that of a full server
        sizes = f"the request has {int(large[1]):,} bytes; this router takes at most {int(large[2]):,}"
        return InvalidRequest(f"{sizes} (--max-message-bytes)", reason="request_too_large")
    trailing = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    retry_after = trailing.get(_RETRY_AFTER_S)
    details = explained(error.details() or error.code().name)
    reason = trailing.get(_REASON) or error.code().name.lower()
    if _REASON not in trailing and is_failed_handshake(error.details() or ""):
        reason = HANDSHAKE_FAILED
    if (
        error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and _REASON not in trailing
    ):  # the deadline passed in this process
        details = "no response came within timeout_s"
    return _KINDS.get(error.code(), InternalError)(
        details,
        reason=reason,
        retry_after_s=float(retry_after) if retry_after is not None else None,
        param=_param(error),
        is_lost=error.code() is grpc.StatusCode.UNAVAILABLE and _REASON not in trailing,
    )


def _param(error: "grpc.Call | grpc.aio.AioRpcError") -> str | None:
    """Return the content of the rich details of an error, None without such details or with damaged ones."""
    bad, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            if detail.Unpack(bad) and bad.field_violations:
                return str(bad.field_violations[0].field)
            if detail.Unpack(info) and info.domain == DOMAIN and LIMIT_KEY in info.metadata:
                return str(info.metadata[LIMIT_KEY])
    except (ValueError, DecodeError):
        pass
    return None
