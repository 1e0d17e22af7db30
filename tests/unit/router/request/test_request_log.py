"""The log lines of ended requests."""

import logging
from dataclasses import replace

import pytest

from router.request.explanations import Explanation, RequestLog, ended_fields
from router.requests import Ledger, Phase

_LEDGER = Ledger(
    phases=(Phase("prefill", 0.12), Phase("decode", 0.0312)),
    wall_s=0.1512,
    ttft_s=0.12,
    members=("prefill-0@a", "decode-0@b"),
    transport="shm",
    kv_bytes=4096,
    reasons=("worker_lost",),
    worker_times=(),
    label="",
)
_ENDED = Explanation(
    request_id="req-1",
    label="",
    outcome="ok",
    began_s=1.0,
    num_prompt_tokens=12,
    num_tokens=4,
    first_token_s=1.12,
    itl_s=0.0104,
    attempts=(),
    ledger=_LEDGER,
)


def test_a_line_has_the_time_of_each_phase_of_a_request() -> None:
    assert ended_fields(_ENDED) == {
        "request_id": "req-1",
        "outcome": "ok",
        "prompt_tokens": 12,
        "tokens": 4,
        "ttft_ms": 120.0,
        "itl_ms": 10.4,
        "wall_ms": 151.2,
        "phases_ms": "prefill:120 decode:31.2",
        "attempts": 0,
        "workers": "prefill-0@a decode-0@b",
        "transport": "shm",
        "reasons": "worker_lost",
    }


def test_a_request_without_a_token_has_no_time_to_the_first_one() -> None:
    fields = ended_fields(replace(_ENDED, outcome="overloaded", first_token_s=None, itl_s=None))
    assert {"ttft_ms", "itl_ms"}.isdisjoint(fields)


def test_lines_are_limited_except_those_of_failures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.router.pipeline")
    log, failed = RequestLog(), replace(_ENDED, outcome="timeout")
    for number in range(70):
        log.write(_ENDED, 5 + number / 100)
    assert len(caplog.records) == 50
    log.write(failed, 5.8)
    log.write(failed, 5.9)
    log.write(_ENDED, 6.0)
    assert [vars(record).get("lines_left_out") for record in caplog.records[50:]] == [20, None, None]
