"""The key files of a simulated cluster's hosts, and a rotation of its secret while requests run."""

from collections.abc import Callable
from random import Random

from cluster.auth.keys import ClusterKeys, Secrets
from tests.chaos.simulated.schedules.mix import LOOK_S, Rotation

_FIRST, _NEXT = b"k" * 32, b"n" * 32
_CACHES = Secrets(_FIRST).cache_secret
_STEPS = (  # what a file holds before the rotation and after each of its steps, as `tandem keys rotate` writes it
    Secrets(_FIRST),
    Secrets(_FIRST, other=_NEXT, caches=_CACHES),
    Secrets(_NEXT, other=_FIRST, caches=_CACHES),
    Secrets(_NEXT, caches=_CACHES),
)
_URGENT_LOOK_S = 0.05  # where it meets the id of a secret that it does not have


class KeyFiles:
    """The files of one world. Each step of the rotation reaches the hosts one after the other."""

    def __init__(self, rotation: Rotation | None, seed: int, now_s: Callable[[], float]) -> None:
        """`now_s`: the simulated time."""
        self._rotation, self._seed, self._now_s = rotation, seed, now_s
        self._begins_s = float("inf")

    def begin(self) -> None:
        """Let the rotation's times count from now on."""
        self._begins_s = self._now_s()

    @property
    def may_have_dropped(self) -> bool:
        """Return whether a host may have dropped the first secret, and with it the acceptances that it signed."""
        return self._rotation is not None and self._now_s() >= self._begins_s + self._rotation.steps_s[-1]

    def keys(self, place: str) -> ClusterKeys:
        """Return the keys of a process that starts at this place."""
        return _Reader(self, place).keys

    def at(self, place: str) -> Secrets:
        """Return what the file at this place holds now."""
        return _STEPS[self.step(place)]

    def step(self, place: str) -> int:
        """Return how many steps of the rotation have reached this place."""
        if (rotation := self._rotation) is None:
            return 0
        now_s, dice = self._now_s() - self._begins_s, Random(f"{self._seed} key file of {place}")
        return sum(now_s >= at_s + rotation.spread_s * dice.random() for at_s in rotation.steps_s)

    def now_s(self) -> float:
        return self._now_s()


class _Reader:
    """One process's keys, which follow its file."""

    def __init__(self, files: KeyFiles, place: str) -> None:
        self._files, self._place = files, place
        self._step, self._looked_s = files.step(place), files.now_s()
        self.keys = ClusterKeys(files.at(place), self._changed)

    def _changed(self, is_urgent: bool) -> Secrets | None:
        now_s = self._files.now_s()
        if now_s < self._looked_s + (_URGENT_LOOK_S if is_urgent else LOOK_S):
            return None
        self._looked_s, before = now_s, self._step
        self._step = self._files.step(self._place)
        return self._files.at(self._place) if self._step > before else None
