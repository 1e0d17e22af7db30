"""The details in the status of a client's failed call beside its code: google.rpc's rich error details.

`ErrorInfo` has the reason, in capitals as its specification demands, and the domain `tandem`; `BadRequest` the field
that must change; `RetryInfo` the time after which a retry may succeed. Source: google/rpc/error_details.proto.
"""

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from cluster.errors import InvalidRequest, LimitReached, TandemError
from tandem.errors import DETAILS_KEY, DOMAIN, LIMIT_KEY

# A client drops a status with more than 8 KiB of metadata and reports RESOURCE_EXHAUSTED. The message is in it three
# times, once with three characters for each byte that is not ASCII.
_MAX_MESSAGE_BYTES = 1200


def shortened(message: str) -> str:
    """Return the message, cut to what the metadata of a call can carry."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return message
    return encoded[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + " ..."


def rich_status(error: TandemError, code: grpc.StatusCode, message: str) -> tuple[str, bytes]:
    """Return the trailing metadata that carries an error as google.rpc.Status. `message`: the one of the call."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(error, message):
        status.details.add().Pack(detail)
    return (DETAILS_KEY, status.SerializeToString())


def _details(error: TandemError, message: str) -> list[Message]:
    reason = error.reason.upper()
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
    if isinstance(error, LimitReached):
        info.metadata[LIMIT_KEY] = error.param
    details: list[Message] = [info]
    if isinstance(error, InvalidRequest) and error.param:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.param, description=message, reason=reason)
        details.append(bad)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(retry)
    return details
