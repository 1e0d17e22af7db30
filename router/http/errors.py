"""Shapes every refusal as OpenAI clients expect it: `{"error": {"message", "type", "param", "code"}}`, and the status.
On Anthropic's paths it is `{"type": "error", "error": {"type", "message"}}`.

Names and statuses come from the table in cluster/errors.py. A response never contains a stack trace; internal errors
are logged with the request id.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from cluster.errors import (
    ContextLengthExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    TandemError,
    Unauthenticated,
    UnsupportedField,
    http_status,
    openai_error_type,
)
from router.http.bodies.strict_body import all_bodies

_NOT_AN_OBJECT = ("missing", "model_type", "model_attributes_type", "dict_type")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ELSEWHERE_S = 1.0  # behind a load balancer the next try finds another router; our own client needs no wait
_MOST_COMPARED = 64  # characters of an unknown name
_MAX_REPORTED = 5  # validation errors in one message
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_LOG = logging.getLogger("tandem.router.http")


def json_bytes(value: object) -> bytes:
    """Encode as compact JSON. Half of a surrogate pair, which a client can send as an escape, is encoded as an
    escape."""
    return _COMPACT.encode(value).encode("utf-8", "backslashreplace")


def error_body(error: TandemError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": openai_error_type(error),
            "param": getattr(error, "param", None),
            "code": error.reason,
        }
    }


def error_response(error: TandemError, path: str = "") -> Response:
    """Return a refusal. `path`: of the request; Anthropic's paths have errors of their own shape."""
    headers: dict[str, str] = {}
    retry_after_s = _ELSEWHERE_S if isinstance(error, Draining) else error.retry_after_s
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    body = anthropic_refusal(error) if is_anthropic(path) else error_body(error)
    return Response(json_bytes(body), http_status(error), headers, media_type="application/json")


def status_response(status: int, message: str, headers: Mapping[str, str] | None = None, *, path: str = "") -> Response:
    """Return a refusal by the HTTP layer itself: unknown path, wrong method, body too large."""
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    body: dict[str, Any] = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    if is_anthropic(path):
        body = _anthropic_error(status, message)
    return Response(json_bytes(body), status, headers, media_type="application/json")


def internal_error(error: Exception, request_id: str) -> InternalError:
    """Log an unhandled error. The client receives only the request id with which to find it in the log."""
    _LOG.error("a request failed with an unexpected error", exc_info=error, extra={"request_id": request_id})
    return InternalError(f"internal error; the router's log has it under request id {request_id}")


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> TandemError:
    """Convert the errors that pydantic found. An unsupported field is reported before any other error, but not the
    fields of an object whose `type` is unsupported."""
    unsupported = {error["loc"][:-1] for error in errors if _is_of_type(error)}
    errors = [error for error in errors if error["loc"][:-1] not in unsupported or _is_of_type(error)]
    for error in errors:
        if error["type"] == "extra_forbidden":
            param = _path(error["loc"])
            return UnsupportedField(f"unsupported field {param!r}: {_instead(str(error['loc'][-1]))}", param=param)
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if _path(first["loc"]) == "" and first["type"] in _NOT_AN_OBJECT:
        return InvalidRequest("the body must be a JSON object, sent with content-type: application/json")
    described = "; ".join(_description(error) for error in errors[:_MAX_REPORTED])
    more = f" (and {len(errors) - _MAX_REPORTED} more)" if len(errors) > _MAX_REPORTED else ""
    return InvalidRequest(described + more, param=_param(first) or None)


def _is_of_type(error: Mapping[str, Any]) -> bool:
    return bool(error["type"] == "literal_error" and error["loc"][-1] == "type")


def _instead(name: str) -> str:
    """Return what a client may do about an unsupported field."""
    if any(name in body.asks_for_nothing for body in all_bodies()):
        return "leave it out"
    known = {field for body in all_bodies() for field in body.model_fields}
    close = get_close_matches(name[:_MOST_COMPARED], sorted(known - {name}), n=1, cutoff=0.8)
    return f"did you mean {close[0]}? Otherwise leave it out" if close else "leave it out"


def _description(error: Mapping[str, Any]) -> str:
    path, message = _param(error), str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "literal_error":
        message = f"must be {error['ctx']['expected']}{_but_is(error['input'])}"
    if error["type"] == "union_tag_invalid":
        message = f"must be one of {error['ctx']['expected_tags']}{_but_is(error['ctx']['tag'])}"
    return f"{path}: {message}" if path else message


def _but_is(value: object) -> str:
    return f", not {value[:_MOST_COMPARED]!r}" if isinstance(value, str) else ""


def _param(error: Mapping[str, Any]) -> str:
    path = _path(error["loc"])
    if not error["type"].startswith("union_tag_"):
        return path
    return f"{path}.{error['ctx']['discriminator'].strip(chr(39))}"


def _path(location: Sequence[str | int]) -> str:
    """Convert ('body', 'messages', 0, 'role') to messages[0].role, and ('header', 'x-name') to x-name."""
    path = ""
    for step in location[1:] if location[:1] == ("header",) else location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif path.startswith("messages") and path.endswith("]") and step in _ROLES:
            continue  # the kind of message that pydantic tried
        elif step != "body":
            path += f".{step}" if path else step
    return path


PREFIX = "/v1/messages"
_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    return path == PREFIX or path.startswith(PREFIX + "/")


def anthropic_refusal(error: TandemError) -> dict[str, Any]:
    """Return an error as Anthropic's clients expect it. Claude Code compacts a conversation by the text and the two
    numbers with which Anthropic refuses a prompt that is too long."""
    message = error.message
    if isinstance(error, ContextLengthExceeded) and error.num_prompt is not None:
        message = f"prompt is too long: {error.num_prompt} tokens > {error.most} maximum"
    return _anthropic_error(http_status(error), message)


def _anthropic_error(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    return {"type": "error", "error": {"type": _TYPES.get(HTTPStatus(status), kind), "message": message}}
