"""Spans of the decode steps of sampled requests, sent while the requests run.

They show what the ledger adds up: which steps a sequence was in, beside how many others, and how long it waited for the
slowest one. The router's choice to sample comes with the call that starts a sequence, and the spans become children of
the request's span. Steps without a sampled sequence cost one look at an empty table.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.messages import MemberId
from cluster.observe.trace_context import TraceParent, parse_trace_parent
from engine.scheduling.commands import StepTokens

if TYPE_CHECKING:  # it imports OpenTelemetry
    from cluster.observe.spans import SpanExport

_STEPS = 16  # of one span


@dataclass(slots=True)
class _Steps:
    """The steps of a sampled sequence since its last span. Times in Unix time."""

    parent: TraceParent
    began_s: float  # when its last step before these ended
    last_s: float  # when its newest step ended
    first_step: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_in_batch: int = 0  # summed over the steps
    longest_s: float = 0.0

    def add(self, step: int, num_tokens: int, num_in_batch: int, now_s: float) -> None:
        """Add a step that has just ended."""
        if self.num_steps == 0:
            self.first_step = step
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_in_batch += num_in_batch
        self.longest_s = max(self.longest_s, now_s - self.last_s)
        self.last_s = now_s


class StepSpans:
    """The sampled sequences of a decode worker, by router and handle. All methods run on the worker's event loop."""

    def __init__(self, export: "SpanExport", now_s: Callable[[], float] = time.time) -> None:
        """`now_s`: Unix time."""
        self._export, self._now_s = export, now_s
        self._sampled: dict[tuple[MemberId, int], _Steps] = {}

    def __len__(self) -> int:
        return len(self._sampled)

    def follow(self, trace_parent: str, router: MemberId, handles: Iterable[int]) -> None:
        """Follow sequences that join the batch now, if their request is sampled."""
        parent = parse_trace_parent(trace_parent) if trace_parent else None
        if parent is not None and parent.is_sampled:
            now_s = self._now_s()
            self._sampled.update({(router, handle): _Steps(parent, now_s, now_s) for handle in handles})

    def record(self, event: StepTokens) -> None:
        """Record a step that has just ended."""
        if not self._sampled:
            return
        now_s = self._now_s()
        num_tokens = Counter((token.router, token.handle) for token in event.tokens)
        for key in num_tokens.keys() & self._sampled.keys():
            steps = self._sampled[key]
            steps.add(event.step, num_tokens[key], len(num_tokens), now_s)
            if steps.num_steps == _STEPS:
                self._send(steps)
                self._sampled[key] = _Steps(steps.parent, now_s, now_s)

    def end(self, router: MemberId, handles: Iterable[int]) -> None:
        """Send the last steps of sequences that ended or moved away. Ignores those that are not followed."""
        for handle in handles if self._sampled else ():
            steps = self._sampled.pop((router, handle), None)
            if steps is not None and steps.num_steps:
                self._send(steps)

    def _send(self, steps: _Steps) -> None:
        attributes = {
            "tandem.first_step": steps.first_step,
            "tandem.num_steps": steps.num_steps,
            "tandem.num_tokens": steps.num_tokens,
            "tandem.mean_batch": steps.num_in_batch / steps.num_steps,
            "tandem.longest_step_s": steps.longest_s,
        }
        self._export.child("decode steps", steps.parent, (steps.began_s, steps.last_s), attributes)
