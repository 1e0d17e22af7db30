"""Heartbeats: a worker periodically sends every router its step counter, its load and its free blocks."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from cluster.errors import Unavailable
from cluster.protocol.report_wire import service_times_to_wire
from cluster.service_times import ServiceTimes
from engine.scheduling.commands import Inspected
from tandem.internal.v1 import worker_pb2
from tandem.v1 import admin_pb2
from worker.watch import WorkerWatch

_LOG = logging.getLogger("tandem.heartbeats")


class Heartbeats:
    """Runs on the event loop and not on the step thread, so routers see a stuck step as a constant counter."""

    def __init__(
        self,
        send: Callable[[worker_pb2.Heartbeat], None],
        *,
        interval_s: float,
        num_steps: Callable[[], int],
        watch: WorkerWatch,
        service_times: Callable[[], ServiceTimes | None],
        publish: Callable[[Inspected], None] = lambda inspected: None,
        links: Callable[[], Sequence[admin_pb2.LinkSpeed]] = tuple,
    ) -> None:
        """`num_steps`: the engine's step counter. `service_times`: how fast this worker computes. `publish` gets the
        inspection of each heartbeat. `links`: the measured speeds of this worker's links."""
        self._send = send
        self._interval_s = interval_s
        self._num_steps = num_steps
        self._watch = watch
        self._service_times = service_times
        self._publish = publish
        self._links = links

    async def run(self) -> None:
        """Send a heartbeat every `interval_s` until cancelled."""
        running = waiting = free_blocks = 0
        while True:
            try:
                inspected = await self._watch.inspections.inspect(timeout_s=self._interval_s)
            except Unavailable:
                _LOG.debug("the step thread is in a long step; the heartbeat repeats the previous figures")
            else:
                running, waiting = int(inspected.figures["running"]), int(inspected.figures["waiting"])
                free_blocks = inspected.blocks["free"] + inspected.blocks["cached"]
                self._publish(inspected)
            times = self._service_times()
            self._send(
                worker_pb2.Heartbeat(
                    step=self._num_steps(),
                    running=running,
                    waiting=waiting,
                    free_blocks=free_blocks,
                    links=self._links(),
                    step_s=self._watch.health.step_s,
                    service_times=None if times is None else service_times_to_wire(times),
                )
            )
            await asyncio.sleep(self._interval_s)
