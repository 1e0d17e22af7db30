"""Which blocks of a hand-off are compared with the exporter's digests. Pure; the dice are given.

`all`: every block that is read. `sample`: one in 16, drawn anew for each hand-off so that nobody can tell which, and
never none of what is read. `off`: none. The lease and the settle guard a hand-off in every mode.
"""

import random
from enum import StrEnum

SAMPLE_SHARE = 16  # one block in so many


class VerifyMode(StrEnum):
    """Of --kv-verify."""

    ALL = "all"
    SAMPLE = "sample"
    OFF = "off"

    @property
    def warning(self) -> str:
        """What is not verified, for the log; empty when everything is."""
        match self:
            case VerifyMode.ALL:
                return ""
            case VerifyMode.SAMPLE:
                return (
                    f"--kv-verify sample: of the KV blocks read, only one in {SAMPLE_SHARE} is verified by its digest"
                )
            case VerifyMode.OFF:
                return "--kv-verify off: no KV block is verified by its digest, and none that is read here can be"


def unverified_places(
    mode: VerifyMode, *, num_cached: int, num_sealed: int, num_blocks: int, dice: random.Random
) -> frozenset[int]:
    """Places of a hand-off whose digest is not looked at. Those that are cached are not read and do not count."""
    if mode is VerifyMode.ALL:
        return frozenset()
    places = frozenset(range(num_blocks))
    if mode is VerifyMode.OFF:
        return places
    # A tail may turn out to be needless; a sealed block that is not cached is always read.
    sealed = range(num_cached, num_sealed)
    tails = range(num_sealed, num_blocks)
    drawn = set(dice.sample(sealed, -(-len(sealed) // SAMPLE_SHARE)))
    drawn.update(place for place in tails if not sealed or dice.randrange(SAMPLE_SHARE) == 0)
    return places - drawn
