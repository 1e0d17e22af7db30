"""What a decode worker tells every router, time and again: that it lives, how far it is, what is free."""

import asyncio
import logging
from collections.abc import Callable

from cluster.errors import Unavailable
from cluster.pair_wire import figures_to_wire
from cluster.worker_watch import WorkerWatch
from decode_worker import commands
from engine.step_loop import StepLoop
from kvtransfer.pairs import PairBook
from tandem.v1 import worker_pb2

_LOG = logging.getLogger("tandem.decode")


class Heartbeats:
    """On the event loop, off the step thread: a stuck step shows as a counter that stands still."""

    def __init__(
        self,
        send: Callable[[worker_pb2.Heartbeat], None],
        *,
        interval_s: float,
        steps: StepLoop[commands.Command, commands.Event],
        watch: WorkerWatch,
        pairs: PairBook,
    ) -> None:
        self._send = send
        self._interval_s = interval_s
        self._steps = steps
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
                    step=self._steps.progress.steps,
                    running=running,
                    waiting=waiting,
                    free_blocks=free_blocks,
                    pairs=figures_to_wire(self._pairs.figures()),
                    step_s=self._watch.health.step_s,
                )
            )
            await asyncio.sleep(self._interval_s)
