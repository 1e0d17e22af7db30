"""`python -m tests.faults.holding_router ...`: a router that keeps back the later tokens of every request, and its end.

Its flags are a router's. Its first request delivers two tokens of each choice, the next one five, then eight, and so
on. So no request is over when a test ends or stops the router, however late that is.
"""

import itertools
import sys

import uvloop

from cluster.clock import Clock
from cluster.process import announce_ready, exit_process, run_process, stop_requested
from cluster.settings.config import RouterConfig
from cluster.settings.config_sources import parse_arguments
from router import app
from router.request import live_requests
from router.request.live_table import ClientBuffers
from router.request.outbox import Outbox, OutboxFlush
from router.requests import ChoiceDelta

_NUM_DELIVERED = itertools.count(2, 3)


class HoldingOutbox(Outbox):
    def __init__(self, buffers: ClientBuffers, clock: Clock, flush: OutboxFlush, stream_interval: int = 1) -> None:
        super().__init__(buffers, clock, flush, stream_interval)
        self._num_delivered = next(_NUM_DELIVERED)

    def put(self, delta: ChoiceDelta, now_s: float | None = None) -> None:
        if delta.first_index + len(delta.token_ids) <= self._num_delivered:
            super().put(delta, now_s)

    def end(self) -> None:
        """Keep back the end too."""


async def _main() -> None:
    config = parse_arguments(RouterConfig, "router", sys.argv[1:])
    live_requests.Outbox = HoldingOutbox  # type: ignore[attr-defined]
    await app.run(config, stop=stop_requested(), announce=announce_ready)


if __name__ == "__main__":
    exit_process(run_process("router", _main, uvloop.new_event_loop))
