"""The policy `auto`: predicts every candidate and chooses by latency targets first, then by time. Pure.

The order of the criteria: the fewest latency targets missed, then the shortest time to first token, then the least
delay of all later tokens (the request's own and those of the sequences that run there), then the least KV to move.
Differences within the tolerance of a criterion do not decide; the next criterion does. What is equal in everything is
drawn.
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
)
from router.policies.prediction import Prediction, predict

# Predictions that differ by less than this share and this time are equal: the models are not more precise.
_TOLERANCE = 0.02
_TOLERANCE_S = 0.001


class SloAware:
    def __init__(self, targets: SloTargets, draw: Callable[[], float]) -> None:
        """`targets`: of requests that set none, and of all sequences that run already. `draw` returns random numbers
        from 0 up to 1, which choose between equal candidates."""
        self._targets = targets
        self._draw = draw
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
        chosen, reason = self._best(found)
        others = sorted((candidate for candidate in found if candidate is not chosen), key=_order)
        return Placement(
            prefill=chosen.prefill,
            decode=chosen.decode,
            reason=reason,
            is_fallback=all(candidate.prefill is None for candidate in found),
            considered=(chosen, *others),
        )

    def _predicted(self, pairs: Sequence[Pair], request: RequestFacts) -> list[Candidate] | None:
        """Return all candidates; None if the speed of a worker is not known."""
        targets = self._targets.preferring(request.targets)
        found = []
        for prefill, decode in pairs:
            prediction = predict(prefill, decode, request)
            if prediction is None:
                return None
            exporter = prefill.member if prefill is not None else None
            found.append(Candidate(exporter, decode.member, prediction, self._num_violations(prediction, targets)))
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


_Criterion = tuple[PlacementReason, Callable[[Candidate], float], float]
_CRITERIA: tuple[_Criterion, ...] = (
    (PlacementReason.SLO, lambda candidate: candidate.num_violations, 0.0),
    (PlacementReason.TTFT, lambda candidate: candidate.prediction.ttft_s, _TOLERANCE),
    (PlacementReason.TOKEN_DELAY, lambda candidate: candidate.prediction.delay_s, _TOLERANCE),
    (PlacementReason.KV_BYTES, lambda candidate: candidate.prediction.kv_bytes, 0.0),
)


def _order(candidate: Candidate) -> tuple[float, ...]:
    return tuple(value(candidate) for _, value, _ in _CRITERIA)


def policy(name: str, targets: SloTargets, draw: Callable[[], float]) -> Policy:
    """Return the policy that `--placement` names. `targets`, `draw`: of `SloAware`."""
    if name == "auto":
        return SloAware(targets, draw)
    policies: dict[str, type[PrefixAware] | type[LeastLoaded] | type[RoundRobin]] = {
        "prefix-aware": PrefixAware,
        "least-loaded": LeastLoaded,
        "round-robin": RoundRobin,
    }
    return policies[name]()
