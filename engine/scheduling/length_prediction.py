"""Predicts how many tokens a sequence will have generated when it ends. Pure: learns from sequences that ended.

Owns the statistics of past lengths, per tenant and length of prompt. For every kind of sequence it counts how many
reached a length and how many ended there by a stop; a sequence that was cut off, by max_tokens or its client, counts
only up to its length (the product-limit estimate: Kaplan and Meier, 1958). The prediction is the length that a sequence
with its present number of tokens will not exceed with a given probability: a sequence that exceeds its prediction is
compared with those that did the same. Never decides how a prediction is used.
"""

from array import array
from collections import OrderedDict
from math import ceil, log2

_BINS_PER_DOUBLING = 4  # a bin's upper edge is at most 19 % above its lower one
_NUM_BINS = 20 * _BINS_PER_DOUBLING + 1  # up to 2^20 tokens; longer ones are in the last
_MAX_TENANTS = 256
_MIN_SEEN = 7.0  # sequences of a kind before its statistics are used; until then those of a wider kind are
_KEEP = 0.998  # a count keeps this share of its weight with each sequence that ends: about the last 500 count


class LengthPredictor:
    """Predicts output lengths from finished sequences; `quantile` is the share that should end within their
    prediction."""

    def __init__(self, quantile: float = 0.5) -> None:
        assert 0 < quantile < 1
        self._quantile = quantile
        self._tenants: OrderedDict[str, dict[int, _Lifetimes]] = OrderedDict()  # least recently observed first
        self._everyone: dict[int, _Lifetimes] = {}

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def predict(self, tenant: str, num_prompt: int, num_output: int, max_tokens: int) -> int:
        """Return the predicted output tokens, existing ones included: more than `num_output` (which is below
        `max_tokens`) and at most `max_tokens`; 0 without any observation."""
        kinds = self._tenants.get(tenant, {})
        for lifetimes in (
            kinds.get(_prompt_bucket(num_prompt)),
            kinds.get(_ANY),
            self._everyone.get(_prompt_bucket(num_prompt)),
            self._everyone.get(_ANY),
        ):
            if lifetimes is not None and lifetimes.num_seen >= _MIN_SEEN:
                return min(lifetimes.quantile(self._quantile, num_output), max_tokens)
        return 0

    def observe(self, tenant: str, num_prompt: int, num_output: int, *, was_cut: bool) -> None:
        """Record a finished sequence. With `was_cut` it did not end by itself and would have continued."""
        if num_output < 1:
            return
        kinds = self._tenants.setdefault(tenant, {})
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        for known in (kinds, self._everyone):
            for bucket in (_prompt_bucket(num_prompt), _ANY):
                known.setdefault(bucket, _Lifetimes()).add(num_output, was_cut=was_cut)


_ANY = -1  # prompts of any length


def _prompt_bucket(num_prompt: int) -> int:
    """Return the bucket b of prompts of 2^(b-1) to 2^b - 1 tokens, which share a prediction."""
    return num_prompt.bit_length()


class _Lifetimes:
    """Counts by bin of output length: the sequences that reached it, and those that ended in it by themselves."""

    def __init__(self) -> None:
        self._reached = array("d", bytes(8 * _NUM_BINS))
        self._ended = array("d", bytes(8 * _NUM_BINS))

    @property
    def num_seen(self) -> float:
        return self._reached[0]

    def add(self, num_tokens: int, *, was_cut: bool) -> None:
        last = _bin(num_tokens)
        for place in range(_NUM_BINS):
            self._reached[place] *= _KEEP
            self._ended[place] *= _KEEP
        # A sequence that was cut off gives no information about the rest of its bin.
        for place in range(last if was_cut else last + 1):
            self._reached[place] += 1.0
        if not was_cut:
            self._ended[last] += 1.0

    def quantile(self, share: float, num_tokens: int) -> int:
        """The length within which this share of those that have more than `num_tokens` end."""
        surviving = 1.0
        for place in range(_bin(num_tokens + 1), _NUM_BINS):
            if not self._reached[place]:  # no observed output is as long: predict twice the length
                return max(_upper_edge(place), 2 * (num_tokens + 1))
            surviving *= 1.0 - self._ended[place] / self._reached[place]
            if surviving <= 1.0 - share:
                return max(_upper_edge(place), num_tokens + 1)
        return 2 * (num_tokens + 1)


def _bin(num_tokens: int) -> int:
    """Return the bin of a length: bin 0 holds 1 token, bin b those up to 2^(b / _BINS_PER_DOUBLING)."""
    return min(ceil(log2(num_tokens) * _BINS_PER_DOUBLING), _NUM_BINS - 1)


def _upper_edge(place: int) -> int:
    return int(2 ** (place / _BINS_PER_DOUBLING))
