"""What has failed, in a row, for choices of one request that go their way together.

Owns how many tries that has cost, and tells of each failure wherever it must be known: the request's ledger, the fleet,
the counters, the log. Never tries again itself.
"""

import logging

from cluster.observe.telemetry import Telemetry
from router.fleet.fleet import Fleet
from router.pipeline.failures import AttemptFailed
from router.request.live_request import LiveRequest

_LOG = logging.getLogger("tandem.router.setbacks")


class Setbacks:
    def __init__(self, live: LiveRequest, *, max_attempts: int, fleet: Fleet, telemetry: Telemetry) -> None:
        """`max_attempts`: in a row without a token from decode."""
        self._live = live
        self._max_attempts = max_attempts
        self._fleet = fleet
        self._telemetry = telemetry
        self._tries = 0

    @property
    def is_enough(self) -> bool:
        """No try is left."""
        return self._tries >= self._max_attempts

    @property
    def leaves_one_try(self) -> bool:
        return 0 < self._tries == self._max_attempts - 1

    def leave_two_tries(self, failure: AttemptFailed) -> bool:
        """Also after this one: the last try does without a hand-off, so one more of those may be made."""
        return self._tries + _cost(failure) < self._max_attempts - 1

    def note(self, failure: AttemptFailed) -> None:
        self._tries += _cost(failure)
        self._live.failed(failure.name, failure.member)
        self._telemetry.count("tandem_retries_total", leg=failure.leg, reason=failure.reason)
        if failure.is_leaving:
            self._fleet.leave(failure.member, 0.0)
        if failure.is_too_small:
            self._live.too_small.add(failure.member)
        if failure.is_of_pair:
            self._fleet.doubt(failure.member)  # one of the two may be gone; if not, the pair is to blame
        fields = {"request_id": self._live.request_id, "reason": failure.name}
        _LOG.warning("attempt failed: %s", failure, extra=fields)

    def note_hedged(self, name: str, failure: AttemptFailed | None) -> None:
        """A hedge has the choices. `failure`: of the line before; None: its worker was only suspect."""
        if failure is not None:
            self.note(failure)
        self._live.ledger.reason(name)

    def forgive(self) -> None:
        """What was noted last has led to another failure, of its own kind: one try for both."""
        self._tries = max(0, self._tries - 1)

    def forget(self) -> None:
        """Decode has worked: what fails from now on begins a new row."""
        self._tries = 0


def _cost(failure: AttemptFailed) -> int:
    """Where a worker takes no new work, or is too small for the request, nothing was tried."""
    return 0 if failure.is_leaving or failure.is_too_small else 1
