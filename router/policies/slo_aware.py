"""The policy `auto`: predicts every candidate and chooses by latency targets first, then by time. Pure.

The order of the criteria: the fewest requests expected to miss a latency target (this one, those that run at its
workers, and later ones), then the shortest time to first token, then the least delay of all later tokens (the request's
own and those of the sequences that run there), then the least KV to move. Differences within the tolerance of a
criterion do not decide; the next criterion does. Candidates that are equal in everything are drawn at random. Misses
are probabilities: a prediction just below a target is not as good as one far below it.

What later requests miss because a worker does the other role's part depends on the traffic: the arrangement of the
workers (router/policies/arrangement.py) says how much to expect.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cluster.messages import Role
from cluster.outstanding_work import PromptWork
from router.policies.arrangement import Arrangement, Arrangements
from router.policies.candidates import NO_TARGETS, Pair, RequestFacts, SloTargets, WorkerLoad, candidates
from router.policies.placement import (
    Candidate,
    LeastLoaded,
    Placement,
    PlacementReason,
    Policy,
    PrefixAware,
    RoundRobin,
    candidate_of,
    is_fallback,
    shortlist,
)
from router.policies.prediction.forecast import PRECISION
from router.policies.prediction.latency import AllRecent, LatestPredictions, Prediction
from router.policies.prediction.recent_prompts import NO_RECENT_PROMPTS, RecentPrompts
from router.policies.replay import PastRequest

# Predictions that differ by less than `PRECISION` and this time are equal: the models are not more precise.
_TOLERANCE_S = 0.001
_TOLERANCE_MISSES = 0.02
_SHARPNESS = 8.0  # a target is missed with a probability of 19 % at 1.2 times the predicted time, of 5 % at 1.45 times
# What later requests miss for each part of a request that a worker does against its role. Simulated over prompts of 64
# to 2,048 tokens, outputs of 16 and 128 and loads of 0.3 to 0.9: where neither arrangement is clearly better, half a
# miss kept most targets; with 0.1 or less two workers do everything alike and disturb each other, with 0.8 or more they
# hardly help each other.
_MISSES_AGAINST_ROLE = {Arrangement.BY_ROLE: 3.0, Arrangement.MIXED: 0.5}
_MAX_COMPARED = 8  # workers of both roles of which every way is compared
_MISSES_PER_WAIT = 0.1  # of later requests, which wait behind this one; per wait that uses up its target


class SloAware:
    def __init__(self, targets: SloTargets, draw: Callable[[], float], explore: float = 0.0) -> None:
        """`targets`: of requests that set none, and of all sequences that run already. `draw` returns random numbers
        from 0 up to 1, which choose between equal candidates. `explore`: the share of requests that are explored."""
        self._targets = targets
        self._draw = draw
        self._explore = explore
        self._without_speeds = PrefixAware()
        self.predict = LatestPredictions(self._recent)
        self._arrangements = Arrangements()
        self._first = 0.0  # the place, from 0 up to 1, of the worker that goes first where only some are compared

    def ways(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Sequence[Pair]:
        prefills, decodes = self._in_turn(prefills), self._in_turn(decodes)
        if self._targets.preferring(request.targets) == NO_TARGETS:
            return candidates(prefills, decodes, request)
        role_of = self._arrangements.role_of
        decoding = [decode for decode in decodes if role_of(decode) is not Role.PREFILL]
        if not decoding or not prefills:  # a role is a preference
            decoding = [*decodes]
        computing = [prefill for prefill in prefills if role_of(prefill) is not Role.DECODE]
        here = {decode.member for decode in decoding}
        helpers = [load for load in prefills if role_of(load) is Role.PREFILL and load.member not in here]
        ways = candidates(computing, decoding, request, helpers)
        return [way for way in ways if not self._is_needless(*way)] or ways

    def choose(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts
    ) -> Placement | None:
        if (past := self._past_request(prefills, decodes, request, 0.0)) is not None:
            self._arrangements.begin(past, _workers(prefills, decodes))
        ways = self.ways(prefills, decodes, request)
        found = self._predicted(ways, request)
        if found is None:
            placement = self._without_speeds.choose(prefills, decodes, request)
            return replace(placement, reason=PlacementReason.UNKNOWN_SPEED) if placement is not None else None
        if not found:
            return None
        if len(prefills) + len(decodes) > _MAX_COMPARED:
            self._first = self._draw()
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
            is_fallback=is_fallback(ways),
            considered=shortlist(ordered, chosen),
            num_candidates=len(ordered),
            alternative=alternative,
            propensity=propensity,
        )

    def placed(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts, now_s: float
    ) -> Arrangement | None:
        past = self._past_request(prefills, decodes, request, now_s)
        if past is None:
            return None
        return self._arrangements.current if self._arrangements.placed(past, _workers(prefills, decodes)) else None

    def _in_turn(self, loads: Sequence[WorkerLoad]) -> Sequence[WorkerLoad]:
        """Return the same workers from another one on. Of a large cluster only some are compared, and of equal ones the
        first: it must not always be the same."""
        first = int(self._first * len(loads))
        return [*loads[first:], *loads[:first]] if first else loads

    def _past_request(
        self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], request: RequestFacts, now_s: float
    ) -> PastRequest | None:
        targets = self._targets.preferring(request.targets)
        if targets == NO_TARGETS or any(load.work is None for load in (*prefills, *decodes)):
            return None
        work = PromptWork.of(request.num_prompt_tokens, max(request.cached_tokens.values(), default=0))
        return PastRequest(
            now_s, work, request.num_prompt_tokens, request.expected_output, targets, request.num_choices
        )

    def _predicted(self, pairs: Sequence[Pair], request: RequestFacts) -> list[Candidate] | None:
        """Return all candidates; None if the speed of a worker is not known."""
        predictions = self.predict(pairs, request)
        if predictions is None:
            return None
        have_roles = any(self._arrangements.role_of(decode) is not Role.BOTH for _, decode in pairs)
        against = self._misses_against_role(pairs) if have_roles else None
        targets = self._targets.preferring(request.targets)
        found = []
        for (prefill, decode), prediction in zip(pairs, predictions, strict=True):
            num_violations = self._num_violations(prediction, targets)
            expected_misses = self._expected_misses((prefill, decode), prediction, targets, against)
            found.append(candidate_of(prefill, decode, request, prediction, num_violations, expected_misses))
        return found

    def _recent(self, ways: Sequence[Pair]) -> AllRecent:
        """Return the recent prompts of the workers of these ways. Workers of one role share its prompts, so together
        they show sooner than each of them how many come."""
        role_of, pools = self._arrangements.role_of, dict[Role | None, RecentPrompts]()
        loads = {load.member: load for way in ways for load in way if load is not None}
        for load in loads.values():
            if load.work is not None:
                pools[role_of(load)] = pools.get(role_of(load), NO_RECENT_PROMPTS) + load.work.recent
        return {member: pools[role_of(load)] for member, load in loads.items() if load.work is not None}

    def _num_violations(self, prediction: Prediction, targets: SloTargets) -> int:
        own = targets.missed(prediction.ttft_s, prediction.itl_s)
        return own + (prediction.running_itl_s > self._targets.itl_s)

    def _expected_misses(
        self, pair: Pair, prediction: Prediction, targets: SloTargets, against: Mapping[Role, float] | None
    ) -> float:
        """Return how many requests are expected to miss a target because this candidate is chosen: this one, those that
        run at its workers, and later ones. `against`: of `_misses_against_role`."""
        if targets == NO_TARGETS:
            return 0.0
        role_of, (prefill, decode) = self._arrangements.role_of, pair
        if self._arrangements.current is Arrangement.ALONE:
            return float(prefill is not None)  # and among the workers alone the first token decides
        kept = (1 - _miss(prediction.ttft_s, targets.ttft_s)) * (1 - _miss(prediction.itl_s, targets.itl_s))
        if against is None:
            return 1 - kept
        others = 0.0
        for beside in prediction.beside:
            # Sequences that run have about half of their tokens.
            whole_s = (beside.before_s + max(beside.before_s, beside.after_s)) / 2
            others += beside.number * (
                _miss(whole_s, self._targets.itl_s) - _miss(beside.before_s, self._targets.itl_s)
            )
        waiting = _MISSES_PER_WAIT * min(1.0, prediction.ttft_s / targets.ttft_s) if targets.ttft_s > 0 else 0.0
        legs = ((prefill or decode, Role.DECODE), (decode, Role.PREFILL))
        return 1 - kept + others + waiting + sum(against[role] for load, role in legs if role_of(load) is role)

    def _is_needless(self, prefill: WorkerLoad | None, decode: WorkerLoad) -> bool:
        """Return whether a hand-off is between two workers of both roles. Either one does the same work alone; together
        they disturb the sequences of two workers, which a prediction counts only as far as those run already."""
        role_of = self._arrangements.role_of
        return prefill is not None and role_of(prefill) is Role.BOTH is role_of(decode)

    def _misses_against_role(self, pairs: Sequence[Pair]) -> Mapping[Role, float]:
        """Return how many later requests miss a target because a worker of this role does a leg of the other one. The
        fewer workers have a role, the more requests each of them serves."""
        misses = _MISSES_AGAINST_ROLE.get(self._arrangements.current, 0.0)
        workers = {load.member: load for pair in pairs for load in pair if load is not None}
        roles = Counter(map(self._arrangements.role_of, workers.values()))
        return {role: misses * len(workers) / 2 / max(1, roles[role]) for role in (Role.PREFILL, Role.DECODE)}

    def _best(self, found: Sequence[Candidate]) -> tuple[Candidate, PlacementReason]:
        """Return the best candidate and the criterion that left only this one."""
        if len(found) == 1:
            return found[0], PlacementReason.ONLY_CANDIDATE
        for reason, value, share, least in _CRITERIA:
            limit = min(map(value, found))
            limit += max(share * limit, least)
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


def _workers(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad]) -> list[WorkerLoad]:
    """Return each worker once."""
    return list({load.member: load for load in (*prefills, *decodes)}.values())


_Criterion = tuple[PlacementReason, Callable[[Candidate], float], float, float]
_CRITERIA: tuple[_Criterion, ...] = (
    (PlacementReason.SLO, lambda candidate: candidate.expected_misses, 0.0, _TOLERANCE_MISSES),
    (PlacementReason.TTFT, lambda candidate: _prediction(candidate).ttft_s, PRECISION, _TOLERANCE_S),
    (PlacementReason.TOKEN_DELAY, lambda candidate: _prediction(candidate).delay_s, PRECISION, _TOLERANCE_S),
    (PlacementReason.KV_BYTES, lambda candidate: _prediction(candidate).kv_bytes, 0.0, 0.0),
)


def _miss(predicted_s: float, target_s: float) -> float:
    """Return the probability that a time exceeds its target, if the real time is near the predicted one."""
    if target_s == math.inf or predicted_s <= 0:
        return 0.0
    return 1.0 if target_s <= 0 else 1 / (1 + (target_s / predicted_s) ** _SHARPNESS)


def _prediction(candidate: Candidate) -> Prediction:
    assert candidate.prediction is not None, "a candidate without a prediction was compared"
    return candidate.prediction


def _order(candidate: Candidate) -> tuple[float, ...]:
    return tuple(value(candidate) for _, value, _, _ in _CRITERIA)


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
