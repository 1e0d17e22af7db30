"""How many draft tokens the next step of a sequence gets, from the share accepted so far. Pure.

If each draft token is accepted with probability a, independently, k of them yield (1 - a^(k+1)) / (1 - a) tokens per
step (Leviathan et al. 2023). The step then takes 1 + k * cost times as long as without any. The best k follows. The
cost is that of one more row against the whole step, so it grows with the number of sequences in the step.
"""

_MEMORY = 32.0  # after this many draft tokens an observation weighs a third
_PRIOR_RATE, _PRIOR_WEIGHT = 0.8, 4.0  # high, because a rejected draft token costs less than a missed one would save
_REST = 16  # steps without draft tokens, until one is tried again


class Acceptance:
    """The acceptance rate of one sequence, with old observations weighing less."""

    def __init__(self, max_draft_tokens: int, fixed_rows: float) -> None:
        """`fixed_rows` is the fixed part of a step's time, as a number of rows (`step_cost.py`)."""
        assert max_draft_tokens >= 0
        self._max_draft_tokens = max_draft_tokens
        self._fixed_rows = fixed_rows
        self._right = _PRIOR_RATE * _PRIOR_WEIGHT
        self._judged = _PRIOR_WEIGHT
        self._resting = 0

    @property
    def rate(self) -> float:
        """The estimated probability that a draft token is accepted, given that those before it were."""
        return self._right / self._judged

    def num_draft_tokens(self, num_sequences: int) -> int:
        """Return how many draft tokens to propose for a step in which `num_sequences` sequences decode."""
        if self._resting >= _REST:
            return min(1, self._max_draft_tokens)
        cost = num_sequences / (num_sequences + self._fixed_rows)
        return best_num_draft_tokens(self.rate, self._max_draft_tokens, cost)

    def observe(self, num_draft_tokens: int, num_right: int) -> None:
        """Record a step in which the first `num_right` draft tokens were accepted.

        Only one more was compared: draft tokens after the first rejected one count neither way.
        """
        assert 0 <= num_right <= num_draft_tokens
        judged = min(num_draft_tokens, num_right + 1)
        kept = (1 - 1 / _MEMORY) ** judged
        self._right = self._right * kept + num_right
        self._judged = self._judged * kept + judged
        if num_draft_tokens:
            self._resting = 0

    def rest(self) -> None:
        """Record a step that got no draft tokens because none would have paid."""
        self._resting += 1


def tokens_per_step(rate: float, num_draft_tokens: int) -> float:
    """Return the expected tokens of a step with `num_draft_tokens` draft tokens: the accepted ones and one more."""
    return float(sum(rate**index for index in range(num_draft_tokens + 1)))


def best_num_draft_tokens(rate: float, max_draft_tokens: int, cost: float) -> int:
    """Return the number of draft tokens with the most tokens per second; 0 if speculation does not pay.

    `cost` is the time of one draft token as a share of a step without any.
    """
    return max(range(max_draft_tokens + 1), key=lambda count: tokens_per_step(rate, count) / (1 + cost * count))
