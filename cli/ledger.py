"""A request's phase ledger as a person reads it."""

from cli.table import bytes_text, table
from tandem.results import Result


def ledger_text(result: Result) -> str:
    """One row per phase, with its share of the wall time, and what the phases sum to."""
    ledger = result.ledger
    wall_s = ledger.wall_s or 1e-9
    rows = [(phase.name, *_duration(phase.duration_s, wall_s)) for phase in ledger.phases]
    rows.append(("sum", *_duration(sum(phase.duration_s for phase in ledger.phases), wall_s)))
    rows.append(("wall time", *_duration(ledger.wall_s, wall_s)))
    usage = result.usage
    lines = [
        table(("phase", "ms", "share"), rows),
        "",
        f"first token after {ledger.ttft_s * 1000:.1f} ms; {usage.prompt_tokens} prompt tokens, "
        f"{usage.completion_tokens} generated",
        f"KV: {bytes_text(ledger.kv_bytes)} by {ledger.transport or '-'}",
        f"members: {', '.join(ledger.members) or '-'}",
    ]
    if ledger.reasons:
        lines.append(f"met on the way: {', '.join(ledger.reasons)}")
    return "\n".join(lines)


def _duration(duration_s: float, wall_s: float) -> tuple[str, str]:
    return f"{duration_s * 1000:.1f}", f"{100 * duration_s / wall_s:.1f} %"
