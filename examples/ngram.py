"""An n-gram model with interpolated modified Kneser-Ney smoothing: the baseline for the demo model.

Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling" (1998), section 4.1.6. N-grams are
base-`vocab_size` numbers in sorted arrays, so counting is `np.unique` and look-up is a bisection.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class KneserNey:
    """p(token | the order - 1 tokens before it), from one stream of ids."""

    def __init__(self, tokens: Ids, *, order: int, vocab_size: int) -> None:
        if vocab_size**order >= 2**63:
            raise ValueError(f"{order}-grams over {vocab_size} tokens do not fit a 64-bit key")
        self._order = order
        self._vocab_size = vocab_size
        grams, counts = np.unique(_keys(tokens, order, vocab_size), return_counts=True)
        self._tables = [_table(grams, counts, vocab_size)]
        for shorter in range(order - 1, 0, -1):
            # A lower order counts in how many different contexts a gram was seen, not how often.
            grams, counts = np.unique(grams % vocab_size**shorter, return_counts=True)
            self._tables.insert(0, _table(grams, counts, vocab_size))

    def log_probs(self, tokens: Ids) -> Floats:
        """Return the natural log-probability of each token with a full context: `[tokens]` -> `[tokens - order +
        1]`."""
        keys = _keys(tokens, self._order, self._vocab_size)
        p = np.full(len(keys), 1.0 / self._vocab_size)
        for length, table in enumerate(self._tables, start=1):
            p = table.interpolate(keys % self._vocab_size**length, p)
        logs: Floats = np.log(p)
        return logs


@dataclass(frozen=True, slots=True)
class _Table:
    """The tables of one order: `share` is a gram's discounted share of its context, `backoff` the context's weight of
    the lower order."""

    vocab_size: int
    grams: Ids  # [grams], sorted
    share: Floats  # [grams]
    contexts: Ids  # [contexts], sorted
    backoff: Floats  # [contexts]

    def interpolate(self, keys: Ids, lower: Floats) -> Floats:
        backoff = _look_up(self.contexts, self.backoff, keys // self.vocab_size, missing=1.0)
        return _look_up(self.grams, self.share, keys, missing=0.0) + backoff * lower


def _keys(tokens: Ids, order: int, vocab_size: int) -> Ids:
    windows = np.lib.stride_tricks.sliding_window_view(tokens, order)  # [tokens - order + 1, order]
    powers = vocab_size ** np.arange(order - 1, -1, -1, dtype=np.int64)
    keys: Ids = windows @ powers
    return keys


def _table(grams: Ids, counts: Ids, vocab_size: int) -> _Table:
    discount = _discounts(counts)[np.minimum(counts, 3)]  # [grams]
    contexts, first = np.unique(grams // vocab_size, return_index=True)
    total = np.add.reduceat(counts, first)  # [contexts]
    per_gram = np.repeat(total, np.diff(np.append(first, len(grams))))  # [grams]
    return _Table(
        vocab_size=vocab_size,
        grams=grams,
        share=(counts - discount) / per_gram,
        contexts=contexts,
        backoff=np.add.reduceat(discount, first) / total,
    )


def _discounts(counts: Ids) -> Floats:
    """Return the discounts of grams that were seen 0, 1, 2, or 3 and more times (Chen and Goodman, equation 26)."""
    seen = [int(np.count_nonzero(counts == times)) for times in range(1, 5)]
    if min(seen) == 0:
        return np.array([0.0, 0.5, 0.5, 0.5])  # too little text to estimate from
    y = seen[0] / (seen[0] + 2 * seen[1])
    found = [times - (times + 1) * y * seen[times] / seen[times - 1] for times in (1, 2, 3)]
    clipped: Floats = np.clip(np.array([0.0, *found]), 0.0, [0.0, 1.0, 2.0, 3.0])
    return clipped


def _look_up(keys: Ids, values: Floats, wanted: Ids, *, missing: float) -> Floats:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found: Floats = np.where(keys[at] == wanted, values[at], missing)
    return found
