"""Admission control, and the early refusal of requests that would be served too late. Pure.

The early refusal uses the same predictions as placement: of the time when the prefill will have ended, with all work
that was sent to the workers before. So a burst is not admitted because the requests before it have not reached decode,
and the requests after it are not refused because of sequences that will have ended by then.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.errors import Overloaded, QueueFull, SloUnattainable
from cluster.service_times import ServiceRate, bounded_retry_s
from router.policies.candidates import (
    NO_TARGETS,
    Pair,
    RequestFacts,
    WorkerLoad,
    has_room,
    promising,
    rough_first_token_s,
)
from router.policies.prediction.latency import Predict, Prediction, predict_all


@dataclass(frozen=True, slots=True)
class TenantPlaces:
    """The places of the request's tenant, its weight, and the weights of the other tenants that occupy places."""

    num_live: int
    weight: int
    other_weights: int


_RESERVED_PART = 8  # an eighth of the places is kept for tenants below their share
_NEWCOMER_WEIGHT = 1
_SURE_PART = 8  # a first token that is roughly estimated within this part of the time left is in time


class AdmissionControl:
    """The admission of requests: at most `max_live_requests` are live at once; each choice of a request counts as one.

    A request occupies its places before any work is spent on it, tokenizing included, until its client has left.
    """

    def __init__(self, max_live_requests: int) -> None:
        self._max_live_requests = max_live_requests
        self._rate = ServiceRate()

    def set_limit(self, max_live_requests: int) -> None:
        """Change the bound. Requests that are live above a lower one stay."""
        self._max_live_requests = max_live_requests

    def check_place(
        self, num_live: int, num_new: int = 1, *, takes_over: bool = False, tenant: TenantPlaces | None = None
    ) -> None:
        """Raise Overloaded where `num_new` places are not free. An idle router accepts a request of any size. A request
        that takes over a live stream ends it, which frees that stream's places, so up to `max_live_requests` more may
        do so at once. `tenant`: the last eighth of the places is for tenants that have less than their share by weight,
        so that no tenant keeps all others out.
        """
        most = self._max_live_requests * (2 if takes_over else 1)
        if num_live + min(num_new, most) > most:
            raise self._refusal(f"{num_live} requests are being served, each choice counted, and the maximum is {most}")
        if tenant is None or num_live + num_new <= most - most // _RESERVED_PART or not tenant.num_live:
            return
        share = most * tenant.weight / (tenant.weight + tenant.other_weights + _NEWCOMER_WEIGHT)
        if tenant.num_live + num_new > share:
            raise self._refusal(f"{tenant.num_live} requests of this tenant are being served, more than its share")

    def _refusal(self, problem: str) -> Overloaded:
        return Overloaded(f"{problem}; try again", retry_after_s=self._rate.retry_after_s())

    def record_end(self, now_s: float, held_s: float) -> None:
        """Record that a place, which was held for this long, became free: `retry_after_s` follows the rate at which
        places become free."""
        self._rate.note_end(now_s, held_s)


def early_refusal(
    prefills: Sequence[WorkerLoad],
    decodes: Sequence[WorkerLoad],
    ways: Callable[[], Sequence[Pair]],
    request: RequestFacts,
    time_left_s: float,
    predict: Predict = predict_all,
) -> Overloaded | None:
    """Return why a new request should be refused before any worker is asked; None: it should not. `ways` returns the
    pairs from which placement will choose. Without one, or while the speed of a worker is not known, the request waits.
    Full queues of one pool refuse where no way does without it.
    `predict`: predicts the request, now and as if it were sent later.

    Only the deadline and the targets in `request`, which its client asked for, refuse. Those of the whole cluster
    never do."""
    fitting = list(filter(request.fits_prefill, prefills)), list(filter(request.fits_decode, decodes))
    for pool, loads in zip(("prefill", "decode"), fitting, strict=True):
        full_for_s = [load.full_for_s.get(request.tenant.label, 0.0) for load in loads]
        if loads and min(full_for_s) > 0 and not any(has_room(way, request) for way in ways()):
            return QueueFull(
                f"the queues of all {len(loads)} {pool} workers are full; try again",
                retry_after_s=bounded_retry_s(min(full_for_s)),
            )
    if request.targets == NO_TARGETS and _is_surely_in_time(*fitting, request, time_left_s):
        return None
    few = promising(ways(), request)
    known = predict(few, request)
    if not known:
        return None
    late = _late(min(prediction.ttft_s for prediction in known), time_left_s)
    return late or _missed_targets(few, request, known, predict)


def _is_surely_in_time(
    prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts, time_left_s: float
) -> bool:
    """Return whether a worker that may compute the prompt needs no forecast to be in time with the first token."""
    known = (load for load in prefills or decodes if load.work is not None)
    return any(
        _SURE_PART * rough_first_token_s(load, request, is_export=bool(prefills)) <= time_left_s for load in known
    )


def _late(ttft_s: float, time_left_s: float) -> Overloaded | None:
    if ttft_s <= time_left_s:
        return None
    return Overloaded(
        f"the first token is predicted in {ttft_s:.3g} s, prompts ahead of this one included, and its deadline is in"
        f" {time_left_s:.3g} s; allow more, or try again",
        retry_after_s=bounded_retry_s(ttft_s - time_left_s),
    )


_RETRY_STEPS_S = tuple(0.1 * 1.25**number for number in range(26))  # up to 26 s


def _missed_targets(
    ways: Sequence[Pair], request: RequestFacts, predictions: Sequence[Prediction], predict: Predict
) -> SloUnattainable | None:
    """Return why no way keeps all targets of the request; None if one does. The retry time is the earliest at which one
    is predicted to; none if even idle workers are too slow."""
    if request.targets == NO_TARGETS or _is_kept(request, predictions):
        return None
    retry_after_s = _retry_s(ways, request, predict)
    ttft_s, itl_s = min(p.ttft_s for p in predictions), min(p.itl_s for p in predictions)
    targets = request.targets
    misses = [
        f"{name} is predicted to be {predicted_s:.3g} s at best, the request asks for {target_s:.3g} s"
        for name, predicted_s, target_s in (
            ("the time to first token", ttft_s, targets.ttft_s),
            ("the time between tokens", itl_s, targets.itl_s),
        )
        if predicted_s > target_s
    ]
    problem = "; ".join(misses) or "no worker is predicted to keep both latency targets"
    advice = "allow more, or try again" if retry_after_s is not None else "allow more"
    return SloUnattainable(f"{problem}; {advice}", retry_after_s=retry_after_s)


def _retry_s(ways: Sequence[Pair], request: RequestFacts, predict: Predict) -> float | None:
    """Return the first of `_RETRY_STEPS_S` after which a way is predicted to keep the targets; None if none does.

    Found by bisection, because work only becomes less while nothing arrives: a request with targets that cannot be kept
    costs the router at most six predictions of each way."""

    def is_kept(wait_s: float) -> bool:
        return _is_kept(request, predict(ways, request, after_s=wait_s) or [])

    if not is_kept(_RETRY_STEPS_S[-1]):
        return None
    return _RETRY_STEPS_S[bisect_left(_RETRY_STEPS_S[:-1], True, key=is_kept)]


def _is_kept(request: RequestFacts, predictions: Sequence[Prediction]) -> bool:
    return any(not request.targets.missed(prediction.ttft_s, prediction.itl_s) for prediction in predictions)
