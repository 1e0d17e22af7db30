"""A forked member is a process as `python -m` starts one: its arguments, environment, descriptors, output and end."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.system.rigs.processes.fork_server import ForkedProcess, ForkServer, router_forks

_PROGRAM = "tests.system.rigs.processes.forked_program"


@pytest.fixture
def own_server() -> Iterator[ForkServer]:
    server = ForkServer(("asyncio",))
    yield server
    server.kill()


async def _run(code: str, **environment: str) -> tuple[ForkedProcess, str]:
    """Run a process to its end and return it with its whole output."""
    process = await router_forks().spawn(_PROGRAM, (code,), environment)
    output = (await process.stdout.read()).decode()
    await process.wait()
    return process, output


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('a reason')", 1),
        ("raise ValueError('a cause')", 1),
        ("import os; os._exit(5)", 5),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
async def test_the_exit_status_is_reported(code: str, status: int) -> None:
    process, _ = await _run(code)
    assert process.returncode == status


async def test_stdout_and_stderr_arrive_in_order_and_at_once() -> None:
    _, output = await _run("import os; print('one'); sys.stderr.write('two\\n'); print('three'); os._exit(0)")
    assert output == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("code", "said"), [("raise ValueError('a cause')", "ValueError: a cause"), ("sys.exit('why')", "why")]
)
async def test_the_reason_of_a_failed_end_is_written(code: str, said: str) -> None:
    _, output = await _run(code)
    assert output.rstrip().endswith(said)


async def test_arguments_and_environment_are_those_of_the_call() -> None:
    _, output = await _run("import os; print(len(sys.argv), sys.argv[1][:9], dict(os.environ))", A="b")
    assert output == "2 import os {'A': 'b'}\n"


async def test_nothing_of_the_server_or_of_the_test_is_inherited() -> None:
    """A member inherits no descriptor, and a router has no torch."""
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1], {'torch'} & {*sys.modules})"
    _, output = await _run(code)
    assert output == "[0, 1, 2] set()\n"  # the last one is of the listing itself


async def test_a_member_is_stopped_and_killed_by_its_own_id() -> None:
    process = await router_forks().spawn(_PROGRAM, ("import signal; print('runs'); signal.pause()",), {})
    assert process.pid != os.getpid()
    assert await process.stdout.readline() == b"runs\n"
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM
    process.kill()  # it has ended: nothing happens


async def test_members_end_with_their_server(own_server: ForkServer) -> None:
    process = await own_server.spawn(_PROGRAM, ("import signal; print('runs'); signal.pause()",), {})
    assert await process.stdout.readline() == b"runs\n"
    own_server.kill()
    assert await process.wait() == -signal.SIGKILL
    assert await process.stdout.read() == b""
    with pytest.raises(RuntimeError, match="the fork server has ended"):
        await own_server.spawn(_PROGRAM, ("pass",), {})
