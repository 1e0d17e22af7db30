"""What a worker tells every router, again and again: that it lives, how far it is, what is free."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from cluster.errors import Unavailable
from cluster.worker_watch import WorkerWatch
from tandem.v1 import worker_pb2

_LOG = logging.getLogger("tandem.heartbeats")


class Heartbeats:
    """On the event loop, off the step thread: a stuck step shows as a counter that stands still."""

    def __init__(
        self,
        send: Callable[[worker_pb2.Heartbeat], None],
        *,
        interval_s: float,
        num_steps: Callable[[], int],
        watch: WorkerWatch,
        pairs: Callable[[], Sequence[worker_pb2.PairFigures]] = tuple,
    ) -> None:
        """`num_steps`: the engine's step counter. `pairs`: how fast this worker's hand-offs from others have been."""
        self._send = send
        self._interval_s = interval_s
        self._num_steps = num_steps
        self._watch = watch
        self._pairs = pairs

    async def run(self) -> None:
        """One after the other, until it is cancelled."""
        running = waiting = free_blocks = 0
        while True:
            try:
                inspected = await self._watch.inspections.inspect(timeout_s=self._interval_s)
            except Unavailable:
                _LOG.debug("the step thread is in a long step; the figures before it stand")
            else:
                running, waiting = int(inspected.figures["running"]), int(inspected.figures["waiting"])
                free_blocks = inspected.blocks["free"] + inspected.blocks["cached"]
            self._send(
                worker_pb2.Heartbeat(
                    step=self._num_steps(),
                    running=running,
                    waiting=waiting,
                    free_blocks=free_blocks,
                    pairs=self._pairs(),
                    step_s=self._watch.health.step_s,
                )
            )
            await asyncio.sleep(self._interval_s)


class HeartbeatFeed:
    """Heartbeats for routers that follow them by a call of their own. One that reads slowly hears the latest only."""

    def __init__(self) -> None:
        self._latest: worker_pb2.Heartbeat | None = None
        self._changed = asyncio.Event()
        self._is_closed = False

    def beat(self, heartbeat: worker_pb2.Heartbeat) -> None:
        self._latest = heartbeat
        self._wake()

    def close(self) -> None:
        """Every call ends."""
        self._is_closed = True
        self._wake()

    async def follow(self) -> AsyncGenerator[worker_pb2.Heartbeat, None]:
        """The latest one at once, then each; until the caller leaves, or the worker does."""
        while not self._is_closed:
            changed = self._changed
            if self._latest is not None:
                yield self._latest
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
