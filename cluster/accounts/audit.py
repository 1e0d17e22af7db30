"""The audit log: a line of JSON for each call of an administrator, refused or not, and for each refused member,
registration and KV connection."""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.accounts.keys import Caller
from cluster.errors import ConfigError, MemberRefused

_LOG = logging.getLogger("tandem.audit")
_REFUSAL_EVERY_S = 1.0
_MAX_SOURCES = 256  # of refusals that are distinguished
_OTHERS = "", "", ""  # the source under which refusals of all other sources are counted


class Audit:
    """Any thread may call it."""

    def __init__(
        self,
        path: str = "",
        *,
        wall_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the file at `path` for appending; empty: lines go to the process's log at every level. Raises
        ConfigError.
        """
        self._wall_clock, self._monotonic = wall_clock, monotonic
        self._lock = threading.Lock()  # over the next
        self._refusals: dict[tuple[str, str, str], _Refusals] = {}  # by `what`, reason and host
        self._log = _LOG
        self._file: _AuditFile | None = None
        if path:
            try:
                self._file = _AuditFile(path, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write to --audit-file {path}: {error.strerror}") from error
            self._file.setFormatter(logging.Formatter("%(message)s"))
            self._log = logging.Logger("tandem.audit", logging.INFO)
            self._log.addHandler(self._file)
        self._log.setLevel(logging.INFO)

    def close(self) -> None:
        """Close the file. A process that ends need not: each line is written at once."""
        if self._file is not None:
            self._file.close()

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

    def record_refusal(
        self, *, what: str, origin: str, why: str = "", outcome: str = MemberRefused.reason, **details: object
    ) -> None:
        """Write a line for a peer that showed no key, at most one per second for each `what` and `why` of one host,
        since strangers can be refused at any rate. Beyond 256 of these all others share a line. Each line has the
        number of refusals that were left out before it.
        """
        with self._lock:
            now_s = self._monotonic()
            refusals = self._refusals_of((what, why, origin.rpartition(":")[0] or origin), now_s)  # without the port
            if now_s < refusals.next_s:
                refusals.num_left_out += 1
                return
            left_out, refusals.num_left_out = refusals.num_left_out, 0
            refusals.next_s = now_s + _REFUSAL_EVERY_S
        if why:
            details = {"why": why, **details}
        self.record(who=None, what=what, origin=origin, outcome=outcome, left_out=left_out, **details)

    def _refusals_of(self, key: tuple[str, str, str], now_s: float) -> "_Refusals":
        if key not in self._refusals and len(self._refusals) >= _MAX_SOURCES:
            others = self._refusals.pop(_OTHERS, _Refusals())
            for known in [known for known, refusals in self._refusals.items() if refusals.next_s <= now_s]:
                others.num_left_out += self._refusals.pop(known).num_left_out
            self._refusals[_OTHERS] = others
            key = key if len(self._refusals) < _MAX_SOURCES else _OTHERS
        return self._refusals.setdefault(key, _Refusals())


class _AuditFile(logging.FileHandler):
    """The file of the log. A line that cannot be written, as on a full disk, goes to the process's log."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        problem = error.strerror if isinstance(error, OSError) else repr(error)
        _LOG.error("cannot write to --audit-file %s: %s; the line is: %s", self.baseFilename, problem, record.msg)


@dataclass(slots=True)
class _Refusals:
    next_s: float = -math.inf  # when the next line may be written
    num_left_out: int = 0
