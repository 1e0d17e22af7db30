"""Rows of text under a heading, columns aligned."""

from collections.abc import Sequence


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns whose every cell looks like a number stand to the right."""
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


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell.replace(".", "", 1).replace(",", "").removesuffix(" %").isdigit()
