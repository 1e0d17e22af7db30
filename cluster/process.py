"""Runs a Tandem process until a signal stops it, and ends it with an exit status that states the reason.

    async def main() -> None:
        config = parse_arguments(WorkerConfig, "prefill_worker", sys.argv[1:])
        ...

    exit_process(run_process("prefill_worker", main))

Owns exit statuses and signals. The parent process reads the status and the last line of stderr.
"""

import asyncio
import ctypes
import errno
import functools
import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import IntEnum
from importlib import metadata
from typing import NoReturn

from cluster.errors import ConfigError, DrainIncomplete, Fenced, RegistryUnavailable, TandemError, Unhealthy

_LOG = logging.getLogger("tandem.process")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class ExitStatus(IntEnum):
    OK = 0  # asked to stop, and all work was finished
    CRASHED = 1
    CONFIG = 2  # a restart does not help; argparse uses this status too
    FENCED = 3  # a newer incarnation has registered under this member id
    REGISTRY = 4
    DRAIN_INCOMPLETE = 5  # asked to stop, and the grace period ended with work left, which other workers resume
    STUCK = 6  # its device, step thread or event loop was blocked: a restart helps


def run_process(
    name: str,
    main: Callable[[], Coroutine[None, None, None]],
    make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> int:
    """Run `main` to its end and return the exit status. A known error is one line on stderr, not a stack trace. Until
    `stop_requested` a signal ends the process at once, so `main` imports what takes long."""
    try:
        with _ending_at_signals(), asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(main())
    except TandemError as error:
        sys.stderr.write(f"{name}: {error.reason}: {error.message}\n")
        return _status(error)
    except OSError as error:
        if not (line := full_disk(error)):
            _LOG.exception("%s crashed", name)
        else:
            sys.stderr.write(f"{name}: {line}\n")
        return ExitStatus.CRASHED
    except Exception:  # noqa: BLE001 -- the process ends here; the log and the exit status report it
        _LOG.exception("%s crashed", name)
        return ExitStatus.CRASHED
    return ExitStatus.OK


@contextmanager
def _ending_at_signals() -> Iterator[None]:
    """End the process at SIGTERM and SIGINT without a word: it has nothing to finish yet. Otherwise SIGINT would be a
    stack trace, and the first process of a container would ignore SIGTERM."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, _: os._exit(128 + number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@functools.cache
def installed_version() -> str:
    """Return Tandem's version; `unpackaged` where it runs from a checkout that was not installed."""
    try:
        return metadata.version("tandem-serving")
    except metadata.PackageNotFoundError:
        return "unpackaged"


def full_disk(error: OSError) -> str:
    """Return the line for a file that could not be written, or an empty string if the error is another one."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = error.filename or "one of the disks that `df` shows as full"
        return f"{os.strerror(error.errno)}: {place}; free some space there, or give it more"
    if "No usable temporary directory" in str(error):  # tempfile tries to write to each one
        return f"{error.strerror}; free some space in one of them, or set TMPDIR"
    return ""


def unused_tmpdir() -> str:
    """Return a line about a TMPDIR in which no file can be written, such as one on a full disk: Python then uses
    another folder and does not say so. An empty string if TMPDIR is used or not set. Raises OSError if no folder can be
    used."""
    named, used = os.environ.get("TMPDIR", ""), tempfile.gettempdir()
    if not named or os.path.abspath(named) == used:
        return ""
    try:
        with tempfile.TemporaryFile(dir=named) as file:
            file.write(b"x")
    except OSError as error:
        why = error.strerror or str(error)
        return f"cannot write to TMPDIR {named}: {why}; temporary files go to {used}; free some space, or correct it"
    return ""


def exit_process(status: int) -> NoReturn:
    """End the process now, after flushing logs and output. Skips the interpreter's teardown, which takes seconds to
    free torch and gRPC; all resources that need a release have been released by their owners."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def lasting() -> Iterator[None]:
    """Create objects that live until the process ends, such as torch, transformers and a model, within this context.
    The garbage collector is off meanwhile and ignores these million objects afterwards. Otherwise it would take a third
    of a worker's start, and later 0.4 s in the middle of a step."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stop_requested() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second signal ends the process at once. A drain by an
    operator may set the event too and does not count as a signal. Call it on the running loop."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    was_signalled = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal was_signalled
        if was_signalled:
            os._exit(128 + number)
        was_signalled = True
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return asked


def reload_requested() -> asyncio.Event:
    """Return an event that each SIGHUP sets, so that the process reads its files again. Call it on the running loop."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    return asked


def announce_ready(**fields: object) -> None:
    """Print the line `ready name=value ...` on stdout, for which the parent process waits.

    From then on the garbage collector skips the objects that exist now: a worker has 400,000 objects of its libraries,
    and a full collection stopped it for 195 ms."""
    gc.freeze()
    sys.stdout.write(" ".join(["ready", *(f"{name}={value}" for name, value in fields.items())]) + "\n")
    sys.stdout.flush()


def die_with_parent() -> None:
    """Run in a child process before exec: the kernel kills it when the thread that created it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _status(error: TandemError) -> ExitStatus:
    match error:
        case ConfigError():
            return ExitStatus.CONFIG
        case Fenced():
            return ExitStatus.FENCED
        case RegistryUnavailable():
            return ExitStatus.REGISTRY
        case DrainIncomplete():
            return ExitStatus.DRAIN_INCOMPLETE
        case Unhealthy():
            return ExitStatus.STUCK
    return ExitStatus.CRASHED
