"""`python -m tests.faults.hanging_worker ...`: a worker whose next step hangs on command.

Its flags are a worker's; a --member-id that begins with "prefill" makes it a prefill worker, any other a decode worker.
FAULT_CONTROL is the path of a Unix socket: after `held` the next step waits until the other side releases it; `flipped`
changes its first token. With PROMPT_SECONDS the worker predicts that it computes any part of a prompt in that time.
"""

import asyncio
import dataclasses
import os
import sys
from importlib import import_module
from typing import Any

from cluster.messages import Role
from cluster.process import announce_ready, exit_process, run_process, stop_requested
from cluster.settings.config import WorkerConfig
from cluster.settings.config_sources import parse_arguments
from engine.build import Engine
from engine.scheduling.step import DrawnToken, Runner, StepPlan, StepResult
from tests.faults.control import OrderedFaults
from tests.faults.faulty_transport import Fault
from worker.life import run_worker


class HangingRunner:
    """A runner that can hang. It runs on the step thread; only `_let_go` runs on the event loop."""

    def __init__(self, inner: Runner, orders: OrderedFaults, loop: asyncio.AbstractEventLoop) -> None:
        self._inner, self._orders, self._loop = inner, orders, loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, plan: StepPlan) -> StepResult:
        fault = self._orders.next("step")
        if fault is not None:
            self._loop.call_soon_threadsafe(self._orders.injected, fault)
        if fault is Fault.HELD:
            asyncio.run_coroutine_threadsafe(self._orders.may_go_on(), self._loop).result()
        result = self._inner.run(plan)
        return _with_another_token(result) if fault is Fault.FLIPPED else result


def _with_another_token(result: StepResult) -> StepResult:
    drawn = [list(tokens) for tokens in result.tokens]
    for tokens in drawn:
        tokens[:1] = [DrawnToken(token.token_id ^ 1, token.logprobs) for token in tokens[:1]]
    return dataclasses.replace(result, tokens=tuple(map(tuple, drawn)))


async def _main() -> None:
    config = parse_arguments(WorkerConfig, "hanging_worker", sys.argv[1:])
    role = "prefill" if config.member_id.startswith("prefill") else "decode"
    orders = OrderedFaults()
    await orders.connect(os.environ["FAULT_CONTROL"], config.member_id)
    loop = asyncio.get_running_loop()
    app: Any = import_module("worker.app")
    build = app.build_engine

    def build_hanging(*arguments: Any) -> Engine:
        engine: Engine = build(*arguments)
        runner: Any = HangingRunner(engine.runner, orders, loop)
        return dataclasses.replace(engine, runner=runner)

    app.build_engine = build_hanging
    if seconds := os.environ.get("PROMPT_SECONDS"):
        app.WorkerApp._compute_s = lambda *_: float(seconds)
    await run_worker(config, Role(role), stop=stop_requested(), announce=announce_ready)


if __name__ == "__main__":
    exit_process(run_process("hanging_worker", _main))
