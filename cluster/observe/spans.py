"""Sends OpenTelemetry spans to a receiver. Imported only if traces are configured (`open_span_export`).

A thread of OpenTelemetry's SDK sends them, and drops spans that it cannot send in time.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, TraceFlags

from cluster.observe.trace_context import TraceParent, new_span_id

Attribute = str | bool | int | float
Attributes = Mapping[str, Attribute]
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_MAX_QUEUED = 1 << 14  # spans: about a thousand requests, while the receiver does not answer
_EXPORT_S = 30  # of one batch, retries included; nothing waits for it
_CLOSE_S = 2.0


class SpanExport:
    """The spans of one process. Owns the exporter and the thread that sends. Any thread may send."""

    def __init__(self, endpoint: str, *, service: str, member: str) -> None:
        """`endpoint`: of the receiver, without the path. `member`: the id of this process; empty: it has none."""
        named = {"service.name": service} | ({"service.instance.id": member} if member else {})
        self._resource = Resource.create(named)
        self._scope = InstrumentationScope(service.replace("-", "."))
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=_EXPORT_S)
        self._processor = BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED, schedule_delay_millis=1000)

    def child(self, name: str, parent: TraceParent, times_s: tuple[float, float], attributes: Attributes) -> None:
        """Send a span below `parent`. `times_s`: its begin and its end in Unix time."""
        span = TraceParent(parent.trace_id, new_span_id(), is_sampled=True)
        self.send(name, span, times_s, attributes, parent=parent)

    def send(
        self,
        name: str,
        span: TraceParent,
        times_s: tuple[float, float],
        attributes: Attributes,
        *,
        parent: TraceParent | None,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status | None = None,
        events: Sequence[Event] = (),
        is_parent_remote: bool = False,
    ) -> None:
        began_s, ended_s = times_s
        self._processor.on_end(
            ReadableSpan(
                name,
                context=_context(span, is_remote=False),
                parent=None if parent is None else _context(parent, is_remote=is_parent_remote),
                resource=self._resource,
                attributes=attributes,
                events=events,
                kind=kind,
                status=status or Status(),
                start_time=nanoseconds(began_s),
                end_time=nanoseconds(max(began_s, ended_s)),
                instrumentation_scope=self._scope,
            )
        )

    async def close(self) -> None:
        """Send the queued spans, within `_CLOSE_S`."""
        sending = threading.Thread(target=self._processor.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _CLOSE_S)


def nanoseconds(at_s: float) -> int:
    return round(at_s * 1e9)


def _context(span: TraceParent, *, is_remote: bool) -> SpanContext:
    return SpanContext(span.trace_id, span.span_id, is_remote=is_remote, trace_flags=_SAMPLED)
