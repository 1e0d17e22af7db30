"""`python -m worker --role both --model M --redis URL ...`: one worker of any role."""

import sys

from cluster.process import announce_ready, exit_process, reload_requested, run_process, stop_requested


async def _main() -> None:
    from cluster.messages import Role
    from cluster.settings.config import WorkerConfig
    from cluster.settings.config_sources import LineParser
    from cluster.settings.reload import settings_source
    from worker.life import run_worker

    roles = LineParser(prog="python -m worker", add_help=False, allow_abbrev=False)
    roles.add_argument("--role", choices=[str(role) for role in Role if role.is_worker], default=Role.BOTH)
    chosen, others = roles.parse_known_args(sys.argv[1:])
    source = settings_source(WorkerConfig, "worker", others, reload_requested())
    await run_worker(source.read(), Role(chosen.role), stop=stop_requested(), announce=announce_ready, source=source)


if __name__ == "__main__":
    exit_process(run_process("worker", _main))
