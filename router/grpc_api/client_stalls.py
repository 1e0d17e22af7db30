"""gRPC clients that take nothing of their answer: the call of one that stalls is ended. HTTP's are in http_edge.py."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Counts(Protocol):
    """What this module needs of cluster.observe.telemetry.Telemetry."""

    def count(self, name: str, value: float = 1, **labels: str) -> None: ...


class ClientStalls:
    def __init__(self, stall_s: float, telemetry: Counts) -> None:
        self._stall_s = stall_s
        self._telemetry = telemetry

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around a `yield` of an answer: gRPC writes it within, in the task of the call, which is cancelled when the
        write takes too long."""
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self._stall_s, self._give_up, task)
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, call: "asyncio.Task[object]") -> None:
        self._telemetry.count("tandem_stalled_clients_total", surface="grpc")
        call.cancel()
