"""The log line of each ended request: where its time went, on which workers, and why it was retried.

At most `_MOST_PER_S` lines a second are about requests that ended well; the next line has the number of those left out.
Failed requests are always logged. No line has a prompt or an output.
"""

import logging

from router.request.explanations import Explanation

_LOG = logging.getLogger("tandem.router.pipeline")
_MOST_PER_S = 50


class RequestLog:
    def __init__(self) -> None:
        self._second = 0  # in which the last line was written
        self._num_lines = 0  # of this second, of requests that ended well
        self._num_left_out = 0  # since the last line

    def write(self, ended: Explanation, now_s: float) -> None:
        """Log a request that has ended. `now_s`: by any monotonic clock."""
        if not _LOG.isEnabledFor(logging.INFO):
            return
        if int(now_s) != self._second:
            self._second, self._num_lines = int(now_s), 0
        if ended.outcome == "ok":
            if self._num_lines >= _MOST_PER_S:
                self._num_left_out += 1
                return
            self._num_lines += 1
        fields = ended_fields(ended)
        if self._num_left_out:
            fields["lines_left_out"] = self._num_left_out
            self._num_left_out = 0
        _LOG.info("the request ended", extra=fields)


def ended_fields(ended: Explanation) -> dict[str, object]:
    """Return the fields of the log line of an ended request, without those that it has no value for. Times are
    milliseconds.
    """
    ledger = ended.ledger
    assert ledger is not None, "an explanation of an account has its ledger"
    fields: dict[str, object] = {
        "request_id": ended.request_id,
        "label": ended.label,
        "outcome": ended.outcome,
        "prompt_tokens": ended.num_prompt_tokens,
        "tokens": ended.num_tokens,
        "ttft_ms": _ms(ledger.ttft_s) if ended.first_token_s is not None else None,
        "itl_ms": _ms(ended.itl_s) if ended.itl_s is not None else None,
        "wall_ms": _ms(ledger.wall_s),
        "phases_ms": " ".join(f"{phase.name}:{_ms(phase.duration_s):g}" for phase in ledger.phases),
        "attempts": len(ended.attempts),
        "workers": " ".join(ledger.members),
        "transport": ledger.transport,
        "reasons": " ".join(ledger.reasons),
        "trace_id": ended.trace_id,
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
