"""The supervisor restarts its child processes, shown on real ones."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli.local.child import ChildSpec
from cli.local.supervisor import RestartLimits, Supervisor
from cluster.errors import ConfigError, Unavailable

DEADLINE_S = 30.0
ROOT = Path(__file__).parents[3]
STAY = "import signal\nprint('ready port=7 name=x', flush=True)\nsignal.pause()\n"


def child(name: str, program: str, *arguments: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", program, *arguments))


WILL_NOT_LEAVE = (
    "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\nsignal.pause()\n"
)


class Watched:
    """A supervisor and its messages."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.log: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            say=self.said.put_nowait,
            echo=self._echo,
            limits=RestartLimits(first_backoff_s=0.01, max_backoff_s=0.02, first_starts=3),
        )

    def _echo(self, name: str, line: str) -> None:
        self.log.append((name, line))
        self.heard.put_nowait(line)

    async def told(self) -> str:
        return await asyncio.wait_for(self.said.get(), DEADLINE_S)

    async def ready(self, name: str) -> dict[str, str]:
        return await asyncio.wait_for(self.supervisor.ready(name), DEADLINE_S)


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    watched = Watched()
    yield watched
    pids = watched.supervisor.pids()
    await asyncio.wait_for(watched.supervisor.close(), DEADLINE_S)
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]


async def test_a_ready_child_returns_the_values_of_its_ready_line(watched: Watched) -> None:
    watched.supervisor.start([child("one", STAY)])
    assert await watched.ready("one") == {"port": "7", "name": "x"}


async def test_a_dead_child_is_started_again_and_reported_with_its_last_lines(watched: Watched, tmp_path: Path) -> None:
    dies_once = (
        "import pathlib, sys, signal\n"
        "print('ready', flush=True)\n"
        "mark = pathlib.Path(sys.argv[1])\n"
        "if mark.exists(): signal.pause()\n"
        "mark.touch()\n"
        "for number in range(30): print('line', number, file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    watched.supervisor.start([child("one", dies_once, str(tmp_path / "mark"))])
    end_report = await watched.told()
    assert "one ended with status 7; starting it again" in end_report
    assert "one | line 29" in end_report
    assert "line 9\n" not in end_report  # the last twenty
    assert await watched.told() == "one is back"
    assert ("one", "line 0") in watched.log


async def test_a_killed_child_is_restarted_as_a_new_process(watched: Watched) -> None:
    watched.supervisor.start([child("one", STAY)])
    await watched.ready("one")
    first = watched.supervisor.pids()["one"]
    os.kill(first, signal.SIGKILL)
    assert "one was killed by signal 9" in await watched.told()
    assert await watched.told() == "one is back"
    assert watched.supervisor.pids()["one"] != first


async def test_refused_settings_end_the_supervisor_with_the_childs_message(watched: Watched) -> None:
    program = "import sys\nsys.exit(print('one: config: no such model', file=sys.stderr) or 2)"
    watched.supervisor.start([child("one", program), child("two", STAY)])
    with pytest.raises(ConfigError) as refused:
        await watched.ready("one")
    assert str(refused.value) == "one ended with status 2; its settings were refused: one: config: no such model"
    with pytest.raises(ConfigError, match="no such model"):
        await watched.supervisor.failed()
    assert watched.said.empty()  # a restart would not help


async def test_a_missing_program_ends_the_supervisor(watched: Watched) -> None:
    watched.supervisor.start([ChildSpec("one", ("/nowhere/program",))])
    with pytest.raises(FileNotFoundError):
        await watched.ready("one")


async def test_a_child_that_never_starts_ends_the_supervisor(watched: Watched) -> None:
    watched.supervisor.start([child("one", "raise SystemExit(1)")])
    with pytest.raises(Unavailable, match="did not become ready in 3 starts"):
        await watched.ready("one")
    assert watched.said.qsize() == 2


async def test_a_config_error_of_a_child_that_once_worked_restarts_the_child(watched: Watched, tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, signal\n"
        "mark = pathlib.Path(sys.argv[1])\n"
        "lives = int(mark.read_text()) if mark.exists() else 0\n"
        "mark.write_text(str(lives + 1))\n"
        "if lives == 1: sys.exit(2)\n"
        "print('ready', flush=True)\n"
        "if lives == 0: sys.exit(1)\n"
        "signal.pause()\n"
    )
    watched.supervisor.start([child("one", program, str(tmp_path / "lives"))])
    assert "status 1" in await watched.told()
    assert "status 2" in await watched.told()
    assert await watched.told() == "one is back"


async def test_a_stop_lets_a_child_finish_and_does_not_restart_it(watched: Watched) -> None:
    finishes = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('finished', flush=True)))\n"
        "print('ready', flush=True)\nsignal.pause()\n"
    )
    watched.supervisor.start([child("one", finishes)])
    await watched.ready("one")
    await asyncio.wait_for(watched.supervisor.stop(["one"], DEADLINE_S), DEADLINE_S)
    assert ("one", "finished") in watched.log
    assert watched.said.empty()


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(watched: Watched) -> None:
    watched.supervisor.start([child("one", WILL_NOT_LEAVE)])
    await watched.ready("one")
    await watched.supervisor.stop(["one"], 0.05)
    await asyncio.wait_for(watched.supervisor.close(), DEADLINE_S)


LEAVES = (
    "import signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))\n"
    "print('ready', flush=True)\nsignal.pause()\n"
)


@pytest.mark.parametrize(("status", "said"), [(0, "was drained; starting"), (5, "was drained with work left")])
async def test_a_child_terminated_from_outside_is_replaced_and_not_reported_as_a_crash(
    watched: Watched, status: int, said: str
) -> None:
    watched.supervisor.start([child("one", LEAVES, str(status))])
    await watched.ready("one")
    os.kill(watched.supervisor.pids()["one"], signal.SIGTERM)
    end_report = await watched.told()
    assert said in end_report and "lines" not in end_report
    assert await watched.told() == "one is back"


async def test_a_retired_child_ends_in_order_and_its_name_is_free(watched: Watched) -> None:
    watched.supervisor.start([child("one", LEAVES, "0")])
    await watched.ready("one")
    watched.supervisor.retire("one", DEADLINE_S)
    assert (watched.supervisor.leaving(), watched.supervisor.staying()) == (["one"], {})
    assert await watched.told() == "one was drained"
    assert (watched.supervisor.leaving(), watched.supervisor.staying()) == ([], {})
    watched.supervisor.add(child("one", STAY))
    await watched.ready("one")
    assert watched.supervisor.staying() == {"one": True}


async def test_a_retired_child_may_end_as_its_time_passes(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.supervisor.start([child("one", WILL_NOT_LEAVE)])
    await watched.ready("one")
    kept = watched.supervisor._kept["one"]

    async def ended_late() -> None:
        kept.child = None
        raise TimeoutError

    monkeypatch.setattr(kept.child, "wait", ended_late)
    watched.supervisor.retire("one", DEADLINE_S)
    assert await watched.told() == "one did not leave in time and was killed"


async def test_a_retired_child_is_killed_if_it_ignores_sigterm_and_removed_if_it_is_restarting(
    watched: Watched,
) -> None:
    watched.supervisor.start([child("stays", WILL_NOT_LEAVE)])
    await watched.ready("stays")
    watched.supervisor.retire("stays", 0.05)
    assert await watched.told() == "stays did not leave in time and was killed"
    watched.supervisor.add(child("dies", "raise SystemExit(1)"))
    await watched.told()
    watched.supervisor.retire("dies", DEADLINE_S)
    while "dies was" not in await watched.told():
        pass
    assert watched.supervisor.staying() == {}


async def test_a_child_that_is_ending_gets_no_second_signal_at_the_stop(watched: Watched) -> None:
    """A second signal would end the child at once and lose its work."""
    counts = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "signal.signal(signal.SIGWINCH, lambda *_: sys.exit(0))\n"  # handled after a SIGTERM
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    watched.supervisor.start([child("one", counts)])
    await watched.ready("one")
    pid = watched.supervisor.pids()["one"]
    watched.supervisor.retire("one", DEADLINE_S)
    await asyncio.wait_for(watched.heard.get(), DEADLINE_S)
    stopping = asyncio.create_task(watched.supervisor.stop(["one"], DEADLINE_S))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGWINCH)
    await asyncio.wait_for(stopping, DEADLINE_S)
    assert watched.log == [("one", "asked")]


async def test_an_added_child_that_never_starts_is_retried_and_ends_no_other(watched: Watched) -> None:
    watched.supervisor.start([child("one", STAY)])
    await watched.ready("one")
    watched.supervisor.add(child("two", "raise SystemExit(2)"))
    for _ in range(5):
        assert "two ended with status 2; starting it again" in await watched.told()
    assert watched.supervisor.problems() == ["two ended with status 2"]
    assert watched.supervisor.staying() == {"one": True, "two": False}


async def test_a_restarted_child_keeps_arguments_set_after_its_start(watched: Watched) -> None:
    program = "import signal, sys\nprint('ready', 'got=' + ','.join(sys.argv[1:]), flush=True)\nsignal.pause()\n"
    watched.supervisor.start([child("one", program, "--port=0")])
    assert await watched.ready("one") == {"got": "--port=0"}
    watched.supervisor.restart_with("one", ["--port=7"])
    os.kill(watched.supervisor.pids()["one"], signal.SIGKILL)
    await watched.told()
    assert await watched.told() == "one is back"
    command_line = Path(f"/proc/{watched.supervisor.pids()['one']}/cmdline").read_bytes().split(b"\0")
    assert command_line[-3:-1] == [b"--port=0", b"--port=7"]


async def test_a_ctrl_c_in_the_terminal_does_not_reach_the_children(watched: Watched) -> None:
    watched.supervisor.start([child("one", STAY)])
    await watched.ready("one")
    assert os.getsid(watched.supervisor.pids()["one"]) != os.getsid(0)


def test_children_die_with_a_killed_parent() -> None:
    parent_program = (
        "import asyncio, sys\n"
        "from cli.local.child import ChildSpec\n"
        "from cli.local.supervisor import Supervisor\n"
        "async def main():\n"
        "    supervisor = Supervisor(say=print, echo=print)\n"
        f"    supervisor.start([ChildSpec('one', (sys.executable, '-c', {STAY!r}))])\n"
        "    await supervisor.ready('one')\n"
        "    print(supervisor.pids()['one'], flush=True)\n"
        "    await supervisor.failed()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent_program], stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as parent:
        assert parent.stdout is not None
        orphan = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ends = select.poll()  # select() takes no descriptor above 1,023
        ends.register(orphan, select.POLLIN)
        gone = ends.poll(1000 * DEADLINE_S)
        os.close(orphan)
    assert gone
