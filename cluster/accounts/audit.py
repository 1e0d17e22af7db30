"""The audit log: a line of JSON for each call of an administrator, refused or not, and for each refused member."""

import json
import logging
import time
from collections.abc import Callable

from cluster.accounts.keys import Caller
from cluster.errors import ConfigError

_LOG = logging.getLogger("tandem.audit")


class Audit:
    def __init__(self, path: str = "", *, wall_clock: Callable[[], float] = time.time) -> None:
        """Open the file at `path` for appending; empty: lines go to the process's log, whatever its level. Raises
        ConfigError.
        """
        self._wall_clock = wall_clock
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
