"""The files of a batch, in OpenAI's batch format: one JSON object per line.

{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}
{"id": "...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError

URLS = ("/v1/chat/completions", "/v1/completions")
_BATCH_CLASS = "flex"  # the service tier of requests that only use capacity that no other request needs
_OK = 200


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
            "id": f"batch_req_{self.custom_id}",
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


def answered_lines(path: Path) -> dict[str, str]:
    """Return the lines of an earlier run that need not be asked again, by custom_id: whole lines with an answer that
    another attempt would not change. {} if there is no such file."""
    kept: dict[str, str] = {}
    if not path.exists():
        return kept
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            answer = json.loads(line)
            status_code = answer["response"]["status_code"]
            custom_id = answer["custom_id"]
        except (ValueError, KeyError, TypeError):  # an error, or a line that an interruption cut off
            continue
        if line.endswith("\n") and is_final(status_code):
            kept[custom_id] = line
    return kept


def is_final(status_code: int) -> bool:
    """Return whether another attempt would get the same status: not where the cluster is overloaded or failing."""
    return status_code != 429 and 0 < status_code < 500


def _request(line: str) -> BatchRequest:
    """Raises ValueError."""
    try:
        request = json.loads(line)
    except ValueError as error:
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
