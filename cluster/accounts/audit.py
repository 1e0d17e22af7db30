"""The audit log: a line of JSON for each call of an administrator, refused or not, and for each refused member,
registration and KV connection."""

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.accounts.keys import Caller
from cluster.errors import ConfigError, MemberRefused

_LOG = logging.getLogger("tandem.audit")
_REFUSAL_EVERY_S = 1.0


class Audit:
    """Any thread may call it."""

    def __init__(
        self,
        path: str = "",
        *,
        wall_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the file at `path` for appending; empty: lines go to the process's log, whatever its level. Raises
        ConfigError.
        """
        self._wall_clock, self._monotonic = wall_clock, monotonic
        self._lock = threading.Lock()  # over the next
        self._refusals: dict[str, _Refusals] = {}  # by `what`
        self._log = _LOG
        if path:
            try:
                handler = logging.FileHandler(path, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write to --audit-file {path}: {error.strerror}") from error
            handler.setFormatter(logging.Formatter("%(message)s"))
            self._log = logging.Logger("tandem.audit", logging.INFO)
            self._log.addHandler(handler)
        self._log.setLevel(logging.INFO)

    def record(self, *, who: Caller | None, what: str, origin: str, outcome: str, **details: object) -> None:
        """Write one line. `who`: None for an unknown caller. `what`: the method or event. `origin`: the peer's address.
        `outcome`: ok, or the reason of a refusal. `details`: plain values, never a secret.
        """
        line = {
            "time": round(self._wall_clock(), 3),
            "who": {"key": who.key_id, "tenant": who.tenant} if who is not None else None,
            "what": what,
            "from": origin,
            "outcome": outcome,
            **details,
        }
        self._log.info(json.dumps(line))

    def record_refusal(self, *, what: str, origin: str, why: str, **details: object) -> None:
        """Write a line for a peer that is no member, at most one per second for each `what`, since strangers can be
        refused at any rate. Each line has the number of refusals that were left out before it.
        """
        with self._lock:
            refusals, now_s = self._refusals.setdefault(what, _Refusals()), self._monotonic()
            if now_s < refusals.next_s:
                refusals.num_left_out += 1
                return
            left_out, refusals.num_left_out = refusals.num_left_out, 0
            refusals.next_s = now_s + _REFUSAL_EVERY_S
        outcome = MemberRefused.reason
        self.record(who=None, what=what, origin=origin, outcome=outcome, why=why, left_out=left_out, **details)


@dataclass(slots=True)
class _Refusals:
    next_s: float = -math.inf  # when the next line may be written
    num_left_out: int = 0
