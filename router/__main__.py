"""`python -m router --model M --redis URL ...`: one router."""

import sys

import uvloop

from cluster.process import announce_ready, exit_process, reload_requested, run_process, stop_requested


async def _main() -> None:
    from cluster.settings.config import RouterConfig
    from cluster.settings.reload import settings_source
    from router import app

    source = settings_source(RouterConfig, "router", sys.argv[1:], reload_requested())
    await app.run(source.read(), stop=stop_requested(), announce=announce_ready, source=source)


if __name__ == "__main__":
    exit_process(run_process("router", _main, uvloop.new_event_loop))
