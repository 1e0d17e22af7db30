"""A router whose metrics can be switched off while it runs, so that both cases are measured in one process.

`python -m benchmarks.router.switchable` takes the flags of `python -m router`. A line `on` or `off` on standard input
switches, and is repeated on standard output. Off: the calls that record metrics return at once.
"""

import runpy
import sys
import threading

from cluster.observe.telemetry import Telemetry

_CALLS = {name: getattr(Telemetry, name) for name in ("count", "gauge", "shift", "observe", "observe_all")}


def _do_nothing(*arguments: object, **labels: object) -> None:
    pass


def _follow_input() -> None:
    for line in sys.stdin:
        word = line.strip()
        for name, call in _CALLS.items():
            setattr(Telemetry, name, call if word == "on" else _do_nothing)
        print(word, flush=True)


if __name__ == "__main__":
    threading.Thread(target=_follow_input, daemon=True).start()
    runpy.run_module("router", run_name="__main__")
