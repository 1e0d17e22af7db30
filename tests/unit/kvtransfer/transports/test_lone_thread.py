"""A thread for calls that may never return."""

import asyncio
import threading

import pytest

from kvtransfer.transports.nccl.link import LoneThread
from tests.system.rigs.processes.fork_server import worker_forks

DEADLINE_S = 20.0


def test_calls_run_in_order_and_raise_their_errors_to_their_callers() -> None:
    thread = LoneThread("test", idle=lambda: None, idle_s=60.0)
    names: list[str] = []
    futures = [thread.submit(lambda: names.append(threading.current_thread().name)) for _ in range(3)]
    failing = thread.submit(lambda: 1 // 0)
    after = thread.submit(lambda: 7)
    assert after.result(DEADLINE_S) == 7 and names == ["test"] * 3
    assert [future.result() for future in futures] == [None] * 3
    with pytest.raises(ZeroDivisionError):
        failing.result()
    thread.end()


def test_waiting_call_can_be_cancelled_and_calls_before_the_end_run() -> None:
    thread, begun, go_on = LoneThread("test", idle=lambda: None, idle_s=60.0), threading.Event(), threading.Event()

    def hold() -> bool:
        begun.set()
        return go_on.wait(DEADLINE_S)

    held, waiting, last = thread.submit(hold), thread.submit(lambda: 1), thread.submit(lambda: 2)
    thread.end()
    assert begun.wait(DEADLINE_S)
    assert not held.cancel() and waiting.cancel()
    go_on.set()
    assert held.result(DEADLINE_S) and last.result(DEADLINE_S) == 2


def test_idle_callback_runs_without_calls() -> None:
    looked = threading.Event()
    thread = LoneThread("test", idle=looked.set, idle_s=0.001)
    assert looked.wait(DEADLINE_S)
    thread.end()


async def test_a_call_that_hangs_does_not_keep_the_process_alive() -> None:
    program = (
        "import threading\n"
        "from kvtransfer.transports.nccl.link import LoneThread\n"
        "begun = threading.Event()\n"
        "thread = LoneThread('stuck', idle=begun.set, idle_s=60.0)\n"
        "thread.submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "assert begun.wait(20)\n"
    )
    process = await worker_forks().spawn("tests.system.rigs.processes.forked_program", (program,), {})
    async with asyncio.timeout(DEADLINE_S):
        output = await process.stdout.read()
        assert await process.wait() == 0, output.decode()
