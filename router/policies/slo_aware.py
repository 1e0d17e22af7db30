"""The policy `auto`: predicts every candidate and chooses by latency targets first, then by time. Pure.

The order of the criteria: the fewest latency targets missed, then the shortest time to first token, then the least
delay of all later tokens (the request's own and those of the sequences that run there), then the least KV to move.
Differences within the tolerance of a criterion do not decide; the next criterion does. What is equal in everything is
drawn. A small share of the requests may be explored: they are sent to the second-best candidate.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from router.policies.candidates import Pair, RequestFacts, SloTargets, WorkerLoad, candidates
from router.policies.placement import (
    Candidate,
    LeastLoaded,
    Placement,
    PlacementReason,
    Policy,
    PrefixAware,
    RoundRobin,
    candidate_of,
    shortlist,
)
from router.policies.prediction import Prediction, predict_all

# Predictions that differ by less than this share and this time are equal: the models are not more precise.
_TOLERANCE = 0.02
_TOLERANCE_S = 0.001


class SloAware:
    def __init__(self, targets: SloTargets, draw: Callable[[], float], explore: float = 0.0) -> None:
        """`targets`: of requests that set none, and of all sequences that run already. `draw` returns random numbers
        from 0 up to 1, which choose between equal candidates. `explore`: the share of requests that are explored."""
        self._targets = targets
        self._draw = draw
        self._explore = explore
        self._without_speeds = PrefixAware()

    def ways(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Sequence[Pair]:
        return candidates(prefills, decodes, request)

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        found = self._predicted(self.ways(prefills, decodes, request), request)
        if found is None:
            placement = self._without_speeds.choose(prefills, decodes, request)
            return replace(placement, reason=PlacementReason.UNKNOWN_SPEED) if placement is not None else None
        if not found:
            return None
        best, reason = self._best(found)
        ordered = [best, *sorted((candidate for candidate in found if candidate is not best), key=_order)]
        chosen, propensity = best, 1.0
        if (alternative := self._second_best(ordered, request)) is not None:
            propensity = 1 - self._explore
            if self._draw() < self._explore:
                chosen, alternative = alternative, best
                reason, propensity = PlacementReason.EXPLORED, self._explore
        return Placement(
            prefill=chosen.prefill,
            decode=chosen.decode,
            reason=reason,
            is_fallback=not any(candidate.is_pair for candidate in found),
            considered=shortlist(ordered, chosen),
            num_candidates=len(ordered),
            alternative=alternative,
            propensity=propensity,
        )

    def _predicted(self, pairs: Sequence[Pair], request: RequestFacts) -> list[Candidate] | None:
        """Return all candidates; None if the speed of a worker is not known."""
        predictions = predict_all(pairs, request)
        if predictions is None:
            return None
        targets = self._targets.preferring(request.targets)
        found = []
        for (prefill, decode), prediction in zip(pairs, predictions, strict=True):
            num_violations = self._num_violations(prediction, targets)
            candidate = candidate_of(prefill, decode, request)
            found.append(replace(candidate, prediction=prediction, num_violations=num_violations))
        return found

    def _num_violations(self, prediction: Prediction, targets: SloTargets) -> int:
        own = targets.missed(prediction.ttft_s, prediction.itl_s)
        return own + (prediction.running_itl_s > self._targets.itl_s)

    def _best(self, found: Sequence[Candidate]) -> tuple[Candidate, PlacementReason]:
        """Return the best candidate and the criterion that left only this one."""
        if len(found) == 1:
            return found[0], PlacementReason.ONLY_CANDIDATE
        for reason, value, tolerance in _CRITERIA:
            limit = min(map(value, found))
            limit += max(tolerance * limit, tolerance and _TOLERANCE_S)
            found = [candidate for candidate in found if value(candidate) <= limit]
            if len(found) == 1:
                return found[0], reason
        return found[int(self._draw() * len(found))], PlacementReason.TIE

    def _second_best(self, ordered: Sequence[Candidate], request: RequestFacts) -> Candidate | None:
        """Return the candidate that exploration may use instead of the first one; None: there is none.

        It is the best one of the other kind (a pair, or a worker alone), whose difference exploration measures, and
        otherwise the second one. It misses no latency target. Only first attempts are explored, so no worker that
        failed the request is used."""
        if not self._explore or request.avoid or request.num_committed:
            return None
        allowed = [candidate for candidate in ordered[1:] if not candidate.num_violations]
        others = [candidate for candidate in allowed if candidate.is_pair is not ordered[0].is_pair]
        return next(iter(others or allowed), None)


_Criterion = tuple[PlacementReason, Callable[[Candidate], float], float]
_CRITERIA: tuple[_Criterion, ...] = (
    (PlacementReason.SLO, lambda candidate: candidate.num_violations, 0.0),
    (PlacementReason.TTFT, lambda candidate: _prediction(candidate).ttft_s, _TOLERANCE),
    (PlacementReason.TOKEN_DELAY, lambda candidate: _prediction(candidate).delay_s, _TOLERANCE),
    (PlacementReason.KV_BYTES, lambda candidate: _prediction(candidate).kv_bytes, 0.0),
)


def _prediction(candidate: Candidate) -> Prediction:
    assert candidate.prediction is not None, "a candidate without a prediction was compared"
    return candidate.prediction


def _order(candidate: Candidate) -> tuple[float, ...]:
    return tuple(value(candidate) for _, value, _ in _CRITERIA)


def policy(name: str, targets: SloTargets, draw: Callable[[], float], explore: float = 0.0) -> Policy:
    """Return the policy that `--placement` names. `targets`, `draw`, `explore`: of `SloAware`."""
    if name == "auto":
        return SloAware(targets, draw, explore)
    policies: dict[str, type[PrefixAware] | type[LeastLoaded] | type[RoundRobin]] = {
        "prefix-aware": PrefixAware,
        "least-loaded": LeastLoaded,
        "round-robin": RoundRobin,
    }
    return policies[name]()
