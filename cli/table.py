"""Text for people: tables with aligned columns, sizes in bytes, and a request's phase ledger."""

from collections.abc import Sequence

from tandem.results import Result

_NO_TRANSPORT = ("", "local")  # the transport in a ledger if no KV moved between workers


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns; those that contain only numbers are aligned to the right."""
    widths = [max(len(row[i]) for row in [heading, *rows]) for i in range(len(heading))]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(heading))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [heading, *rows]
    )


def bytes_text(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def ledger_text(result: Result) -> str:
    """Return a table of the phases with their shares of the wall time, then their sum."""
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
        "KV: not moved"
        if ledger.transport in _NO_TRANSPORT
        else f"KV: {bytes_text(ledger.kv_bytes)} by {ledger.transport}",
        f"members: {', '.join(ledger.members) or '-'}",
    ]
    if ledger.reasons:
        lines.append(f"events: {', '.join(ledger.reasons)}")
    return "\n".join(lines)


def _duration(duration_s: float, wall_s: float) -> tuple[str, str]:
    return f"{duration_s * 1000:.1f}", f"{100 * duration_s / wall_s:.1f} %"


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell.replace(".", "", 1).replace(",", "").removesuffix(" %").isdigit()
