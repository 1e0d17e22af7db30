"""The trace context of a request as W3C defines it: the header `traceparent`. Pure.

https://www.w3.org/TR/trace-context/, version 00. A text that does not follow it is ignored, as the recommendation says.
"""

import re
from dataclasses import dataclass

TRACE_PARENT_KEY = "traceparent"  # of HTTP headers and of gRPC metadata
_VERSIONS = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0
    is_sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def parse_trace_parent(text: str) -> TraceParent | None:
    """Return the context of the caller; None: the text has none."""
    found = _VERSIONS.fullmatch(text) if len(text) < 512 else None
    if found is None or (text.startswith("00") and len(text) != 55):
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return TraceParent(trace_id, span_id, bool(flags & _SAMPLED)) if trace_id and span_id else None
