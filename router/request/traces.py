"""The OpenTelemetry spans of requests, made when a request has ended.

They are made from the request's account, after the choice whether to send them: failed, retried and slow requests are
always sent; of the others, those that the client's own trace samples, and a share. No span has a prompt, an output or a
key. Calls to workers carry the context, and a decode worker adds spans of its own to a sampled trace while the request
runs (decode_worker/step_spans.py).
"""

import random
import secrets
import time
from typing import TYPE_CHECKING

from cluster.observe.trace_context import (
    RequestTrace,
    TraceParent,
    new_span_id,
    open_span_export,
    parse_trace_parent,
)
from cluster.settings.config import RouterConfig
from router.request.account import RequestAccount
from router.request.explanations import Explanation
from router.requests import GenerateRequest

if TYPE_CHECKING:
    from router.request.span_sender import SpanSender

_NO_FAULT = ("ok", "cancelled")


class Traces:
    """Numbers the traces of requests and decides which of them are sent."""

    def __init__(self, sender: "SpanSender", *, sample_ratio: float, slow_s: float) -> None:
        self._sender = sender
        self._sample_ratio = sample_ratio
        self._slow_s = slow_s

    def begin(self, trace_parent: str) -> RequestTrace:
        """Return the context of a request that arrives. `trace_parent`: the client's; it may be malformed or empty."""
        parent = parse_trace_parent(trace_parent) if trace_parent else None
        is_sampled = (parent is not None and parent.is_sampled) or random.random() < self._sample_ratio
        trace_id = parent.trace_id if parent is not None else secrets.randbits(128) or 1
        return RequestTrace(TraceParent(trace_id, new_span_id(), is_sampled), parent)

    def end(self, request: GenerateRequest, account: RequestAccount, ended: Explanation, now_s: float) -> None:
        """Send the spans of an ended request if it is sampled, failed, retried or slow. `now_s`: by the account's
        clock."""
        trace = account.trace
        if trace is not None and (trace.root.is_sampled or self._is_notable(account, ended)):
            self._sender.send(request, account, ended, trace, time.time() - now_s)

    async def close(self) -> None:
        """Send the remaining spans, for a short time."""
        await self._sender.close()

    def _is_notable(self, account: RequestAccount, ended: Explanation) -> bool:
        if ended.outcome not in _NO_FAULT or account.reasons or account.has_missed_targets:
            return True
        return ended.first_token_s is not None and ended.first_token_s - ended.began_s > self._slow_s


def open_traces(config: RouterConfig) -> Traces | None:
    """Return the traces of a router; None if the settings configure none. Raises ConfigError if OpenTelemetry is not
    installed.
    """
    export = open_span_export(config.otlp_endpoint, service="tandem-router", member=config.member_id)
    if export is None:
        return None
    from router.request.span_sender import SpanSender

    sender = SpanSender(export, model=config.model_name)
    return Traces(sender, sample_ratio=config.trace_sample_ratio, slow_s=config.trace_slow_s)
