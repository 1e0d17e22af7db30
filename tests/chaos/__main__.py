"""`python -m tests.chaos`: a real cluster under load, one fault a round, and what became of every request.

A run covers every fault at least once from 60 rounds on. `--only sigkill:decode:decoding` takes the faults whose names
begin so, `--round 17` one round of the plan alone. `--write` keeps the figures: benchmarks/results/chaos.json, and the
table of docs/faults.md.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

from cluster.errors import TandemError
from cluster.process import leave
from tests.chaos.load import Load
from tests.chaos.members import chaos_cluster
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
    run = asyncio.run(
        _until_asked(run_plan(plan, arguments.seed, questions=make_questions(), num_clients=arguments.clients))
    )
    print("\n" + run.as_table())
    print("Detection and hand-over:", *run.goals, sep="\n  ")
    if arguments.write:
        write(run)
    return 0 if run.is_good else 1


async def _until_asked(running: Coroutine[None, None, Run]) -> Run:
    """A SIGTERM ends the run, and leaves nothing of it."""
    task = asyncio.ensure_future(running)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


async def run_plan(plan: Sequence[Round], seed: int, *, questions: Questions, num_clients: int) -> Run:
    """On one cluster. Stops early where that cannot be made whole again, and says so."""
    began_s, results = time.monotonic(), list[RoundResult]()
    broken = ""
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-") as directory:
        async with chaos_cluster(Path(directory)) as chaos:
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
    if not result.is_right:
        _tell(f"  WRONG. Again: --seed {seed} --only {result.fault}   (was round {one.number})")
        for what in result.wrong[:10]:
            _tell(f"  {what}")


def _tell(what: str) -> None:
    print(what, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the plan and the clients (default: 1)")
    parser.add_argument("--only", default="", metavar="NAME", help="faults whose names begin so")
    parser.add_argument("--round", type=int, metavar="K", help="this round of the plan alone")
    parser.add_argument("--clients", type=int, default=_NUM_CLIENTS, metavar="N", help="that ask without pause")
    parser.add_argument("--write", action="store_true", help="keep the result")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    leave(main())
