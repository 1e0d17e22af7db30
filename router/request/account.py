"""The account of one request: the phases of its time, the workers that served it, and its metrics.

There is always exactly one phase, and entering the next one ends it, so the phases sum to the wall time. Times are
arguments, in seconds of the router's monotonic clock. The account decides nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cluster.errors import Cancelled
from cluster.observe.telemetry import Telemetry
from cluster.observe.trace_context import RequestTrace
from router.policies.candidates import NO_TARGETS, SloTargets
from router.policies.prediction.unmodelled import DecodeSpan, ModelledRequest
from router.request.explanations import MAX_SPANS, Explanation, PlacementLog, Span
from router.requests import ChoiceDelta, Ledger, Phase, WorkerTime


class HandOff(NamedTuple):
    """A hand-off of KV. `exposed_s`: the part that prefill did not hide. `ended_s`: by this router's clock."""

    importer: str
    transport: str
    kv_bytes: int
    exposed_s: float
    ended_s: float


class PrefillSteps(NamedTuple):
    """The steps in which a worker computed a prompt: the tokens of each, and its end in seconds after `began_s`."""

    member: str
    began_s: float  # by this router's clock
    chunks: tuple[tuple[int, float], ...]


class PhaseName(StrEnum):
    TOKENIZE = "tokenize"
    ADMIT = "admit"  # checks, the wait for a worker, placement
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"  # only the part for which the client waits: after its first token
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"
    RETRY = "retry"  # from a failure until the next token


_PHASES = tuple(PhaseName)
COUNTED_TOGETHER = 32  # tokens: counting each of them alone would take longer than the rest of this account
_LEAST_TOKENS_COMPARED = 8  # of a choice: fewer say little about the time between tokens


@dataclass(slots=True)
class _Delivered:
    """The tokens of one choice that the client was given."""

    num_tokens: int
    num_first: int  # that came first, and together
    first_s: float  # when it was given these
    last_s: float  # when it was given the last ones

    @property
    def num_later(self) -> int:
        return self.num_tokens - self.num_first

    @property
    def later_s(self) -> float:
        """Return the time in which it was given the tokens after the first ones."""
        return self.last_s - self.first_s


class RequestAccount:
    """The account of one request, written from its arrival until its client has left."""

    def __init__(
        self,
        telemetry: Telemetry,
        now_s: float,
        *,
        label: str = "",
        targets: SloTargets = NO_TARGETS,
        is_batch: bool = False,
    ) -> None:
        """`targets`: latencies that the request should keep; misses are counted. `is_batch`: of the batch class."""
        self._is_batch = is_batch
        self._targets = targets
        self._telemetry = telemetry
        self._label = label
        self.phase = PhaseName.TOKENIZE  # the present one
        self._marks: list[tuple[PhaseName, float]] = [(self.phase, now_s)]
        self._is_admitted = False
        self._first_token_s: float | None = None
        self._is_continued = False  # its client has tokens of an earlier stream: none of this one is the first
        self._end_s: float | None = None
        self._final: Ledger | None = None
        self._members: list[str] = []
        self._reasons: list[str] = []
        self._worker_times: list[WorkerTime] = []
        self._transport, self._kv_bytes = "", 0
        self._predicted: tuple[float, float, float] | None = None  # TTFT, time between tokens, made at this time
        self._modelled: ModelledRequest | None = None
        self._received_s: float | None = None  # when the last token came
        self._decoded = DecodeSpan()
        self._num_uncounted = 0  # tokens that the metrics do not have yet
        self._unpublished_itl_s: list[float] = []  # their times since the token before
        self._delivered: dict[int, _Delivered] = {}  # by choice, once its client has a token
        self.placements = PlacementLog()
        self.has_missed_targets = False  # of latency; set when it is published
        self.has_moved = False  # a sequence of it was frozen, to continue at another worker
        self.hand_offs: list[HandOff] = []
        self.prefill_steps: list[PrefillSteps] = []
        self.trace: RequestTrace | None = None  # None: this router makes no spans
        self.num_prompt_tokens = 0  # once it is admitted
        self.num_cached: int | None = None  # prompt tokens that the first prefill found in the prefix cache
        self.prefill_member = self.decode_member = ""  # of the present attempt

    @property
    def began_s(self) -> float:
        return self._marks[0][1]

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._reasons)

    @property
    def trace_parent(self) -> str:
        """Return the context that calls to workers carry; empty: this router makes no spans."""
        return str(self.trace.root) if self.trace is not None else ""

    @property
    def trace_id(self) -> str:
        """The id of the request's trace in 32 hexadecimal digits; empty: this router makes no spans."""
        return self.trace.trace_id if self.trace is not None else ""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the client was given, over all choices."""
        return sum(each.num_tokens for each in self._delivered.values())

    def enter(self, phase: PhaseName, at_s: float) -> None:
        """Begin a phase. A time before the present phase began (from durations of another machine) counts as that."""
        if phase is not self.phase:
            self.phase = phase
            self._marks.append((phase, max(at_s, self._marks[-1][1])))

    def record_admission(self, num_prompt_tokens: int) -> None:
        self._is_admitted = True
        self.num_prompt_tokens = num_prompt_tokens
        self._telemetry.count("tandem_prompt_tokens_total", num_prompt_tokens)
        self._telemetry.observe("tandem_prompt_length_tokens", num_prompt_tokens)

    def set_workers(self, prefill: str, decode: str) -> None:
        """Record the workers of the present attempt."""
        self.prefill_member, self.decode_member = prefill, decode

    def predict(self, ttft_s: float, itl_s: float, now_s: float, modelled: ModelledRequest | None = None) -> None:
        """Record the times that placement predicted from `now_s` on. The first prediction of a request counts.
        `modelled` learns from the measured times, unless the request is retried, hedged or moved."""
        if self._predicted is None:
            self._predicted, self._modelled = (ttft_s, itl_s, now_s), modelled

    def continue_stream(self) -> None:
        """Record that the request is resumed and that its client has tokens: it has no time to first token here."""
        self._is_continued = True

    def teach_nothing(self) -> None:
        """No model learns from the times of this request from now on: a hedge may serve it."""
        self._modelled = None

    def add_member(self, member: str) -> None:
        """Record a worker that serves the request. Members are listed once, in the order in which they joined."""
        if member not in self._members:
            self._members.append(member)

    def add_reason(self, reason: str) -> None:
        self._reasons.append(reason)

    def add_worker_time(
        self,
        member: str,
        now_s: float,
        *,
        queue_s: float,
        compute_s: float,
        chunks: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Record the time that a worker needed for the next token of an attempt, by its own clock."""
        self.add_member(member)
        self._worker_times.append(WorkerTime(member, now_s - self.began_s, queue_s, compute_s))
        if chunks:
            self.prefill_steps.append(PrefillSteps(member, now_s - compute_s, chunks))

    def add_hand_off(self, hand_off: HandOff) -> None:
        """Record a hand-off of KV to this request's decode worker."""
        self.hand_offs.append(hand_off)
        self._transport = hand_off.transport
        self._kv_bytes += hand_off.kv_bytes

    def record_token(self, now_s: float) -> None:
        """Record that this router received a token of the request, whether its client reads quickly or not."""
        before_s, self._received_s = self._received_s, now_s
        if before_s is not None:
            self._decoded.add(now_s - before_s)
            return
        if self._modelled is not None and not self._reasons:
            self._modelled.record_first_token(now_s)

    def record_delivery(self, deltas: Sequence[ChoiceDelta], now_s: float) -> None:
        """Record that the client was given these deltas."""
        for delta in deltas:
            num_tokens = len(delta.token_ids)
            if not num_tokens:  # text that the client of a resumed request had missed
                continue
            delivered = self._delivered.get(delta.choice)
            if delivered is None:
                self._delivered[delta.choice] = _Delivered(num_tokens, num_tokens, now_s, now_s)
                if self._first_token_s is None:
                    self._first_token_s = now_s
            else:
                self._unpublished_itl_s.append((now_s - delivered.last_s) / num_tokens)
                delivered.num_tokens += num_tokens
                delivered.last_s = now_s
            self._num_uncounted += num_tokens
            if self._num_uncounted >= COUNTED_TOGETHER:
                self._count_tokens()

    def _count_tokens(self) -> None:
        self._telemetry.count("tandem_generated_tokens_total", self._num_uncounted)
        self._telemetry.observe_all("tandem_inter_token_seconds", self._unpublished_itl_s)
        self._num_uncounted = 0
        self._unpublished_itl_s.clear()

    def end(self, now_s: float) -> None:
        """End the last phase: the last token has been generated, or the request has failed."""
        self._end_s = max(now_s, self._marks[-1][1])

    def _intervals(self, now_s: float) -> list[tuple[PhaseName, float, float]]:
        """Return each phase in order with its begin and its end. A phase that was entered twice is there twice."""
        end_s = self._end_s if self._end_s is not None else max(now_s, self._marks[-1][1])
        ends_s = [at_s for _, at_s in self._marks[1:]] + [end_s]
        return [(phase, at_s, until_s) for (phase, at_s), until_s in zip(self._marks, ends_s, strict=True)]

    def ledger(self, now_s: float) -> Ledger:
        return self._ledger_of(self._intervals(now_s))

    def final_ledger(self, now_s: float) -> Ledger:
        """Return the ledger of a request that has ended and whose client has all its tokens. It stays the same."""
        self._final = self.ledger(now_s)
        return self._final

    def _ledger_of(self, intervals: Sequence[tuple[PhaseName, float, float]]) -> Ledger:
        durations_s: dict[PhaseName, float] = {}
        for phase, at_s, until_s in intervals:
            durations_s[phase] = durations_s.get(phase, 0.0) + (until_s - at_s)
        end_s = intervals[-1][2]
        return Ledger(
            phases=tuple([Phase(str(phase), durations_s[phase]) for phase in _PHASES if phase in durations_s]),
            wall_s=end_s - self.began_s,
            ttft_s=(self._first_token_s if self._first_token_s is not None else end_s) - self.began_s,
            members=tuple(self._members),
            transport=self._transport,
            kv_bytes=self._kv_bytes,
            reasons=self.reasons,
            worker_times=tuple(self._worker_times),
            label=self._label,
        )

    def explanation(self, request_id: str, now_s: float, outcome: str = "") -> Explanation:
        """Explain the placements of the request. `outcome`: ok, or the reason of an error; empty: it is live."""
        intervals = self._intervals(now_s)
        return Explanation(
            request_id=request_id,
            label=self._label,
            outcome=outcome,
            began_s=self.began_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            first_token_s=self._first_token_s,
            itl_s=self._mean_itl_s(),
            attempts=self.placements.attempts,
            ledger=self._final if self._final is not None else self._ledger_of(intervals),
            spans=_spans(intervals),
            trace_id=self.trace_id,
            workers=(self.prefill_member, self.decode_member),
        )

    def _mean_itl_s(self) -> float | None:
        """Return the mean seconds between the tokens of a choice; None: the client was given none after another."""
        num_later = sum(each.num_later for each in self._delivered.values())
        return sum(each.later_s for each in self._delivered.values()) / num_later if num_later else None

    def publish(self, ended: Explanation) -> None:
        """Add the ended request to the metrics. `ended`: its explanation."""
        outcome, ledger = ended.outcome, ended.ledger
        assert ledger is not None, "an explanation of an account has its ledger"
        self._telemetry.count("tandem_requests_total", outcome=outcome)
        self._count_tokens()
        if not self._is_admitted:
            if outcome != Cancelled.reason:  # its client left before the router had decided
                service_class = "batch" if self._is_batch else "interactive"
                self._telemetry.count("tandem_requests_refused_total", reason=outcome, service_class=service_class)
            return
        for phase in ledger.phases:
            self._telemetry.observe("tandem_phase_seconds", phase.duration_s, phase=phase.name)
        self._telemetry.observe("tandem_request_seconds", ledger.wall_s)
        if self._delivered and not self._is_continued:
            self._telemetry.observe("tandem_ttft_seconds", ledger.ttft_s)
        self._telemetry.count("tandem_cached_prompt_tokens_total", self.num_cached or 0)
        self._publish_misses(ended.itl_s, self.began_s + ledger.wall_s)
        for delivered in self._delivered.values():
            self._telemetry.observe("tandem_output_length_tokens", delivered.num_tokens)
        if outcome == "ok" and not self._reasons:
            self._publish_errors()
            self._teach()

    def _publish_misses(self, itl_s: float | None, now_s: float) -> None:
        """Count the latency targets that the request missed, each with the phase that took longest."""
        first_s = self._first_token_s
        if self._targets == NO_TARGETS or first_s is None:
            return
        if not self._is_continued and first_s - self.began_s > self._targets.ttft_s:
            self.has_missed_targets = True
            phase = self._longest_phase(self.began_s, first_s, now_s)
            self._telemetry.count("tandem_slo_misses_total", latency="ttft", phase=phase)
        if itl_s is not None and itl_s > self._targets.itl_s:
            self.has_missed_targets = True
            phase = self._longest_phase(first_s, math.inf, now_s)
            self._telemetry.count("tandem_slo_misses_total", latency="itl", phase=phase)

    def _longest_phase(self, from_s: float, until_s: float, now_s: float) -> PhaseName:
        """Return the phase that took most of the time between two times."""
        seconds: dict[PhaseName, float] = {}
        for phase, began_s, ended_s in self._intervals(now_s):
            within_s = min(ended_s, until_s) - max(began_s, from_s)
            seconds[phase] = seconds.get(phase, 0.0) + max(0.0, within_s)
        return max(seconds, key=seconds.__getitem__)

    def _publish_errors(self) -> None:
        """Compare the prediction with what the client experienced. A request that was retried is not compared, nor is
        one of the batch class, which waits for others; the time between tokens only if no sequence moved."""
        if self._predicted is None or self._first_token_s is None or self._is_batch:
            return
        ttft_s, itl_s, at_s = self._predicted
        if (real_s := self._first_token_s - at_s) > 0:
            self._telemetry.observe("tandem_ttft_prediction_error_ratio", abs(ttft_s - real_s) / real_s)
        for delivered in () if self.has_moved else self._delivered.values():
            if delivered.num_tokens >= _LEAST_TOKENS_COMPARED and delivered.later_s > 0:
                real_s = delivered.later_s / delivered.num_later
                self._telemetry.observe("tandem_itl_prediction_error_ratio", abs(itl_s - real_s) / real_s)

    def _teach(self) -> None:
        """Update the model of the time between tokens from a request with one choice."""
        if self._modelled is None or self.has_moved or self._received_s is None or len(self._delivered) != 1:
            return
        if self._decoded.num_intervals >= _LEAST_TOKENS_COMPARED - 1:
            self._modelled.record_end(self._decoded, self._received_s)


def _spans(intervals: Sequence[tuple[PhaseName, float, float]]) -> tuple[Span, ...]:
    """Return the phases in their order: at most MAX_SPANS, the first ones and the last ones."""
    began_s = intervals[0][1]
    if len(intervals) > MAX_SPANS:
        intervals = [*intervals[: MAX_SPANS // 4], *intervals[-(MAX_SPANS - MAX_SPANS // 4) :]]
    return tuple([Span(str(phase), at_s - began_s, until_s - at_s) for phase, at_s, until_s in intervals])
