"""Takes workers of about the same speed as equally fast. Pure.

Every worker fits its service times to a few dozen of its own steps, so those of equal workers differ by chance: by 5 to
20 % where other processes use the same machine. A placement that believes each difference prefers one worker until it
has twice as many sequences as another one, and replays of the recent requests choose the wrong arrangement. With
models that were wrong by 10 % (standard deviation), two simulated workers under `auto` kept 2.6 points fewer of the
requests within their targets than in the better fixed arrangement, and up to 20 in one run; with shared models 1.2.

So workers whose steps of a typical size take about as long share the means of their models. A worker that differs
clearly has its own ones, and between the two its model is a mixture of both, so no small change of a model turns a
decision.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cluster.messages import MemberId
from cluster.service_times import MixedTimes, ServiceTimes, StepWork, TimedStep, attended_tokens

_EQUAL, _OWN = math.log(1.25), math.log(1.5)  # differences up to which the shared model counts alone, and not at all
_LEAST_S = 1e-9  # a worker may report service times of 0
# Steps to compare workers by before they have measured typical ones.
_PREFILL = StepWork(num_new=256, attended=attended_tokens(256, 0.0))
_DECODE = StepWork(batch=8, context=4096)


class Speeds:
    """The service times with which a router predicts, for all its workers. Keeps the latest answer, because placements
    ask more often than workers report."""

    def __init__(self) -> None:
        self._reported: Mapping[MemberId, ServiceTimes] = {}
        self._believed: Mapping[MemberId, ServiceTimes] = {}

    def believed(self, reported: Mapping[MemberId, ServiceTimes]) -> Mapping[MemberId, ServiceTimes]:
        """Return the service times of these workers, given the reported ones."""
        known = self._reported
        if len(known) != len(reported) or any(known.get(member) is not each for member, each in reported.items()):
            self._reported = dict(reported)
            self._believed = dict(zip(reported, shared(list(reported.values())), strict=True))
        return self._believed


def shared(reported: Sequence[ServiceTimes]) -> list[ServiceTimes]:
    """Return the service times of each worker, those of workers of about the same speed taken together."""
    if len(reported) < 2:
        return list(reported)
    prefill = _typical((times.typical_prefill for times in reported), _PREFILL)
    decode = _typical((times.typical_decode for times in reported), _DECODE)
    computing = _shares([times.prefill.seconds(prefill.num_new, prefill.attended) for times in reported])
    decoding = _shares([times.decode.seconds(decode.batch, decode.context) for times in reported])
    models = [(one.prefill.step_s, one.prefill.per_token_s, one.prefill.per_token_context_s) for one in reported]
    prefills = _mixtures(models, computing)
    models = [(one.decode.step_s, one.decode.per_sequence_s, one.decode.per_context_token_s) for one in reported]
    decodes = _mixtures(models, decoding)
    mixed = [one for one, share in zip(reported, decoding, strict=True) if one.mixed is not None and share > 0]
    factor = sum(one.mixed.factor for one in mixed if one.mixed is not None) / len(mixed) if mixed else 1.0
    return [
        replace(
            times,
            prefill=replace(times.prefill, step_s=prefill[0], per_token_s=prefill[1], per_token_context_s=prefill[2]),
            decode=replace(times.decode, step_s=decode[0], per_sequence_s=decode[1], per_context_token_s=decode[2]),
            mixed=_mixed(times.mixed, factor, share) if mixed else times.mixed,
        )
        for times, prefill, decode, share in zip(reported, prefills, decodes, decoding, strict=True)
    ]


def _typical(measured: Iterable[TimedStep | None], default: StepWork) -> StepWork:
    """Return the median work of the measured steps."""
    works = sorted((step.work for step in measured if step is not None), key=lambda work: work.num_new + work.batch)
    return works[len(works) // 2] if works else default


def _shares(seconds: Sequence[float]) -> list[float]:
    """Return for each worker which share of its model is the common one. `seconds`: of the same step at each."""
    middle_s = max(_LEAST_S, sorted(seconds)[(len(seconds) - 1) // 2])
    differences = [abs(math.log(max(_LEAST_S, each) / middle_s)) for each in seconds]
    return [min(1.0, max(0.0, (_OWN - each) / (_OWN - _EQUAL))) for each in differences]


_Model = tuple[float, float, float]


def _mixtures(models: Sequence[_Model], shares: Sequence[float]) -> list[_Model]:
    total = sum(shares)  # at least 1: the worker in the middle
    weighted = [(share, model) for share, model in zip(shares, models, strict=True) if share]
    a, b, c = (sum(share * model[i] for share, model in weighted) / total for i in range(3))
    return [
        (own[0] + share * (a - own[0]), own[1] + share * (b - own[1]), own[2] + share * (c - own[2]))
        for share, own in zip(shares, models, strict=True)
    ]


def _mixed(own: MixedTimes | None, factor: float, share: float) -> MixedTimes | None:
    if own is None:
        return MixedTimes(factor, 0.0) if share == 1.0 else None
    return MixedTimes(own.factor + share * (factor - own.factor), own.relative_error)
