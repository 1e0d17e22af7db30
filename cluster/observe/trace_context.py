"""The trace context of a request as W3C defines it: the header `traceparent`.

https://www.w3.org/TR/trace-context/, version 00. A text that does not follow it is ignored, as the recommendation says.
"""

import logging
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.observe.spans import SpanExport

TRACE_PARENT_KEY = "traceparent"  # of HTTP headers and of gRPC metadata
_VERSIONS = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The identity of a span: its trace id, its own id and its flags."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0
    is_sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The place of one request in traces."""

    root: TraceParent  # the span of the request itself
    parent: TraceParent | None  # the client's span; None: the request came without one

    @property
    def trace_id(self) -> str:
        return f"{self.root.trace_id:032x}"

    def beside(self) -> "RequestTrace":
        """Return the place of another request that came in the same call."""
        root = TraceParent(self.root.trace_id, new_span_id(), self.root.is_sampled)
        return RequestTrace(root, self.parent)


def new_span_id() -> int:
    return secrets.randbits(64) or 1


def parse_trace_parent(text: str) -> TraceParent | None:
    """Return the context of the caller; None: the text has none."""
    found = _VERSIONS.fullmatch(text) if len(text) < 512 else None
    if found is None or (text.startswith("00") and len(text) != 55):
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return TraceParent(trace_id, span_id, bool(flags & _SAMPLED)) if trace_id and span_id else None


def trace_parent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the context that a gRPC call carries; empty: it has none."""
    return next((str(value) for key, value in metadata or () if key == TRACE_PARENT_KEY), "")


def open_span_export(endpoint: str, *, service: str, member: str) -> "SpanExport | None":
    """Return the sender of the spans of a process; None: `endpoint` is empty. `member`: its id, perhaps empty. Raises
    ConfigError if OpenTelemetry is not installed."""
    if not endpoint:
        return None
    try:
        from cluster.observe.spans import SpanExport
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint needs tandem-serving[otel]: {error}") from error
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    return SpanExport(endpoint, service=service, member=member)
