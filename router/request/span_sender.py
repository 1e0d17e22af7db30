"""Turns an ended request into OpenTelemetry spans and sends them. Imported only if traces are configured.

The root has the phases of the ledger as children, which follow each other without a gap. Beside them are the spans of
what ran at the same time: the prefill worker with its chunks, and the hand-offs. Attributes follow OpenTelemetry's
conventions for generative AI (`gen_ai.*`); Tandem's own attributes begin with `tandem.`.
"""

from collections.abc import Iterator

from opentelemetry.sdk.trace import Event
from opentelemetry.trace import SpanKind, Status, StatusCode

from cluster.observe.spans import Attribute, Attributes, SpanExport, nanoseconds
from cluster.observe.trace_context import RequestTrace, TraceParent
from router.policies.placement import Candidate
from router.request.account import RequestAccount
from router.request.explanations import Explanation, PlacedAttempt
from router.requests import ChatPrompt, GenerateRequest

_LOCAL = ("", "local")


class SpanSender:
    """Sends the spans of ended requests. Owns the export."""

    def __init__(self, export: SpanExport, *, model: str) -> None:
        """`model`: the name that clients use."""
        self._export = export
        self._model = model

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
        spans = _Children(self._export, trace.root, epoch_s)
        for span in ended.spans:
            began_s = ended.began_s + span.start_s
            spans.add(span.phase, began_s, began_s + span.duration_s, {"tandem.phase": span.phase})
        _add_workers(spans, account, ended)
        operation = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
        is_fault = ended.outcome not in ("ok", "cancelled")
        self._export.send(
            f"{operation} {self._model}",
            trace.root,
            (epoch_s + ended.began_s, epoch_s + ended.began_s + ledger.wall_s),
            _root_attributes(request, account, ended)
            | {"gen_ai.operation.name": operation}
            | dict.fromkeys(("gen_ai.request.model", "gen_ai.response.model"), self._model),
            parent=trace.parent,
            is_parent_remote=True,
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, ended.outcome) if is_fault else Status(),
            events=[
                event for each in ended.attempts for event in _placement_events(each, nanoseconds(epoch_s + each.at_s))
            ],
        )

    async def close(self) -> None:
        """Send the queued spans. Drops those that the receiver does not accept within two seconds."""
        await self._export.close()


class _Children:
    """The spans of one trace below its root. Times are by the account's clock."""

    def __init__(self, export: SpanExport, root: TraceParent, epoch_s: float) -> None:
        self._export, self._root, self._epoch_s = export, root, epoch_s

    def add(self, name: str, began_s: float, ended_s: float, attributes: Attributes) -> None:
        self._export.child(name, self._root, (self._epoch_s + began_s, self._epoch_s + ended_s), attributes)


def _add_workers(spans: _Children, account: RequestAccount, ended: Explanation) -> None:
    """Add the spans of work that ran beside the phases."""
    ledger = ended.ledger
    assert ledger is not None
    for worker in ledger.worker_times:
        if worker.compute_s:
            ended_s = ended.began_s + worker.ended_s
            attributes: Attributes = {"tandem.member": worker.member, "tandem.queue_s": worker.queue_s}
            spans.add("worker prefill", ended_s - worker.compute_s, ended_s, attributes)
    for steps in account.prefill_steps:
        before_s = 0.0
        for num_tokens, until_s in steps.chunks:
            attributes = {"tandem.member": steps.member, "tandem.num_tokens": num_tokens}
            spans.add("prefill chunk", steps.began_s + before_s, steps.began_s + until_s, attributes)
            before_s = until_s
    for hand_off in account.hand_offs:
        if hand_off.transport in _LOCAL:
            continue
        begins = [steps.began_s for steps in account.prefill_steps if steps.began_s <= hand_off.ended_s]
        spans.add(
            "hand-off",
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
