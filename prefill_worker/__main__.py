"""`python -m prefill_worker --model M --redis URL ...`: one prefill worker."""

import sys

from cluster.messages import Role
from cluster.process import announce_ready, exit_process, run_process, stop_requested
from cluster.settings.config import WorkerConfig
from cluster.settings.config_sources import parse_arguments
from worker.life import run_worker


async def _main() -> None:
    config = parse_arguments(WorkerConfig, "prefill_worker", sys.argv[1:])
    await run_worker(config, Role.PREFILL, stop=stop_requested(), announce=announce_ready)


if __name__ == "__main__":
    exit_process(run_process("prefill_worker", _main))
