"""Fits the models of `cluster/service_times.py` to the steps of one worker. Pure.

Three models are fitted: steps that compute prompts only, steps that decode only, and the factor between a step that
does both and the sum of the two. Each step changes its model at once and counts less with every later one (recursive
least squares with forgetting). Errors count relative to the step's time, and no coefficient is negative.

Five rules protect a model:

- A step that took much more or less than predicted counts with a bounded time, so that a pause of the process hardly
  changes the model.
- The first step of a size that was never measured is not counted before the second one if it was slower than predicted,
  and then the quicker one of the two counts: a pause of the process at that step would make the worker seem too slow
  for every step of that size, so it would get no other one that corrects it.
- Five steps in a row that deviate in one direction change the speed of the whole model: a worker that became slower
  is slower for every size of step, also for those that it has not computed since.
- A worker that was slow gets less work, so its model would stay slow after the worker has recovered. After `IDLE_S`
  without a step the worker reports its quickest speed again, and the next steps correct it if it is still slow.
- Sizes are divided into ranges, and every range that was ever measured keeps a small weight. A worker that has decoded
  one sequence for an hour still predicts a batch.

`TypicalSteps` finds the figures that workers are compared by: measured steps, because fits to different sizes of steps
differ where they are extrapolated, however fast the workers are.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, median_low
from typing import TypeAlias

from cluster.service_times import (
    DecodeTimes,
    MixedTimes,
    PrefillTimes,
    ServiceTimes,
    StepWork,
    TimedStep,
    attended_tokens,
)
from engine.scheduling.step import StepPlan
from engine.timing.least_squares import NormalEquations

FORGETTING = 0.97  # per step: about the last thirty count
_SPEED_RUN = 5  # steps in a row, all slower or all quicker than predicted
_SPEED_DEVIATION = 1.25  # by this factor at least
_SPEED_AFTER = 20  # steps; an earlier deviation only shows that the fit has too few steps
_OUTLIER = 3.0  # a step counts as at most this many times its prediction, and at least as this part
_NEW_RANGE_OUTLIER = 10.0  # in a range that was never measured, where the model may be far off
_RANGE_WEIGHT = 0.05  # of a range, in steps
_RANGE_GAIN = 0.3  # of the newest step in its range
_MAX_RANGES = 64
_NUM_ERRORS = 64
_NUM_FACTORS = 15
_MIN_SECONDS = 1e-7
_CONTEXT_DOUBT = 1e-8  # steps of one size do not show what context costs: of short ones next to nothing
IDLE_S = 30.0
_PREFILL_GROUP, _DECODE_GROUP = 4, 32  # steps at least
_GROUP_S = 0.5  # of computed steps at least: on a busy machine shorter means differ by chance
_LEAST_GROUPS, _MOST_GROUPS = 4, 9
_SOLVE_EVERY_S = 0.02  # of computed steps: quick steps must not wait for the fit


class ServiceTimeFit:
    """The models of one worker. It belongs to one thread; any thread may read `times`."""

    def __init__(self) -> None:
        self._prefill, self._decode, self._mixed = _ModelFit(), _ModelFit(), _FactorFit()
        self._typical_prefill, self._typical_decode = TypicalSteps(_PREFILL_GROUP), TypicalSteps(_DECODE_GROUP)
        self._unsolved_s = 0.0
        self.times: ServiceTimes | None = None  # None until a step of each kind was measured
        self._quickest: ServiceTimes | None = None  # the same at the quickest speed so far

    def start(self, at_load: Sequence[TimedStep]) -> None:
        """Begin with steps of both kinds that were timed before the first request."""
        for fit, is_decode in ((self._prefill, False), (self._decode, True)):
            fit.start([_sample(step) for step in at_load if (step.work.batch > 0) is is_decode])
        self._publish()

    def add(self, step: TimedStep) -> None:
        """Add a completed step. A step that computed nothing is ignored."""
        work, seconds = step.work, max(step.seconds, _MIN_SECONDS)
        if work.is_mixed:
            if self.times is not None:
                self._mixed.add(self.times, work, seconds)
        elif work.num_new:
            self._prefill.add(_sample(step))
            self._typical_prefill.add(TimedStep(work, seconds))
        elif work.batch:
            self._decode.add(_sample(step))
            self._typical_decode.add(TimedStep(work, seconds))
        self._unsolved_s += seconds
        if self._unsolved_s >= _SOLVE_EVERY_S or self.times is None:
            self._publish()

    def times_after(self, idle_s: float) -> ServiceTimes | None:
        """Return the models to report after `idle_s` seconds without a step."""
        return self.times if idle_s < IDLE_S else self._quickest

    def _publish(self) -> None:
        self._unsolved_s = 0.0
        prefill, decode = self._prefill.solve(), self._decode.solve()
        if prefill is None or decode is None:
            return
        self.times = self._models(prefill, decode)
        self._quickest = self._models(
            _divided(prefill, self._prefill.slowdown), _divided(decode, self._decode.slowdown)
        )

    def _models(self, prefill: "_Coefficients", decode: "_Coefficients") -> ServiceTimes:
        return ServiceTimes(
            prefill=PrefillTimes(*prefill, self._prefill.relative_error),
            decode=DecodeTimes(*decode, self._decode.relative_error),
            mixed=self._mixed.times,
            typical_prefill=self._typical_prefill.newest,
            typical_decode=self._typical_decode.newest,
        )


def step_work(plan: StepPlan) -> StepWork | None:
    """Return the step's work; None if it also copies blocks between the pool and host memory, whose time depends on
    something else.

    A chunk of one token counts as a decode, also where it ends a prompt. Draft tokens count as sequences of their own:
    each is one more row of the same products.
    """
    if plan.swaps_in or plan.swaps_out:
        return None
    num_new = batch = context = 0
    attended = 0.0
    for chunk in plan.chunks:
        num_tokens = len(chunk.token_ids)
        if num_tokens == 1 + chunk.num_draft_tokens:
            batch += num_tokens
            context += num_tokens * chunk.end
        else:
            num_new += num_tokens
            attended += attended_tokens(num_tokens, chunk.start)
    return StepWork(num_new, attended, batch, context)


_Coefficients: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class _Sample:
    features: tuple[float, float, float]
    size_range: tuple[int, int]  # powers of two
    seconds: float


def _sample(step: TimedStep) -> _Sample:
    work, seconds = step.work, max(step.seconds, _MIN_SECONDS)
    number, total = (work.batch, work.context) if work.batch else (work.num_new, work.attended)
    return _Sample((1.0, number, total), (number.bit_length(), int(total / number).bit_length()), seconds)


class _ModelFit:
    """A fit of seconds = a + b * number + c * total, over recent steps and, with little weight, one mean of every
    range.
    """

    def __init__(self) -> None:
        self._recent = NormalEquations(3)
        self._ranges: OrderedDict[tuple[int, int], NormalEquations] = OrderedDict()
        self._coefficients: _Coefficients | None = None
        self._is_changed = False
        self._num_steps = 0
        self.slowdown = 1.0  # of the present speed, as a factor of the quickest one
        self._run: list[_Sample] = []  # the last steps if all deviate in one direction; the model lacks them yet
        self._held: OrderedDict[tuple[int, int], _Sample] = OrderedDict()  # slow first steps of ranges without a second
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)

    @property
    def relative_error(self) -> float:
        return median(self._errors) if self._errors else 0.0

    def start(self, samples: Sequence[_Sample]) -> None:
        for sample in samples:
            self._record(sample)
        self.solve()
        self._errors.extend(abs(self._predict(sample) - sample.seconds) / sample.seconds for sample in samples)

    def add(self, sample: _Sample) -> None:
        self._num_steps += 1
        predicted_s = self._predict(sample)
        if predicted_s > 0:
            self._errors.append(abs(predicted_s - sample.seconds) / sample.seconds)
        direction = self._direction(sample)
        if self._run and direction != self._direction(self._run[-1]):
            self._end_run()
        if not direction:
            self._record_or_hold(sample)
            return
        self._run.append(sample)
        if len(self._run) == _SPEED_RUN:
            self._change_speed(median(sample.seconds / self._predict(sample) for sample in self._run))
            self._end_run()

    def solve(self) -> _Coefficients | None:
        """Return the coefficients; None before the first step."""
        if self._is_changed:
            equations = NormalEquations(3)
            equations.add_all(self._recent, 1.0)
            for of_range in self._ranges.values():
                equations.add_all(of_range, _RANGE_WEIGHT)
            equations.prefer_zero(2, _CONTEXT_DOUBT)
            fixed, per_number, per_total = equations.solve()
            self._coefficients, self._is_changed = (fixed, per_number, per_total), False
        return self._coefficients

    def _predict(self, sample: _Sample) -> float:
        if self._coefficients is None:
            return 0.0
        fixed, per_number, per_total = self._coefficients
        one, number, total = sample.features
        return fixed * one + per_number * number + per_total * total

    def _direction(self, sample: _Sample) -> int:
        """Return 1 if the step was slower than predicted, -1 if it was quicker, 0 if it was near or tells nothing
        about the speed."""
        if self._num_steps <= _SPEED_AFTER or sample.size_range not in self._ranges:
            return 0
        ratio = sample.seconds / max(self._predict(sample), _MIN_SECONDS)
        return (ratio > _SPEED_DEVIATION) - (ratio < 1 / _SPEED_DEVIATION)

    def _change_speed(self, factor: float) -> None:
        factor = min(max(factor, 1 / _OUTLIER), _OUTLIER)
        for equations in (self._recent, *self._ranges.values()):
            equations.scale_targets(factor)
        assert self._coefficients is not None
        self._coefficients = _divided(self._coefficients, 1 / factor)
        self.slowdown = max(1.0, self.slowdown * factor)

    def _end_run(self) -> None:
        for sample in self._run:
            self._record(sample)
        self._run.clear()

    def _record_or_hold(self, sample: _Sample) -> None:
        predicted_s = self._predict(sample)
        if sample.size_range in self._ranges or not predicted_s:
            self._record(sample)
            return
        first = self._held.pop(sample.size_range, None)
        if first is not None:
            ratio = min(sample.seconds / predicted_s, first.seconds / max(self._predict(first), _MIN_SECONDS))
            self._record(replace(sample, seconds=ratio * predicted_s))
        elif sample.seconds <= _SPEED_DEVIATION * predicted_s:
            self._record(sample)
        else:
            self._held[sample.size_range] = sample
            if len(self._held) > _MAX_RANGES:
                self._held.popitem(last=False)

    def _record(self, sample: _Sample) -> None:
        predicted_s, seconds = self._predict(sample) or sample.seconds, sample.seconds
        bound = _OUTLIER if sample.size_range in self._ranges else _NEW_RANGE_OUTLIER
        seconds = min(max(seconds, predicted_s / bound), predicted_s * bound)
        # Relative to the prediction: weights by the measured time would favour the quick ones among noisy steps.
        weight = max(predicted_s, seconds / 2) ** -2
        self._recent.add(sample.features, seconds, weight, FORGETTING)
        of_range = self._ranges.get(sample.size_range)
        if of_range is None:
            of_range = self._ranges[sample.size_range] = NormalEquations(3)
            of_range.add(sample.features, seconds, weight)
            if len(self._ranges) > _MAX_RANGES:
                self._ranges.popitem(last=False)
        else:
            of_range.add(sample.features, seconds, _RANGE_GAIN * weight, 1 - _RANGE_GAIN)
            self._ranges.move_to_end(sample.size_range)
        self._is_changed = True


def _divided(coefficients: _Coefficients, by: float) -> _Coefficients:
    fixed, per_number, per_total = coefficients
    return fixed / by, per_number / by, per_total / by


class TypicalSteps:
    """The means of groups of consecutive steps. The median one of the last groups is typical: a pause of the process
    changes one group only, and a worker that gets a part of its core now and then is slower in all of them."""

    def __init__(self, least_steps: int) -> None:
        self._size = least_steps  # of a group
        self._group, self._group_s = list[TimedStep](), 0.0
        self._means: deque[TimedStep] = deque(maxlen=_MOST_GROUPS)
        self.newest: TimedStep | None = None  # None: there are fewer than `_LEAST_GROUPS` groups

    def add(self, step: TimedStep) -> None:
        self._group.append(step)
        self._group_s += step.seconds
        if len(self._group) < self._size or self._group_s < _GROUP_S:
            return
        works = [step.work for step in self._group]
        work = StepWork(
            num_new=round(fmean(work.num_new for work in works)),
            attended=fmean(work.attended for work in works),
            batch=round(fmean(work.batch for work in works)),
            context=round(fmean(work.context for work in works)),
        )
        self._means.append(TimedStep(work, fmean(step.seconds for step in self._group)))
        self._group, self._group_s = [], 0.0
        if len(self._means) >= _LEAST_GROUPS:
            self.newest = sorted(self._means, key=lambda mean: mean.seconds)[len(self._means) // 2]


class _FactorFit:
    """A fit of the factor of mixed steps: the median, over recent ones, of their time divided by the sum of prefill and
    decode.
    """

    def __init__(self) -> None:
        # As if two steps had taken the sum: the first ones of a worker may be very slow, and then it gets no others.
        self._factors: deque[float] = deque((1.0, 1.0), maxlen=_NUM_FACTORS)
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)
        self.times: MixedTimes | None = None

    def add(self, known: ServiceTimes, work: StepWork, seconds: float) -> None:
        self._errors.append(abs(known.seconds(work) - seconds) / seconds)
        self._factors.append(seconds / max(known.both_s(work), _MIN_SECONDS))
        self.times = MixedTimes(median_low(self._factors), median(self._errors))
