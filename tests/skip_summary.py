"""Lists skipped tests in the summary: one line per reason with a count, not one per place."""

from collections import Counter
from collections.abc import Iterable


def skip_lines(reasons: Iterable[str]) -> list[str]:
    """Return the reasons of skipped tests, the most frequent first."""
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    return [
        f"SKIPPED [{count}] {reason}" for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item))
    ]
