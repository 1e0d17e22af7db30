"""Draw lengths of prompts and answers as in a conversation service. Pure; randomness is an argument.

The lengths follow quantiles in steps of 5 % (the last step divided at 99 %) of the 19,366 conversation requests of the
Azure LLM inference trace 2023 (Patel et al., "Splitwise", ISCA 2024). Both lengths are drawn independently: in the
trace they are hardly correlated (-0.11).
"""

from bisect import bisect
from random import Random

_SHARES = (*(step / 20 for step in range(20)), 0.99, 1.0)
_PROMPT = (
    2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1_020, 1_045, 1_071, 1_097, 1_130, 1_189, 1_315, 1_876, 2_734,
    4_083, 4_142, 14_050,
)  # fmt: skip
_OUTPUT = (7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 601, 1_000)


def draw_lengths(random: Random) -> tuple[int, int]:
    """Return the tokens of a prompt and of its answer."""
    return _drawn(_PROMPT, random), _drawn(_OUTPUT, random)


def _drawn(quantiles: tuple[int, ...], random: Random) -> int:
    """Draw from the quantiles, uniformly within a step."""
    share = random.random()
    step = bisect(_SHARES, share) - 1
    low, high = quantiles[step], quantiles[step + 1]
    return round(low + (high - low) * (share - _SHARES[step]) / (_SHARES[step + 1] - _SHARES[step]))
