"""The coverage counters that show that a schedule reached a row of the table in docs/failover.md.

A row is named by its second cell. Its evidence is a set of prefixes of counters (coverage.py) and of faults
(record.py); its count is the sum over all of them.
"""

from collections.abc import Mapping
from pathlib import Path

_PAGE = Path(__file__).parents[4] / "docs" / "failover.md"

EVIDENCE: dict[str, tuple[str, ...]] = {
    "a worker's process is killed": ("prefill is killed", "decode is killed"),
    "a worker is stopped or cut off": ("prefill is stopped", "decode is stopped", "prefill is cut", "decode is cut"),
    "a worker is suspected, and other workers could serve its requests": ("counted: hedges",),
    "a suspected worker misses a second health check": ("error: worker_lost",),
    "a router receives nothing from any worker": ("error: all_workers_silent",),
    "the decode worker that imports a ticket is suspected, and another one answers": ("counted: tickets_reissued",),
    "a worker's stream is silent while its health check answers": ("stream: silent",),
    "a connection breaks and comes back": ("stream: came back",),
    "a router counts a decode worker as lost, and reaches it again": ("counted: decode_router_gone began_again",),
    "a decode worker's message about sequences is malformed": (
        "malformed: WorkerMessage.step",
        "malformed: WorkerMessage.started",
        "malformed: WorkerMessage.failed",
    ),
    "a worker reports that its step is stuck, or that it drains": (
        "counted: unhealthy step",
        "decode is asked to leave",
    ),
    "the prefill call fails": ("counted: retries prefill",),
    "a prefill takes long, and its worker answers health checks": ("prefill hangs in a step",),
    "`Start` on the decode worker does not return": ("decode start: late",),
    "the router dies before the decode worker receives the ticket": (
        "router is killed: queued",
        "router is killed: prefilling",
    ),
    "the decode worker refuses, drains or is lost": ("counted: tickets_reissued decode",),
    "a read fails, blocks are missing, or no transport is shared": (
        "counted: decode_import_failed read_failed",
        "counted: decode_import_failed read_timeout",
        "counted: decode_import_failed not_enough_blocks",
        "counted: decode_import_failed no_common_transport",
    ),
    "the exporter is lost, its lease lapsed, or its prefill failed": (
        "counted: decode_import_failed exporter_lost",
        "counted: decode_import_failed lease_lapsed",
        "counted: decode_import_failed prefill_failed",
    ),
    "the decode worker sends a wrong first token, repeats a token, or skips a token or a start message": (
        "ledger: decode_first_token_mismatch",
        "ledger: decode_token_out_of_order",
    ),
    "a pool has no worker": ("ledger: no_prefill_worker",),
    "no worker can hold the request's prompt and `max_tokens`": ("error: no_worker_large_enough",),
    "a worker refuses the request for its own size (`worker_too_small`)": (),
    "the request's deadline passes": ("error: deadline_exceeded",),
    "a router dies": ("router is killed",),
    "a router is stopped, or cut off from its clients": ("router is stopped", "router is cut off"),
    "a router answers calls but sends no keep-alive messages on the stream": (),
    "a router is frozen, or cut off from a worker": ("counted: decode_router_gone stream_ended",),
}
# Rows that no schedule reaches, and the test that does.
ELSEWHERE = {
    "a worker refuses the request for its own size (`worker_too_small`)": "tests/system/handoff/test_unequal_pools.py",
    "a router answers calls but sends no keep-alive messages on the stream": "tests/unit/client/test_keepalive.py",
}


def rows() -> tuple[str, ...]:
    """Return the second cell of each row of the page."""
    lines = _PAGE.read_text().partition("## Failures and responses")[2].partition("\n## ")[0].splitlines()
    cells = [line.split("|")[2].strip() for line in lines if line.startswith("|")]
    return tuple(cells[2:])  # behind the heading and its line


def reached(counts: Mapping[str, int]) -> dict[str, int]:
    """Return how often each row was reached, according to its evidence."""
    return {
        row: sum(number for name, number in counts.items() if evidence and name.startswith(evidence))
        for row, evidence in EVIDENCE.items()
    }
