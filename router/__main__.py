"""`python -m router --model M --redis URL ...`: one router."""

import sys

import uvloop

from cluster.process import announce_ready, exit_process, run_process, stop_requested
from cluster.settings.config import RouterConfig
from cluster.settings.config_sources import parse_arguments
from router import app


async def _main() -> None:
    config = parse_arguments(RouterConfig, "router", sys.argv[1:])
    await app.run(config, stop=stop_requested(), announce=announce_ready)


if __name__ == "__main__":
    exit_process(run_process("router", _main, uvloop.new_event_loop))
