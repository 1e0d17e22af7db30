"""Threads that turn text into token ids and back, a few at a time.

Owns the threads. A text waits for one on the event loop, where its caller can leave; nothing waits behind the threads.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.errors import Overloaded

_NUM_THREADS = 2
_MAX_WAITING = 4096  # callers; those of generations are bounded by --max-live-requests
_RETRY_AFTER_S = 1.0

Given = TypeVar("Given")
Made = TypeVar("Made")


class TokenizerThreads:
    def __init__(self, num_threads: int = _NUM_THREADS, *, max_waiting: int = _MAX_WAITING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "tokenize")
        self._free = asyncio.Semaphore(num_threads)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def run(self, call: Callable[[Given], Made], given: Given) -> Made:
        """Raises Overloaded, and what the call raises. A caller that leaves while it runs leaves its thread busy."""
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._num_waiting} texts wait to be tokenized; try again", retry_after_s=_RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        working = asyncio.get_running_loop().run_in_executor(self._threads, call, given)
        working.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(working)
