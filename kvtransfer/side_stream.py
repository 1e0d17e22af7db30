"""Streams of this package on a GPU, apart from the engine's: a transfer waits for no step, and no step for it.

One for each kind of work, kept: torch keeps freed memory by the stream that used it, and hands out 32 streams in turn.
A new one each time would keep 32 times what one piece of work needs, beside a pool that leaves little.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


@contextmanager
def side_stream(work: str, device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Current inside, for threads that do the same `work` one behind the other. Whoever enters waits for it before
    leaving, where anybody else is to see the outcome."""
    stream = _stream(work, device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream


@lru_cache(maxsize=64)
def _stream(work: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
