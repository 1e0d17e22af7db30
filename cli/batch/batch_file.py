"""The files of a batch, in OpenAI's batch format: one JSON object per line.

{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}
{"id": "...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import ConfigError

URLS = ("/v1/chat/completions", "/v1/completions")
_BATCH_CLASS = "flex"  # the service tier of requests that only use capacity that no other request needs
_OK = 200
_ID_PREFIX = "batch_req_"
_BEGIN = f'{{"id": "{_ID_PREFIX}'  # of every line of answers


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """`status_code` 0: no router answered, as `problem` says."""

    custom_id: str
    status_code: int
    request_id: str = ""
    body: Any = None
    problem: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status_code == _OK

    def to_line(self) -> str:
        response = {"status_code": self.status_code, "request_id": self.request_id, "body": self.body}
        line = {
            "id": _ID_PREFIX + self.custom_id,
            "custom_id": self.custom_id,
            "response": response if self.status_code else None,
            "error": None if self.status_code else {"code": "unavailable", "message": self.problem},
        }
        return json.dumps(line, ensure_ascii=False) + "\n"


def read_requests(lines: Iterable[str], name: str) -> list[BatchRequest]:
    """Return the requests. Those without a service tier get the batch class. Raises ConfigError, which names the line
    of the file `name`."""
    found: dict[str, BatchRequest] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(line)
        except ValueError as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
        if request.custom_id in found:
            raise ConfigError(f"{name}, line {number}: custom_id {request.custom_id!r} is given twice")
        found[request.custom_id] = request
    return list(found.values())


def kept_lines(lines: Sequence[str], name: str, asked: Collection[str]) -> dict[str, str]:
    """Return the lines of an earlier run that stay, by custom_id: all but those of requests in `asked` that another
    attempt may answer differently, and a last line that an interruption cut off.

    Raises ConfigError if the file `name` holds anything else, because its lines would be lost."""
    kept: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if number == len(lines) and _is_torn(line):
            continue
        try:
            answer = json.loads(line)
            custom_id, response = answer["custom_id"], answer["response"]
            status_code = response["status_code"] if response else 0
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{name}, line {number}: not an answer of a batch; write the answers elsewhere") from None
        if is_final(status_code) or custom_id not in asked:
            kept[custom_id] = line
    return kept


def _is_torn(line: str) -> bool:
    """Return whether this is the beginning of an answer of ours that was not written to its end."""
    return not line.endswith("\n") and (line.startswith(_BEGIN) or _BEGIN.startswith(line))


def is_final(status_code: int) -> bool:
    """Return whether another attempt would get the same status: not where the cluster is overloaded or failing."""
    return status_code != 429 and 0 < status_code < 500


def _request(line: str) -> BatchRequest:
    """Raises ValueError."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(request, dict):
        raise ValueError("a request is an object")
    custom_id, url, body = request.get("custom_id"), request.get("url"), request.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a text that names the request")
    if request.get("method", "POST") != "POST" or url not in URLS:
        raise ValueError(f"method must be POST and url one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError("body must be an object with the fields of the request")
    if body.get("stream"):
        raise ValueError("body.stream must be false: an answer is one line of the output")
    return BatchRequest(custom_id, url, {"service_tier": _BATCH_CLASS, **body})
