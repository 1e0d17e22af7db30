"""How a process of Tandem runs: until a signal asks it to stop, with an exit status that says why it ended.

    async def main() -> None:
        config = parse_arguments(WorkerConfig, "prefill_worker", sys.argv[1:])
        ...

    leave(run_process("prefill_worker", main))

Owns exit statuses and signals. Whoever started the process reads the status and the last line of stderr.
"""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NoReturn

from cluster.errors import ConfigError, DrainIncomplete, Fenced, RegistryUnavailable, TandemError, Unhealthy

_LOG = logging.getLogger("tandem.process")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class ExitStatus(IntEnum):
    OK = 0  # asked to leave, and nothing was left
    CRASHED = 1
    CONFIG = 2  # a restart would not help: argparse uses it too
    FENCED = 3  # a newer incarnation has this member's name
    REGISTRY = 4
    DRAIN_INCOMPLETE = 5  # asked to leave, and its grace passed with work left, which goes on elsewhere
    STUCK = 6  # its device, its step thread or its event loop stood still: a restart is what helps


def run_process(name: str, main: Callable[[], Coroutine[None, None, None]]) -> int:
    """Runs `main` to its end; the status to exit with. A known error becomes one line on stderr, not a stack trace."""
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        return ExitStatus.OK
    except TandemError as error:
        sys.stderr.write(f"{name}: {error.reason}: {error.message}\n")
        return _status(error)
    except Exception:  # noqa: BLE001 -- the process ends here; it is logged and told by the status
        _LOG.exception("%s crashed", name)
        return ExitStatus.CRASHED
    return ExitStatus.OK


def leave(status: int) -> NoReturn:
    """Ends the process now, with everything that was said written out. Whatever had to be released has been, by whoever
    acquired it; the interpreter's own teardown would take seconds to free torch and gRPC piece by piece."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def lasting() -> Iterator[None]:
    """Around what makes objects that stay to the process's end, such as torch, transformers and a model: a million of
    them. The collector would go through all, again and again while they come (a third of a worker's start), and later
    for 0.4 s in the middle of a step. They are set aside for good instead."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stop_requested() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT from here on; a second one ends the process at once. Whoever else sets it, a
    drain by an operator, counts as no signal. On the running loop."""
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


def announce_ready(**fields: object) -> None:
    """The one line on stdout that whoever started this process waits for: `ready name=value ...`."""
    sys.stdout.write(" ".join(["ready", *(f"{name}={value}" for name, value in fields.items())]) + "\n")
    sys.stdout.flush()


def die_with_parent() -> None:
    """Run in a child before it becomes its program: the kernel kills it when the thread that made it ends."""
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
