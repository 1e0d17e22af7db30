"""Ends the processes of a test run that was killed, or whose test exceeded its timeout, and that can no longer end them
itself.

    python tests/reaper.py PIDFD TOKEN

Runs next to pytest, in a separate session, and waits until the process of the descriptor has ended. Then it kills every
process whose environment holds the token: children inherit it, and so do theirs. Standard library only.
"""

import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

# Tokens of this run and of the runs around it, separated by commas: an outer run also ends what an inner one started.
VARIABLE = "TEST_RUN_TOKENS"


def start_reaper(environment: MutableMapping[str, str]) -> None:
    """Mark the children of this process, and start a process that ends them when this one ends. Call it once, before
    any child is started."""
    token = secrets.token_hex(8)
    environment[VARIABLE] = ",".join(filter(None, (environment.get(VARIABLE, ""), token)))
    pidfd = os.pidfd_open(os.getpid())
    try:
        subprocess.Popen(
            (sys.executable, "-I", "-S", __file__, str(pidfd), token),
            env={},  # or it would kill itself
            pass_fds=(pidfd,),
            start_new_session=True,  # a signal to the run's process group does not end it
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    finally:
        os.close(pidfd)


def is_readable(descriptor: int, timeout_s: float | None = None) -> bool:
    """Wait until the descriptor is readable; without a timeout wait for ever. A process's descriptor is readable when
    the process has ended.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def marked(token: str) -> list[int]:
    """Return the processes that have inherited the mark."""
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if token.encode() in _environment(folder)]


def _environment(folder: Path) -> bytes:
    try:
        return (folder / "environ").read_bytes()
    except OSError:  # it has ended, or it is another user's
        return b""


def _kill_all(token: str) -> None:
    while found := marked(token):
        for process_id in found:
            try:
                pidfd = os.pidfd_open(process_id)
            except ProcessLookupError:
                continue
            try:
                if process_id in marked(token):  # the descriptor is this process's, not a later one's of equal number
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    is_readable(pidfd, timeout_s=10.0)
            except ProcessLookupError:
                pass
            finally:
                os.close(pidfd)


if __name__ == "__main__":
    is_readable(int(sys.argv[1]))
    _kill_all(sys.argv[2])
