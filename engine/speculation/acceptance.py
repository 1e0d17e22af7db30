"""How often the guesses of one sequence come true, and how many of them are worth their place in a step. Pure.

With each guess right with probability a, independently, k guesses give (1 - a^(k+1)) / (1 - a) tokens per step
(Leviathan et al. 2023). A step with k guesses costs 1 + k * cost steps without; the best k follows. The cost is what
further rows take beside what a step takes in any case, so it grows with the sequences that share a step.
"""

_MEMORY = 32.0  # guesses after which the past counts a third
_PRIOR_RATE, _PRIOR_WEIGHT = 0.8, 4.0  # a sequence begins well trusted: a wrong guess is cheap, a missing one is not
_REST = 16  # steps without guesses, until one is tried again


class Acceptance:
    """Of one sequence. Forgets slowly: what a text is like changes."""

    def __init__(self, max_guesses: int, fixed_rows: float) -> None:
        """`fixed_rows`: how many rows take as long as all that a step does once, whatever is in it."""
        assert max_guesses >= 0
        self._max_guesses = max_guesses
        self._fixed_rows = fixed_rows
        self._right = _PRIOR_RATE * _PRIOR_WEIGHT
        self._judged = _PRIOR_WEIGHT
        self._resting = 0

    @property
    def rate(self) -> float:
        """The probability that a guess is right, given that those before it were."""
        return self._right / self._judged

    def num_guesses(self, num_sequences: int) -> int:
        """How many to make in the next step, which so many sequences share."""
        if self._resting >= _REST:
            return min(1, self._max_guesses)
        cost = num_sequences / (num_sequences + self._fixed_rows)
        return best_num_guesses(self.rate, self._max_guesses, cost)

    def observe(self, num_guesses: int, num_right: int) -> None:
        """Of a step with guesses. Those behind the first wrong one were not judged: nothing is known of them."""
        assert 0 <= num_right <= num_guesses
        judged = min(num_guesses, num_right + 1)
        kept = (1 - 1 / _MEMORY) ** judged
        self._right = self._right * kept + num_right
        self._judged = self._judged * kept + judged
        if num_guesses:
            self._resting = 0

    def rest(self) -> None:
        """A step went by for which no guess was worth making."""
        self._resting += 1


def tokens_per_step(rate: float, num_guesses: int) -> float:
    """Tokens that a step with so many guesses draws, on average: those that are right, and one more."""
    return float(sum(rate**index for index in range(num_guesses + 1)))


def best_num_guesses(rate: float, max_guesses: int, cost: float) -> int:
    """The number with the most tokens per time; 0 where guessing does not pay. `cost`: of a guess, in steps without."""
    return max(range(max_guesses + 1), key=lambda count: tokens_per_step(rate, count) / (1 + cost * count))
