"""For how many decodes at once a graph is captured. Pure.

A step of n decodes replays the graph of the smallest size that holds n, and computes unused rows for the rest: at most
a third of a small step, and under a tenth from 64 on. Sizes are closer where steps are small and each graph is cheap.
"""

import bisect
from collections.abc import Sequence

_SMALL = (1, 2, 4)
_EIGHTS_TO = 256
_FAR_STEP = 32


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, ascending: 1, 2, 4, 8, 16, 24, ... and `max_num_seqs` itself."""
    assert max_num_seqs >= 1
    sizes = {*_SMALL, *range(8, _EIGHTS_TO + 1, 8), *range(_EIGHTS_TO, max_num_seqs, _FAR_STEP), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def bucket_for(num_decodes: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `sizes` that holds `num_decodes` rows, or None."""
    place = bisect.bisect_left(sizes, num_decodes)
    return sizes[place] if place < len(sizes) else None
