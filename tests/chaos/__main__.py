"""`python -m tests.chaos`: inject one fault per round into a real cluster under load, and judge every request.

From 60 rounds on a run covers every fault at least once. `--only sigkill:decode:decoding` selects the faults whose
names begin with this, `--round 17` one round of the plan. `--write` stores the figures in benchmarks/results/chaos.json
and the table in benchmarks/results/faults.md.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from cluster.errors import TandemError
from cluster.process import exit_process
from tests.chaos.load import Load
from tests.chaos.members import ChaosCluster, chaos_cluster
from tests.chaos.plan import Round, make_plan
from tests.chaos.questions import Questions, make_questions
from tests.chaos.report import Run, write
from tests.chaos.rounds import RoundResult, Rounds

_NUM_CLIENTS = 6
_SOON_S = 1.0


def main() -> int:
    arguments = _arguments()
    plan = make_plan(
        arguments.seed, arguments.rounds, lambda fault: not arguments.only or fault.name.startswith(arguments.only)
    )
    if arguments.round is not None:
        plan = tuple(one for one in plan if one.number == arguments.round)
    running = run_plan(
        plan, arguments.seed, cluster=chaos_cluster, questions=make_questions(), num_clients=arguments.clients
    )
    run = asyncio.run(_until_asked(running))
    print("\n" + run.as_table())
    print("Detection and hand-over:", *run.goals, sep="\n  ")
    if arguments.write:
        write(run)
    return 0 if run.is_good else 1


async def _until_asked(running: Coroutine[None, None, Run]) -> Run:
    """Run until SIGTERM, which ends the run and all its processes."""
    task = asyncio.ensure_future(running)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


async def run_plan(
    plan: Sequence[Round],
    seed: int,
    *,
    cluster: Callable[[Path], AbstractAsyncContextManager[ChaosCluster]],
    questions: Questions,
    num_clients: int,
) -> Run:
    """Run the rounds on one cluster, which `cluster` starts. Stops early if the cluster does not recover, and reports
    that."""
    began_s, results = time.monotonic(), list[RoundResult]()
    broken = ""
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-") as directory:
        async with cluster(Path(directory)) as chaos:
            load = Load(questions, num_clients=num_clients)
            rounds = Rounds(chaos, load, _tell)
            try:
                await load.open(chaos.router_addresses())
                await load.learn()
                _tell(f"the cluster is whole after {time.monotonic() - began_s:.1f} s")
                for one in plan:
                    if one.fault.kind in chaos.missing:
                        continue
                    try:
                        results.append(await rounds.run(one))
                    except (TimeoutError, RuntimeError, TandemError) as error:
                        broken = f"{one.story}: {type(error).__name__}: {error}"
                        _tell(f"BROKEN {broken}\n{chaos.cluster.output()[-6000:]}")
                        break
                    _tell_round(one, results[-1], seed)
            finally:
                await load.stop()
            exits = await chaos.cluster.stop()
    return Run(
        seed=seed,
        num_planned=len(plan),
        results=tuple(results),
        missing=dict(chaos.missing),
        broken=broken,
        seconds=time.monotonic() - began_s,
        exits=exits,
        longest=rounds.book.longest(),
    )


def _tell_round(one: Round, result: RoundResult, seed: int) -> None:
    waits = sorted(result.recovery_s)
    worst = f", longest wait {waits[-1]:.2f} s" if waits else ""
    worst += f", {max(result.handover_s):.2f} s of it detection and hand-over at most" if result.handover_s else ""
    covered = "" if result.is_covered else " NOT MET"
    _tell(
        f"{one.story}{covered}: {result.seconds:.1f} s, {result.requests} requests, {result.affected} affected{worst}"
        + (f", {len(result.own_streams)} ended with their router" if result.own_streams else "")
        + (f" ({result.note})" if result.note else "")
        + (f", free after {result.account.free_after_s:.1f} s" if result.account.free_after_s > _SOON_S else "")
    )
    for course in result.slow:
        _tell(f"  SLOW {course}")
    if not result.is_right:
        _tell(f"  WRONG. Again: --seed {seed} --only {result.fault}   (was round {one.number})")
        for what in result.wrong[:10]:
            _tell(f"  {what}")


def _tell(what: str) -> None:
    print(what, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="number of rounds (default: 200)")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="S", help="seed of the plan and the clients (default: 1)"
    )
    parser.add_argument("--only", default="", metavar="NAME", help="only faults whose names begin with this")
    parser.add_argument("--round", type=int, metavar="K", help="only this round of the plan")
    parser.add_argument(
        "--clients",
        type=int,
        default=_NUM_CLIENTS,
        metavar="N",
        help="number of clients that send requests continuously",
    )
    parser.add_argument("--write", action="store_true", help="store the result")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    exit_process(main())
