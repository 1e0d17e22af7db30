"""Takes workers of about the same speed as equally fast. Pure.

Every worker fits its service times to a few dozen of its own steps, so those of equal workers differ by chance: by 5 to
20 % where other processes use the same machine. A placement that believes each difference prefers one worker until it
has twice as many sequences as another one, and replays of the recent requests choose the wrong arrangement. With
models that were wrong by 10 % (standard deviation), two simulated workers under `auto` kept 2.6 points fewer of the
requests within their targets than in the better fixed arrangement, and up to 20 in one run; with shared models 1.2.

So workers whose steps of a typical size take about as long share the means of their models. A worker that differs
clearly has its own ones, and between the two its model is a mixture of both, so no small change of a model turns a
decision. Until a worker has measured typical steps it knows only a few from its start, which others that started
beside it may have made slower: then it must be slower by more.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from cluster.messages import MemberId
from cluster.service_times import (
    DecodeTimes,
    MixedTimes,
    PrefillTimes,
    ServiceTimes,
    StepWork,
    TimedStep,
    attended_tokens,
)

_EQUAL, _OWN = math.log(1.25), math.log(1.5)  # differences up to which the shared model counts alone, and not at all
_NEW = 3.0  # times these differences, for a slower worker without typical steps
_INTERVAL_S = 0.5
_LEAST_S = 1e-9  # a worker may report service times of 0
# Steps to compare workers by before they have measured typical ones.
_PREFILL = StepWork(num_new=256, attended=attended_tokens(256, 0.0))
_DECODE = StepWork(batch=8, context=4096)


class Speeds:
    """The service times with which a router predicts, for all its workers. They are computed again when a worker joins
    or leaves, and after reports at most every `_INTERVAL_S`: they take about 20 us per worker.
    """

    def __init__(self) -> None:
        self._reported: Mapping[MemberId, ServiceTimes] = {}
        self._believed: Mapping[MemberId, ServiceTimes] = {}
        self._computed_s = -math.inf

    def believed(self, reported: Mapping[MemberId, ServiceTimes], now_s: float) -> Mapping[MemberId, ServiceTimes]:
        """Return the service times of these workers, given the reported ones."""
        if reported.keys() != self._reported.keys() or (
            now_s - self._computed_s >= _INTERVAL_S
            and any(self._reported[member] is not times for member, times in reported.items())
        ):
            self._reported, self._computed_s = dict(reported), now_s
            self._believed = dict(zip(reported, shared(list(reported.values())), strict=True))
        return self._believed


def shared(reported: Sequence[ServiceTimes]) -> list[ServiceTimes]:
    """Return the service times of each worker, those of workers of about the same speed taken together."""
    if len(reported) < 2:
        return list(reported)
    prefills = [(one.prefill.step_s, one.prefill.per_token_s, one.prefill.per_token_context_s) for one in reported]
    decodes = [(one.decode.step_s, one.decode.per_sequence_s, one.decode.per_context_token_s) for one in reported]
    computing = _Shares.of(prefills, [one.typical_prefill for one in reported], _PREFILL)
    decoding = _Shares.of(decodes, [one.typical_decode for one in reported], _DECODE)
    models = zip(computing.mixtures(prefills), decoding.mixtures(decodes), _mixed(reported, decoding), strict=True)
    return [
        ServiceTimes(
            PrefillTimes(*prefill, times.prefill.relative_error),
            DecodeTimes(*decode, times.decode.relative_error),
            mixed,
            times.hand_off,
            times.typical_prefill,
            times.typical_decode,
        )
        for times, (prefill, decode, mixed) in zip(reported, models, strict=True)
    ]


_Model: TypeAlias = tuple[float, float, float]


class _Shares(NamedTuple):
    """How much workers have in common, each from 0 to 1."""

    in_mean: Sequence[float]  # weights of their models in the mean
    of_mean: Sequence[float]  # shares of the mean in their models; the rest is their own one

    @staticmethod
    def of(models: Sequence[_Model], typical: Sequence[TimedStep | None], default: StepWork) -> "_Shares":
        """Compare workers by the median of their typical steps."""
        works = sorted((step.work for step in typical if step is not None), key=lambda work: work.num_new + work.batch)
        work = works[len(works) // 2] if works else default
        number, total = (work.batch, work.context) if work.batch else (work.num_new, work.attended)
        seconds = [max(_LEAST_S, fixed + a * number + b * total) for fixed, a, b in models]
        middle_s = sorted(seconds)[(len(seconds) - 1) // 2]
        differences = [math.log(each / middle_s) for each in seconds]
        counted = [
            each / _NEW if each > 0 and step is None else each for each, step in zip(differences, typical, strict=True)
        ]
        return _Shares([*map(_share, differences)], [*map(_share, counted)])

    def mixtures(self, models: Sequence[_Model]) -> list[_Model]:
        total = sum(self.in_mean)  # at least 1: of the worker in the middle
        weighted = [(weight, model) for weight, model in zip(self.in_mean, models, strict=True) if weight]
        a, b, c = (sum(weight * model[i] for weight, model in weighted) / total for i in range(3))
        return [
            (own[0] + share * (a - own[0]), own[1] + share * (b - own[1]), own[2] + share * (c - own[2]))
            for share, own in zip(self.of_mean, models, strict=True)
        ]


def _share(difference: float) -> float:
    return min(1.0, max(0.0, (_OWN - abs(difference)) / (_OWN - _EQUAL)))


def _mixed(reported: Sequence[ServiceTimes], shares: _Shares) -> Sequence[MixedTimes | None]:
    """Return the factors of mixed steps. A worker that has computed none gets that of the others."""
    models = [one.mixed for one in reported]
    known = [(weight, one.factor) for weight, one in zip(shares.in_mean, models, strict=True) if weight and one]
    if not known:
        return models
    mean = sum(weight * factor for weight, factor in known) / sum(weight for weight, _ in known)
    return [
        MixedTimes(one.factor + share * (mean - one.factor), one.relative_error)
        if one is not None
        else (MixedTimes(mean, 0.0) if share == 1.0 else None)
        for one, share in zip(models, shares.of_mean, strict=True)
    ]
