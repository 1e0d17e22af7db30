"""The speed of one worker: fitted models of its prefill, decode and mixed steps and of its hand-offs. Pure.

Workers fit these models to their own steps and send them with every heartbeat; routers predict with them. All times are
the worker's own time for the work, in seconds, without waiting in any queue. Nothing is fitted here.

`StepLimit` is the rule for steps that compute prompts beside running sequences. Workers plan by it, and routers predict
by it.

`ServiceRate` estimates how often a place in a queue becomes free, and from that when a refused client should retry.
"""

import math
from dataclasses import dataclass


def attended_tokens(num_new: int, context: float) -> float:
    """Return how many earlier tokens `num_new` new ones attend to in all, when `context` tokens precede the first.

    The i-th new token, counted from 1, attends to `context + i` tokens, itself included, so the mean is
    `context + (num_new + 1) / 2`. The sum over the chunks of a prompt is that of the prompt in one chunk.
    """
    return num_new * (context + (num_new + 1) / 2)


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step, in the quantities that the models use."""

    num_new: int = 0  # tokens of prompts
    attended: float = 0.0  # the sum of `attended_tokens` over the prompts' chunks
    batch: int = 0  # sequences that decode
    context: int = 0  # the sum of their lengths, the token being computed included

    @property
    def is_mixed(self) -> bool:
        return self.num_new > 0 and self.batch > 0


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A completed step and how long it took, without waiting for work."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """The model of steps that compute prompts: seconds = step_s + per_token_s * new tokens + per_token_context_s * (new
    tokens * their mean context).
    """

    step_s: float
    per_token_s: float
    per_token_context_s: float
    relative_error: float  # the median of |predicted - measured| / measured over recent steps

    def seconds(self, num_new: int, attended: float) -> float:
        return self.step_s + self.per_token_s * num_new + self.per_token_context_s * attended

    def added_s(self, num_new: int, context: float) -> float:
        """Predict the seconds that a chunk after `context` tokens adds to a step that computes prompts anyway."""
        attended = num_new * (context + (num_new + 1) / 2)  # attended_tokens without a call: forecasts ask often
        return self.per_token_s * num_new + self.per_token_context_s * attended

    def tokens_within(self, seconds: float, context: float, most: int) -> int:
        """Return the largest number of tokens, up to `most`, for which `added_s` is at most `seconds`."""
        attended = most * (context + (most + 1) / 2)  # as in `added_s`, without a call
        if self.per_token_s * most + self.per_token_context_s * attended <= seconds:
            return most
        if seconds <= 0:
            return 0
        # added_s is linear * n + square * n * n, and grows with n: it is more than `seconds` at `most`.
        square = self.per_token_context_s / 2
        linear = self.per_token_s + self.per_token_context_s * (context + 0.5)
        found = min(most - 1, int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds))))
        # The quotient is rounded, so the largest number may be the next one or the one before.
        if self.added_s(found + 1, context) <= seconds:
            return found + 1
        return max(0, found - (self.added_s(found, context) > seconds))


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """The model of decode steps: seconds = step_s + per_sequence_s * batch + per_context_token_s * the sum of the
    sequences' lengths.
    """

    step_s: float
    per_sequence_s: float
    per_context_token_s: float
    relative_error: float  # as in PrefillTimes

    def seconds(self, batch: int, context: int) -> float:
        return self.step_s + self.per_sequence_s * batch + self.per_context_token_s * context


@dataclass(frozen=True, slots=True)
class MixedTimes:
    """The model of mixed steps: seconds = factor * (the larger step_s of prefill and decode + all other terms of both),
    and at least the time that either of them takes alone.
    """

    factor: float
    relative_error: float  # as in PrefillTimes


@dataclass(frozen=True, slots=True)
class HandOffTimes:
    """The model of hand-offs: seconds = fixed_s + bytes / `LinkSpeed.bytes_per_s` of the pair."""

    fixed_s: float
    relative_error: float  # of the seconds in all, as in PrefillTimes


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """The models of one worker. Every prediction is at least 0 and never falls when the work grows."""

    prefill: PrefillTimes
    decode: DecodeTimes
    mixed: MixedTimes | None = None  # None: the worker has computed no mixed step yet, and the factor is taken as 1
    hand_off: HandOffTimes | None = None  # None: the worker has imported nothing yet
    # Of the recent steps that compute prompts only, or decode only. None: too few were measured to compare workers.
    typical_prefill: TimedStep | None = None
    typical_decode: TimedStep | None = None

    def relative_errors(self) -> dict[str, float]:
        """Return the relative error of each model that has measured something, by name."""
        errors = {"prefill": self.prefill.relative_error, "decode": self.decode.relative_error}
        if self.mixed is not None:
            errors["mixed"] = self.mixed.relative_error
        if self.hand_off is not None:
            errors["hand_off"] = self.hand_off.relative_error
        return errors

    def prefill_s(self, num_new: int, context: float = 0.0) -> float:
        """Predict a step that computes one chunk of a prompt, `context` tokens of which are in the cache before."""
        return self.seconds(StepWork(num_new=num_new, attended=attended_tokens(num_new, context)))

    def prompt_s(self, num_new: int, context: float, max_chunk: int) -> float:
        """Predict all steps of a prompt that is computed alone, in chunks of `max_chunk` tokens."""
        num_steps = -(-num_new // max_chunk)
        return self.prefill_s(num_new, context) + max(0, num_steps - 1) * self.prefill.step_s

    def step_s(self, batch: int, context: int) -> float:
        """Predict a step in which `batch` sequences with `context` tokens in all decode one token each."""
        return self.seconds(StepWork(batch=batch, context=context))

    def seconds(self, work: StepWork) -> float:
        """Predict any step; 0 if it computes nothing."""
        prefill_s = self.prefill.seconds(work.num_new, work.attended) if work.num_new else 0.0
        decode_s = self.decode.seconds(work.batch, work.context) if work.batch else 0.0
        if not work.is_mixed:
            return prefill_s + decode_s
        factor = self.mixed.factor if self.mixed is not None else 1.0
        return max(prefill_s, decode_s, factor * self.both_s(work))

    def prompts_within_s(self, seconds: float, batch: int, context: int) -> float:
        """Return how many seconds of prompt computation (`PrefillTimes.added_s`) fit into a step of at most `seconds`
        that decodes as in `step_s`. Negative if the step's fixed part alone takes too long.
        """
        prefill_s = seconds
        if batch:
            factor = self.mixed.factor if self.mixed is not None else 1.0
            both_s = seconds / factor if factor else math.inf
            fixed_once_s = min(self.prefill.step_s, self.decode.step_s)
            prefill_s = min(seconds, both_s - self.decode.seconds(batch, context) + fixed_once_s)
        return prefill_s - self.prefill.step_s

    def both_s(self, work: StepWork) -> float:
        """Return the time of a mixed step if its parts added up, with only the larger step_s counted."""
        prefill_s = self.prefill.seconds(work.num_new, work.attended)
        decode_s = self.decode.seconds(work.batch, work.context)
        return prefill_s + decode_s - min(self.prefill.step_s, self.decode.step_s)


QUIET_FACTOR = 1.5
# Steps that take the whole target leave nothing for messages and slower steps, so the mean time between tokens would
# exceed it. Simulated placement keeps up to 23 points more of the requests within their targets with this share.
TARGET_SHARE = 0.75
MIN_PATIENCE_S = 0.25


@dataclass(frozen=True, slots=True)
class StepLimit:
    """How long a step may take that computes prompts beside running sequences.

    A step may take `TARGET_SHARE` of the target, or `QUIET_FACTOR` times the same step without prompts if there is no
    target. A prompt that waits makes the limit grow: once it has waited for as long as it takes to be computed alone
    (its patience, at least `MIN_PATIENCE_S`), prompts get half of the worker's time; after three times as long three
    quarters. So prompts are computed as fast as they arrive wherever the worker can do so at all, and no factor between
    the two has to be tuned.
    """

    target_s: float = 0.0  # for the mean time between tokens; 0: none

    @property
    def target_us(self) -> int:
        return round(1e6 * self.target_s)

    def seconds(self, quiet_s: float, age_s: float, alone_s: float) -> float:
        """Return the limit of a step that takes `quiet_s` without prompts. `age_s`: how long the oldest prompt has
        waited; `alone_s`: how long it takes to be computed alone."""
        limit_s = TARGET_SHARE * self.target_s or QUIET_FACTOR * quiet_s
        patience_s = alone_s if alone_s > MIN_PATIENCE_S else MIN_PATIENCE_S  # without a call: forecasts ask often
        grown_s = quiet_s * (1 + age_s / patience_s) if age_s > 0 else quiet_s
        return grown_s if grown_s > limit_s else limit_s

    def patience_s(self, alone_s: float) -> float:
        """Return how long a prompt waits until prompts get half of the worker's time."""
        return max(alone_s, MIN_PATIENCE_S)


NO_STEP_TARGET = StepLimit()


_SMOOTHING = 0.2
_FIRST_RETRY_S = 1.0  # before the first end
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


class ServiceRate:
    """A running mean of the time between the ends of two requests. Time in which nothing could end does not count."""

    def __init__(self) -> None:
        self._last_end_s: float | None = None
        self._mean_gap_s: float | None = None

    def note_end(self, now_s: float, held_s: float) -> None:
        """Record an end. `held_s`: for how long this request had its place."""
        if self._last_end_s is not None:
            gap_s = max(0.0, min(now_s - self._last_end_s, held_s))
            mean_s = gap_s if self._mean_gap_s is None else self._mean_gap_s
            self._mean_gap_s = mean_s + _SMOOTHING * (gap_s - mean_s)
        self._last_end_s = now_s

    def retry_after_s(self) -> float:
        """Return the expected seconds until the next place becomes free."""
        return bounded_retry_s(_FIRST_RETRY_S if self._mean_gap_s is None else self._mean_gap_s)


def bounded_retry_s(expected_s: float) -> float:
    """Limit a retry delay to 0.1 to 30 s."""
    return min(max(expected_s, _MIN_RETRY_S), _MAX_RETRY_S)
