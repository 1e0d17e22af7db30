"""Which coverage shows that a schedule reached a row of the table in docs/failover.md.

A row is named by its second cell. Its evidence are beginnings of names of coverage.py, or of faults that hit a request
as record.py names them; a count is the sum over all of them.
"""

from collections.abc import Mapping
from pathlib import Path

_PAGE = Path(__file__).parents[3] / "docs" / "failover.md"

EVIDENCE: dict[str, tuple[str, ...]] = {
    "a worker's process is killed": ("prefill is killed", "decode is killed"),
    "a worker is stopped, or cut off": ("prefill is stopped", "decode is stopped", "prefill is cut", "decode is cut"),
    "a worker is in doubt, as above, and others could serve its requests": ("counted: hedges",),
    "the same worker misses a second answer": ("error: worker_lost",),
    "the decode worker that is to import a ticket is in doubt, and another one answers": ("counted: tickets_reissued",),
    "a decode worker's stream is silent while its health answers": ("decode stream: silent",),
    "a connection breaks and comes back": ("decode stream: came back",),
    "a worker says that its step is stuck, or leaves": ("counted: unhealthy step", "decode is asked to leave"),
    "the prefill call fails": ("counted: retries prefill",),
    "a prefill only takes long": ("prefill hangs in a step",),
    "`Start` on the decode worker does not return": ("decode start: late",),
    "the router dies before decode heard of the ticket": ("router is killed: queued", "router is killed: prefilling"),
    "the decode worker refuses, leaves, or is lost": ("counted: tickets_reissued decode",),
    "a read fails, too few blocks, no common transport": (
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
    "decode says another first token, a token twice, or leaves one out": (
        "ledger: decode_first_token_mismatch",
        "ledger: decode_token_out_of_order",
    ),
    "no worker of a pool is there": ("ledger: no_prefill_worker",),
    "workers are there, and none can hold the request's prompt and `max_tokens` ([scheduling.md](scheduling.md))": (
        "error: no_worker_large_enough",
    ),
    "a worker refuses the request for its own size (`worker_too_small`)": (),
    "the request's deadline passes": ("error: deadline_exceeded",),
    "a router dies": ("router is killed",),
    "a router is stopped, or cut off from its clients": ("router is stopped", "router is cut off"),
    "a router answers, and gives no sign of life on the stream": (),
    "a router is frozen, or cut off from a worker": ("counted: decode_router_gone",),
}
# Rows that no schedule reaches, and the test that does.
ELSEWHERE = {
    "a worker refuses the request for its own size (`worker_too_small`)": "tests/system/test_unequal_pools.py",
    "a router answers, and gives no sign of life on the stream": "tests/unit/test_silence.py",
}


def rows() -> tuple[str, ...]:
    """The second cell of each row, as the page has it."""
    lines = _PAGE.read_text().partition("## Who notices what")[2].partition("\n## ")[0].splitlines()
    cells = [line.split("|")[2].strip() for line in lines if line.startswith("|")]
    return tuple(cells[2:])  # behind the heading and its line


def reached(counts: Mapping[str, int]) -> dict[str, int]:
    """How often each row was, by what shows it."""
    return {
        row: sum(number for name, number in counts.items() if evidence and name.startswith(evidence))
        for row, evidence in EVIDENCE.items()
    }
