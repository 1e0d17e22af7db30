"""Turns an ended request into OpenTelemetry spans and sends them. Imported only if traces are configured.

The root has the phases of the ledger as children, which follow each other without a gap. Beside them are the spans of
what ran at the same time: the prefill worker with its chunks, and the hand-offs. Attributes follow OpenTelemetry's
conventions for generative AI (`gen_ai.*`); Tandem's own attributes begin with `tandem.`.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from cluster.observe.trace_context import RequestTrace, new_span_id
from router.policies.placement import Candidate
from router.request.account import RequestAccount
from router.request.explanations import Explanation, PlacedAttempt
from router.requests import ChatPrompt, GenerateRequest

Attribute = str | bool | int | float
Attributes = Mapping[str, Attribute]
_LOCAL = ("", "local")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("tandem.router")
_MAX_QUEUED = 1 << 14  # spans: about a thousand requests, while the receiver does not answer
_EXPORT_S = 30  # of one batch, retries included; nothing waits for it
_CLOSE_S = 2.0


class SpanSender:
    """Sends spans. Owns the exporter and the thread that sends."""

    def __init__(self, endpoint: str, *, model: str, member: str) -> None:
        """`endpoint`: without the path. `model`: the name that clients use."""
        self._model = model
        named = {"service.name": "tandem-router"} | ({"service.instance.id": member} if member else {})
        self._resource = Resource.create(named)
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=_EXPORT_S)
        self._processor = BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED, schedule_delay_millis=1000)

    def send(
        self,
        request: GenerateRequest,
        account: RequestAccount,
        ended: Explanation,
        trace: RequestTrace,
        epoch_s: float,
    ) -> None:
        """Queue the spans of an ended request. `epoch_s`: the wall time at 0 of the account's clock."""
        ledger = ended.ledger
        assert ledger is not None, "an explanation of an ended request has its ledger"
        trace_id = trace.root.trace_id
        spans = _Spans(self, trace_id, epoch_s)
        parent = None
        if trace.parent is not None:
            parent = SpanContext(trace_id, trace.parent.span_id, is_remote=True, trace_flags=_SAMPLED)
        root = SpanContext(trace_id, trace.root.span_id, is_remote=False, trace_flags=_SAMPLED)
        for span in ended.spans:
            began_s = ended.began_s + span.start_s
            spans.add(span.phase, root, began_s, began_s + span.duration_s, {"tandem.phase": span.phase})
        _add_workers(spans, root, account, ended)
        operation = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
        is_fault = ended.outcome not in ("ok", "cancelled")
        self.queue(
            ReadableSpan(
                f"{operation} {self._model}",
                context=root,
                parent=parent,
                resource=self._resource,
                attributes=_root_attributes(request, account, ended)
                | {"gen_ai.operation.name": operation}
                | dict.fromkeys(("gen_ai.request.model", "gen_ai.response.model"), self._model),
                events=[event for each in ended.attempts for event in _placement_events(each, spans.ns(each.at_s))],
                kind=SpanKind.SERVER,
                status=Status(StatusCode.ERROR, ended.outcome) if is_fault else Status(),
                start_time=spans.ns(ended.began_s),
                end_time=spans.ns(ended.began_s + ledger.wall_s),
                instrumentation_scope=_SCOPE,
            )
        )

    def queue(self, span: ReadableSpan) -> None:
        self._processor.on_end(span)

    def child(
        self, name: str, trace_id: int, parent: SpanContext, times_ns: tuple[int, int], attributes: Attributes
    ) -> SpanContext:
        context = SpanContext(trace_id, new_span_id(), is_remote=False, trace_flags=_SAMPLED)
        self.queue(
            ReadableSpan(
                name,
                context=context,
                parent=parent,
                resource=self._resource,
                attributes=attributes,
                start_time=times_ns[0],
                end_time=times_ns[1],
                instrumentation_scope=_SCOPE,
            )
        )
        return context

    async def close(self) -> None:
        """Send the queued spans, within `_CLOSE_S`."""
        sending = threading.Thread(target=self._processor.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _CLOSE_S)


class _Spans:
    """The spans of one trace below its root."""

    def __init__(self, sender: SpanSender, trace_id: int, epoch_s: float) -> None:
        self._sender, self._trace_id, self._epoch_s = sender, trace_id, epoch_s

    def ns(self, at_s: float) -> int:
        """Return the wall time in nanoseconds."""
        return round((self._epoch_s + at_s) * 1e9)

    def add(
        self, name: str, parent: SpanContext, began_s: float, ended_s: float, attributes: Attributes
    ) -> SpanContext:
        times_ns = self.ns(began_s), self.ns(max(began_s, ended_s))
        return self._sender.child(name, self._trace_id, parent, times_ns, attributes)


def _add_workers(spans: _Spans, root: SpanContext, account: RequestAccount, ended: Explanation) -> None:
    """Add the spans of work that ran beside the phases."""
    ledger = ended.ledger
    assert ledger is not None
    for worker in ledger.worker_times:
        if worker.compute_s:
            ended_s = ended.began_s + worker.ended_s
            attributes: Attributes = {"tandem.member": worker.member, "tandem.queue_s": worker.queue_s}
            spans.add("worker prefill", root, ended_s - worker.compute_s, ended_s, attributes)
    for steps in account.prefill_steps:
        before_s = 0.0
        for num_tokens, until_s in steps.chunks:
            attributes = {"tandem.member": steps.member, "tandem.num_tokens": num_tokens}
            spans.add("prefill chunk", root, steps.began_s + before_s, steps.began_s + until_s, attributes)
            before_s = until_s
    for hand_off in account.hand_offs:
        if hand_off.transport in _LOCAL:
            continue
        begins = [steps.began_s for steps in account.prefill_steps if steps.began_s <= hand_off.ended_s]
        spans.add(
            "hand-off",
            root,
            max(begins, default=hand_off.ended_s - hand_off.exposed_s),
            hand_off.ended_s,
            {
                "tandem.importer": hand_off.importer,
                "tandem.transport": hand_off.transport,
                "tandem.kv_bytes": hand_off.kv_bytes,
                "tandem.exposed_s": hand_off.exposed_s,
            },
        )


def _root_attributes(request: GenerateRequest, account: RequestAccount, ended: Explanation) -> dict[str, Attribute]:
    sampling = {
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.request.top_p": request.sampling.top_p,
        "gen_ai.request.top_k": request.sampling.top_k,
        "gen_ai.request.seed": request.sampling.seed,
        "gen_ai.request.max_tokens": request.stop.max_tokens,
    }
    attributes: dict[str, Attribute] = {
        "gen_ai.provider.name": "tandem",
        "gen_ai.response.id": ended.request_id,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.usage.input_tokens": ended.num_prompt_tokens,
        "gen_ai.usage.output_tokens": ended.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": account.num_cached or 0,
        "tandem.outcome": ended.outcome,
        "tandem.reasons": " ".join(account.reasons),
        **{name: value for name, value in sampling.items() if value is not None and abs(value) < 1 << 63},
    }
    if ended.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = ended.first_token_s - ended.began_s
    if ended.itl_s is not None:
        attributes["tandem.itl_s"] = ended.itl_s
    if ended.outcome not in ("ok", "cancelled"):
        attributes["error.type"] = ended.outcome
    return attributes


def _placement_events(attempt: PlacedAttempt, at_ns: int) -> Iterator[Event]:
    """Yield the reasons for the workers of an attempt, as `tandem explain` shows them: the decision, then the
    candidates from the best to the worst.
    """
    placement = attempt.placement
    decision: dict[str, Attribute] = {
        "tandem.placement.reason": placement.reason,
        "tandem.placement.prefill": str(placement.prefill or ""),
        "tandem.placement.decode": str(placement.decode),
        "tandem.placement.num_candidates": placement.num_candidates,
        "tandem.placement.failure": attempt.failure,
    }
    yield Event("placement", decision, at_ns)
    for candidate in placement.considered:
        chosen: dict[str, Attribute] = {"tandem.candidate.is_chosen": candidate is placement.chosen}
        yield Event("placement candidate", _candidate_attributes(candidate) | chosen, at_ns)


def _candidate_attributes(candidate: Candidate) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "tandem.candidate.prefill": str(candidate.prefill or ""),
        "tandem.candidate.decode": str(candidate.decode),
        "tandem.candidate.depth": candidate.depth,
        "tandem.candidate.cached_tokens": candidate.num_cached,
        "tandem.candidate.missed_targets": candidate.num_violations,
    }
    if candidate.prediction is not None:
        attributes["tandem.candidate.predicted_ttft_s"] = candidate.prediction.ttft_s
        attributes["tandem.candidate.predicted_itl_s"] = candidate.prediction.itl_s
    return attributes
