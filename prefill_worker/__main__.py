"""`python -m prefill_worker --model M --redis URL ...`: one prefill worker."""

import sys

from cluster.process import announce_ready, exit_process, reload_requested, run_process, stop_requested


async def _main() -> None:
    from cluster.messages import Role
    from cluster.settings.config import WorkerConfig
    from cluster.settings.reload import settings_source
    from worker.life import run_worker

    source = settings_source(WorkerConfig, "prefill_worker", sys.argv[1:], reload_requested())
    await run_worker(source.read(), Role.PREFILL, stop=stop_requested(), announce=announce_ready, source=source)


if __name__ == "__main__":
    exit_process(run_process("prefill_worker", _main))
