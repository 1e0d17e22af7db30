"""The extract of Mooncake's conversation trace, read as requests, and the speed at which workers keep up with it."""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

BLOCK_TOKENS = 512  # of the trace
_GRID_S = 3.0  # of the trace's timestamps


@dataclass(frozen=True, slots=True)
class Request:
    arrival_s: float
    num_tokens: int
    blocks: tuple[bytes, ...]  # one hash per block of the prompt


def read_trace(path: Path, seed: int) -> list[Request]:
    """Read the trace in the order of arrival, arrivals spread within the grid."""
    draws = random.Random(seed)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    requests = [
        Request(
            row["timestamp"] / 1000 + draws.random() * _GRID_S,
            row["input_length"],
            tuple(number.to_bytes(16, "big") for number in row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]),
        )
        for row in rows
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


def without_sharing(requests: Sequence[Request]) -> list[Request]:
    """Return the same requests with blocks of their own."""
    numbers = itertools.count(1 << 64)
    return [replace(one, blocks=tuple(next(numbers).to_bytes(16, "big") for _ in one.blocks)) for one in requests]


def token_s(requests: Sequence[Request], *, num_workers: int, utilisation: float) -> float:
    """Return the seconds per token at which the workers are busy for `utilisation` of the time if each block is
    computed once."""
    seen: set[bytes] = set()
    num_computed = 0
    for request in requests:
        num_computed += request.num_tokens - BLOCK_TOKENS * sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    return utilisation * num_workers * (requests[-1].arrival_s - requests[0].arrival_s) / num_computed
