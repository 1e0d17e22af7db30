"""Reports to every connected router the work of the others at this worker (cluster/outstanding_work.py).

A router gets a report when it connects, with every heartbeat, and after the work of another router has changed: at
once if the last report after a change is `MIN_INTERVAL_S` ago, else when that time has passed. Where reports are
expensive, because much work is outstanding, the interval grows so that they take at most `_MOST_SHARE` of the event
loop's time. Changes in between are one report. A router's own work changes nothing for itself, so with a single router
nothing is sent between heartbeats.
"""

import asyncio
from collections.abc import Iterable

from cluster.messages import MemberId
from cluster.outstanding_work import OutstandingWork
from cluster.protocol import report_wire
from decode_worker.streams import RouterStreams
from tandem.internal.v1 import worker_pb2

MIN_INTERVAL_S = 0.05
_MOST_SHARE = 0.01  # of the event loop's time


class WorkReports:
    """Belongs to the event loop. `outstanding`: the account from which reports are made."""

    def __init__(self, streams: RouterStreams) -> None:
        self.outstanding = OutstandingWork(self._on_change)
        self._streams = streams
        self._due: set[MemberId] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = float("-inf")  # when the next report after a change may be sent

    def send_to(self, routers: Iterable[MemberId]) -> None:
        """Send a report to each of these routers now."""
        reports = self.outstanding.reports(routers, asyncio.get_running_loop().time())
        for router, work in reports.items():
            self._due.discard(router)
            self._streams.send_latest(router, worker_pb2.WorkerMessage(others=report_wire.others_work_to_wire(work)))

    def send_to_all(self) -> None:
        """Send a report to every connected router now."""
        self.send_to(self._streams.connected())

    def close(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _on_change(self, changed: MemberId) -> None:
        self._due.update(router for router in self._streams.connected() if router != changed)
        if self._due and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._next_s), self._send_due)

    def _send_due(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, began_s = None, loop.time()
        self.send_to(tuple(self._due))
        self._next_s = began_s + max(MIN_INTERVAL_S, (loop.time() - began_s) / _MOST_SHARE)
