"""A forked child is what a program of its own would be, except that its modules are imported already."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.local.child import ChildProcess, ChildSpec, ForkedProcess, environment_of, executed
from cli.local.fork_server import ForkServer

DEADLINE_S = 30.0
ROOT = Path(__file__).parents[3]
PROGRAM = "tests.system.rigs.processes.forked_program"
STAY = "import signal; print('runs'); signal.pause()"


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer(("colorsys",), {"OMP_NUM_THREADS": "3"})
    yield server
    server.kill()


def spec(code: str, **environment: str) -> ChildSpec:
    return ChildSpec("one", (sys.executable, "-m", PROGRAM, code), environment)


async def forked(server: ForkServer, code: str, **environment: str) -> ForkedProcess:
    child = spec(code, **environment)
    process = await server.spawn(child.module, child.arguments[3:], environment_of(child))
    assert process is not None
    return process


async def ended(process: ChildProcess) -> tuple[int, bytes, bytes]:
    """Wait for the end and return the status and the output."""
    assert process.stdout is not None and process.stderr is not None
    output, log = await asyncio.gather(process.stdout.read(), process.stderr.read())
    return await asyncio.wait_for(process.wait(), DEADLINE_S), output, log


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print(sys.argv[1:], sys.path, sys.flags, __name__)",
        "import os; print(sorted(os.environ.items()))",
        "import os; print(os.getppid(), os.getcwd(), os.getsid(0) == os.getpid())",
        "import os; print(sorted(os.listdir('/proc/self/fd'))[:-1], os.readlink('/proc/self/fd/0'))",
        "import os; print(open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0)))",
        "import signal; print([signal.getsignal(number) for number in signal.Signals])",
        "import sys; print(sys.stdin.read()); sys.stderr.write('why'); sys.exit(7)",
        "import sys; sys.exit('a reason')",
        "import os; os.kill(os.getpid(), 9)",
        "import os; print('not', end=' '); print('lost'); os._exit(5)",
        "import asyncio\nasync def main(): print('runs')\nasyncio.run(main())",
    ],
)
async def test_a_forked_child_is_like_a_program_of_its_own(server: ForkServer, code: str) -> None:
    child = spec(code, TANDEM_TESTED="yes")

    assert await ended(await forked(server, code, TANDEM_TESTED="yes")) == await ended(await executed(child))


async def test_an_error_is_written_and_sets_the_status(server: ForkServer) -> None:
    status, _, log = await ended(await forked(server, "raise ValueError('a cause')"))

    assert status == 1
    assert log.decode().rstrip().endswith("ValueError: a cause")


async def test_its_modules_are_imported_already_with_their_environment(server: ForkServer) -> None:
    code = "import sys, os; print('colorsys' in sys.modules, os.environ.get('OMP_NUM_THREADS'))"

    assert (await ended(await forked(server, code, OMP_NUM_THREADS="3")))[1] == b"True 3\n"


async def test_a_forked_child_is_signalled_and_waited_for_by_its_parent(server: ForkServer) -> None:
    child = await forked(server, STAY)
    assert await child.stdout.readline() == b"runs\n"

    child.send_signal(signal.SIGTERM)

    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGTERM
    child.kill()  # it has ended: nothing happens


async def test_children_outlive_their_server_and_later_ones_are_programs(server: ForkServer) -> None:
    child = await forked(server, STAY)
    os.kill(server.pid, signal.SIGKILL)

    assert await server.spawn(PROGRAM, ("pass",), {}) is None
    assert child.returncode is None
    assert await child.stdout.readline() == b"runs\n"
    child.kill()
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGKILL


async def test_a_child_that_is_no_longer_wanted_never_runs(server: ForkServer, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    spawning = asyncio.create_task(forked(server, f"open({str(mark)!r}, 'w')"))
    await asyncio.sleep(0)  # the order is sent
    spawning.cancel()
    await asyncio.wait([spawning])

    await ended(await forked(server, "pass"))  # orders are served in turn
    assert spawning.cancelled()
    assert not mark.exists()


@pytest.mark.parametrize("module", ["tests.unit.cli.thread_at_import", "tests.unit.no_such_module"])
async def test_modules_that_cannot_be_forked_are_left_to_programs(module: str) -> None:
    server = ForkServer((module,), {})
    try:
        assert await server.spawn(PROGRAM, ("pass",), {}) is None
    finally:
        server.kill()


def test_children_and_server_die_with_a_killed_parent() -> None:
    parent_program = (
        "import asyncio, sys\n"
        "from cli.local.fork_server import ForkServer\n"
        "async def main():\n"
        "    server = ForkServer(('colorsys',), {})\n"
        f"    child = await server.spawn({PROGRAM!r}, ({STAY!r},), {{}})\n"
        "    await child.stdout.readline()\n"
        "    print(child.pid, server.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent_program], stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as parent:
        assert parent.stdout is not None
        orphans = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
        for orphan in orphans:
            ends = select.poll()
            ends.register(orphan, select.POLLIN)
            assert ends.poll(1000 * DEADLINE_S)
            os.close(orphan)
