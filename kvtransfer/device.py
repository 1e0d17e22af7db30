"""Streams and device contexts on a GPU for work that runs concurrently with the engine's steps.

A transfer never waits for a step, and no step waits for a transfer. Each kind of work keeps one stream: torch caches
freed memory per stream and hands out 32 streams in turn, so a new stream for each piece of work would keep 32 times the
memory that one piece needs, while the pool leaves little.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


@contextmanager
def side_stream(work: str, device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Make a stream for this kind of work current, for threads that do the same `work` one after the other.

    The caller waits for the stream before it leaves the block if other threads or streams use the result."""
    stream = _stream(work, device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream


@lru_cache(maxsize=64)
def _stream(work: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def use_device(index: int) -> None:
    """Make the device's primary context current on this thread. It waits for no step of the engine.

    CUDA's runtime does this for every thread that calls it; UCX and other libraries that call the driver themselves
    fail on a thread without a context. Raises RuntimeError."""
    torch.cuda.set_device(index)
    torch.cuda.Stream(index).synchronize()  # type: ignore[no-untyped-call]  # set_device alone may not call the runtime
