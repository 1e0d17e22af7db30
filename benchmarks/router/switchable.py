"""A router whose metrics or proofs can be switched off while it runs, so that both cases are measured in one process.

`python -m benchmarks.router.switchable` takes the flags of `python -m router`. A line `metrics on` or `proofs off` on
standard input switches, and is repeated on standard output. Without metrics the calls that record them return at once;
without proofs the calls to workers carry as many zeros, which a worker of the benchmark admits.
"""

import runpy
import sys
import threading

from cluster.auth.sessions import SESSION_ID_BYTES, Session
from cluster.observe.telemetry import Telemetry

_CALLS = {name: getattr(Telemetry, name) for name in ("count", "gauge", "shift", "observe", "observe_all")}
_PROVE, _VERIFY = Session.prove, Session.verify
_UNPROVED = bytes(40)  # a counter and an HMAC-SHA256


def admit_unproved() -> None:
    """Let this process admit calls of a router whose proofs are switched off."""
    Session.verify = _verify  # type: ignore[assignment, method-assign]


def _verify(session: Session, proof: bytes, method: str, body: bytes) -> None:
    if proof[SESSION_ID_BYTES:] != _UNPROVED:
        _VERIFY(session, proof, method, body)


def _unproved(session: Session, method: str, body: bytes) -> bytes:
    return session.id + _UNPROVED


def _do_nothing(*arguments: object, **labels: object) -> None:
    pass


def _follow_input() -> None:
    for line in sys.stdin:
        what, state = line.split()
        if what == "proofs":
            Session.prove = _PROVE if state == "on" else _unproved  # type: ignore[assignment, method-assign]
        else:
            for name, call in _CALLS.items():
                setattr(Telemetry, name, call if state == "on" else _do_nothing)
        print(line.strip(), flush=True)


if __name__ == "__main__":
    threading.Thread(target=_follow_input, daemon=True).start()
    runpy.run_module("router", run_name="__main__")
