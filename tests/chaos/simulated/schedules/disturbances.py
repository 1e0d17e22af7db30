"""What tests do to a request after each of its tokens, in one simulated run each."""

from collections.abc import Callable

from tests.chaos.simulated.schedules.mishaps import Kind, Mishap, Phase
from tests.chaos.simulated.world import Result

# By name: the kind, the role of the victim, and the time after which another process takes its name.
_DISTURBANCES = {
    "decode worker killed": (Kind.KILL, "decode", 1.0),
    "decode worker drained": (Kind.DRAIN, "decode", 8.0),
    "moved to another decode worker": (Kind.MOVE, "decode", 0.0),
    "resumed at another router": (Kind.KILL, "router", 1.0),
}
DISTURBANCES = tuple(_DISTURBANCES)


def after_token(disturbance: str, occurrence: int) -> Mishap:
    """Return the disturbance after the decode worker has sent its token with this number, from 0."""
    kind, role, for_s = _DISTURBANCES[disturbance]
    return Mishap(kind, role, 0, 0.0, for_s, Phase.DECODING, occurrence)


def disturb_after_every_token(disturbance: str, run: Callable[[Mishap], Result]) -> int:
    """Run once for each token that a decode worker sends, and assert that no run changes an answer. Returns the number
    of runs with a disturbance. `run`: runs a schedule with one mishap.
    """
    num_hit = 0
    while True:
        result = run(after_token(disturbance, num_hit))
        assert not result.violations, f"{num_hit}: {result.violations}"
        assert result.outcomes["ok"] == 1
        if not result.hit:
            return num_hit
        num_hit += 1
