"""Chooses the workers of a request: a pair for a new attempt, or another decode worker for a ticket that was issued.

Collects the facts for placement (router/policies/ decides) and records how hand-offs between each pair of workers
ended. A failed hand-off counts against its pair once both workers have answered since then; if one of them has not,
that worker failed, and the fleet handles it.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import MappingProxyType

from cluster.errors import NoGrammarWorker, NoWorkerLargeEnough, Overloaded
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.protocol.hashing import pack_ids
from cluster.request_size import RequestSize, decode_shortage, prefill_shortage, too_large
from router.fleet.fleet import Fleet, exporter_load
from router.fleet.peer import Peer
from router.fleet.prefix_locator import PrefixLocator
from router.pipeline.failures import PREFILL, AttemptFailed
from router.policies.admission import early_refusal
from router.policies.breakers import BreakerPolicy, BreakerState, Pair, PairBreakers, Trial
from router.policies.candidates import RequestFacts, WorkerLoad, has_large_pair, has_pair, is_servable
from router.policies.placement import Candidate, Importers, Placement, Policy
from router.policies.prediction.unmodelled import ModelledRequest
from router.request.admitted_request import AdmittedRequest
from router.request.choice import Choice

_LOG = logging.getLogger("tandem.router.pairs")
_MAX_PAIRS = 64  # whose circuit breakers are a metric


@dataclass(frozen=True, slots=True)
class _Suspicion:
    trial: Trial
    failed_s: float
    reason: str


class PairHealth:
    """The circuit breakers between pairs of workers, fed by the hand-offs of this router. Never chooses a pair."""

    def __init__(self, *, policy: BreakerPolicy, fleet: Fleet, telemetry: Telemetry) -> None:
        self._breakers = PairBreakers(policy)
        self._fleet = fleet
        self._telemetry = telemetry
        self._suspicions: list[_Suspicion] = []  # at most one per attempt in the time that a check takes
        self._published: dict[Pair, BreakerState] = {}

    def excluded_pairs(self) -> frozenset[Pair]:
        """Return the pairs that no request should use now."""
        self._judge()
        return self._breakers.excluded_pairs(_now_s())

    def failing(self) -> dict[Pair, BreakerState]:
        """Return the pairs of connected workers whose circuit breaker is open or half open."""
        connected = self._fleet.connected()
        failing = self._breakers.failing().items()
        return {pair: state for pair, state in failing if pair[0] in connected and pair[1] in connected}

    @contextmanager
    def attempting(self, exporter: MemberId, importer: MemberId) -> Iterator[Callable[[], None]]:
        """Record one hand-off between the two workers. Yields a function to call when the KV has arrived; an
        AttemptFailed that leaves the block counts as the outcome."""
        trial = self._breakers.begin((exporter, importer), _now_s())
        is_over = False

        def arrived() -> None:
            nonlocal is_over
            if not is_over and self._breakers.succeeded(trial, _now_s()):
                _LOG.info("hand-offs between two workers work again", extra=_names(trial))
            is_over = True
            self._publish()

        self._publish()
        try:
            yield arrived
        except AttemptFailed as failure:
            if failure.is_of_pair and not is_over:
                is_over = True
                self._suspicions.append(_Suspicion(trial, _now_s(), failure.reason))
            raise
        finally:
            if not is_over:
                self._breakers.dropped(trial)
                self._publish()

    def _judge(self) -> None:
        """Count failures of pairs whose two workers have both answered since then."""
        suspicions, self._suspicions = self._suspicions, []
        for suspicion in suspicions:
            peers = [self._fleet.peer(member) for member in suspicion.trial.pair]
            there = [peer for peer in peers if peer is not None]
            if len(there) < len(peers):
                self._breakers.dropped(suspicion.trial)
            elif all(peer.heard_s > suspicion.failed_s for peer in there):
                self._count(suspicion)
            else:
                self._suspicions.append(suspicion)
        self._breakers.keep(self._fleet.connected())
        self._publish()

    def _count(self, suspicion: _Suspicion) -> None:
        pause_s = self._breakers.failed(suspicion.trial, _now_s(), random.random())
        if pause_s is not None:
            fields = _names(suspicion.trial) | {"reason": suspicion.reason, "pause_s": round(pause_s, 1)}
            _LOG.warning("hand-offs between two workers fail: their circuit breaker opens", extra=fields)
            self._telemetry.count("tandem_pair_breaker_openings_total", reason=suspicion.reason)

    def _publish(self) -> None:
        failing = self._breakers.failing()
        if failing != self._published:
            self._published = failing
            shown = {(*(member.id for member in pair), str(state)): 1.0 for pair, state in failing.items()}
            self._telemetry.gauge_all("tandem_pair_breaker_state", dict(islice(shown.items(), _MAX_PAIRS)))


def _names(trial: Trial) -> dict[str, object]:
    exporter, importer = trial.pair
    return {"exporter": str(exporter), "importer": str(importer)}


def _now_s() -> float:
    """Return the time of the clock by which peers record when they last received a message."""
    return asyncio.get_running_loop().time()


# Why a decode worker prefills a prompt, in the ledger and in tandem_local_prefills_total.
_COLOCATED = "colocated"  # the worker's role is both, or the cluster never had a prefill worker
_PREDICTED = "predicted"  # placement chose it although a pair was there
_NO_PREFILL_WORKER = "no_prefill_worker"
_PAIR_BREAKERS_OPEN = "pair_breakers_open"  # prefill workers exist; their circuit breakers with decode workers are open
_NO_LARGE_ENOUGH_PAIR = "no_large_enough_pair"  # prefill workers exist; no pair can hold the request
_WAITING = "tandem_requests_waiting_for_large_worker"


@dataclass(frozen=True, slots=True)
class Options:
    """The facts about a request, and the loads of all workers at one moment."""

    request: RequestFacts
    prefills: Sequence[WorkerLoad]
    decodes: Sequence[WorkerLoad]


class WorkerChoice:
    """Chooses workers for the requests of one router."""

    def __init__(
        self, *, fleet: Fleet, policy: Policy, prefixes: PrefixLocator, pairs: PairHealth, telemetry: Telemetry
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._prefixes = prefixes
        self._pairs = pairs
        self._telemetry = telemetry
        self._importers = Importers()

    async def refuse_early(self, admitted: AdmittedRequest) -> Options:
        """Refuse a new request before any worker is asked, or return the options from which it was not refused, for its
        placement. Raises NoWorkerLargeEnough, NoGrammarWorker, Overloaded.

        The request waits instead while a large enough worker may only be absent from the registry for a moment."""
        size = admitted.size(num_choices=len(admitted.choices))
        while (too_large := self._size_refusal(size)) and not self._fleet.knows_absent_workers:
            admitted.waits(admitted.choices[0], too_large)
            with self._waiting(too_large):
                await self._fleet.changed()
        admitted.waits(admitted.choices[0], None)
        options = self._options(admitted, admitted.choices)
        if refusal := too_large or self._grammar_refusal(admitted) or self._refusal_by(options, admitted.time_left_s()):
            raise refusal
        return options

    def _options(self, admitted: AdmittedRequest, choices: Sequence[Choice]) -> Options:
        """Return the options of an attempt now."""
        packed = admitted.request.packed_prompt + pack_ids(choices[0].committed)
        facts = facts_of(
            admitted,
            admitted.size(choices[0].num_committed, len(choices)),
            cached_tokens=self._prefixes.cached_tokens(packed, admitted.chains),
            excluded_pairs=self._pairs.excluded_pairs(),
        )
        return Options(facts, self._fleet.prefill_loads(), self._fleet.decode_loads())

    async def choose_pair(
        self,
        admitted: AdmittedRequest,
        choices: Sequence[Choice],
        options: Options | None = None,
        *,
        without_prefill: bool = False,
    ) -> Placement:
        """Choose the workers of an attempt. Waits while no worker can hold the request, and while a prefill worker is
        suspect rather than doing without one.

        `options`: those of now, where the caller has them. `without_prefill`: prefer a decode worker that runs both
        legs.
        """
        options = options or self._options(admitted, choices)
        while True:
            placement = self._choose(options, without_prefill=without_prefill)
            is_hasty = placement is not None and placement.is_fallback and self._fleet.is_checking_prefill
            if placement is not None and (without_prefill or not is_hasty):
                admitted.waits(choices[0], None)
                self._telemetry.count("tandem_placement_decisions_total", reason=placement.reason)
                admitted.account.placements.add(placement, _now_s(), is_batch=admitted.request.is_batch)
                self._learn(options, is_batch=admitted.request.is_batch)
                if (chosen := placement.chosen) is not None and (predicted := chosen.prediction) is not None:
                    now_s, modelled = _now_s(), None if admitted.request.is_batch else self._modelled(chosen)
                    admitted.account.predict(predicted.ttft_s, predicted.itl_s, now_s, modelled)
                return placement
            shortage = self._shortage(options.request) if placement is None else None
            admitted.waits(choices[0], shortage)
            with self._waiting(shortage):
                await self._fleet.changed()
            facts = replace(options.request, excluded_pairs=self._pairs.excluded_pairs())
            options = Options(facts, self._fleet.prefill_loads(), self._fleet.decode_loads())

    def _learn(self, options: Options, *, is_batch: bool) -> None:
        """Let the policy learn from a request at its first attempt. The batch class uses only what others leave."""
        facts = options.request
        if is_batch or facts.num_committed or facts.avoid:
            return
        arrangement = self._policy.placed(options.prefills, options.decodes, facts, _now_s())
        if arrangement is not None:
            _LOG.info("the workers are used in another arrangement", extra={"arrangement": arrangement})

    def _modelled(self, chosen: Candidate) -> ModelledRequest | None:
        """Return the record from which the models of the chosen workers learn. None for requests of the batch class,
        because they wait for all others.
        """
        computes = self._fleet.peer(chosen.prefill or chosen.decode)
        decodes = self._fleet.peer(chosen.decode)
        if computes is None or decodes is None or chosen.prediction is None:
            return None
        ttft_s, itl_s = chosen.prediction.modelled_ttft_s, chosen.prediction.modelled_itl_s
        return ModelledRequest(ttft_s, itl_s, _now_s(), computes.unmodelled, decodes.unmodelled)

    def _size_refusal(self, size: RequestSize) -> NoWorkerLargeEnough | None:
        """Return why no worker can ever hold a new request of this size; None if one can. Workers that do not answer
        now, or that left recently, may come back and count."""
        decodes = self._fleet.recent_capacities(Role.DECODE)
        if not decodes or any(not decode_shortage(capacity, size) for capacity in decodes):
            return None
        if not size.needs_decode:
            prefills = self._fleet.recent_capacities(Role.PREFILL)
            if any(not prefill_shortage(capacity, size) for capacity in prefills):
                return None
        return too_large(size, decodes)

    def _grammar_refusal(self, admitted: AdmittedRequest) -> NoGrammarWorker | None:
        """Return why no worker applies the request's grammar; None if one does, or none answers now."""
        if not admitted.grammar_engine:
            return None
        facts, decodes = facts_of(admitted, admitted.size()), self._fleet.decode_loads()
        if not decodes or any(map(facts.has_grammar_engine, decodes)):
            return None
        return NoGrammarWorker(
            f"no worker of this cluster applies grammars as this router does, by {admitted.grammar_engine}: install the"
            " same version of llguidance and the same tokenizer everywhere"
        )

    @contextmanager
    def _waiting(self, shortage: NoWorkerLargeEnough | None) -> Iterator[None]:
        """Count a request that waits within the `with` block because of this shortage; None: for another reason."""
        if shortage is None:
            yield
            return
        self._telemetry.shift(_WAITING, 1)
        try:
            yield
        finally:
            self._telemetry.shift(_WAITING, -1)

    def _refusal_by(self, options: Options, time_left_s: float) -> Overloaded | None:
        """Return why a new request would be served too late or not at all; None if it would be served in time."""
        prefills, decodes, facts = options.prefills, options.decodes, options.request
        ways = partial(self._policy.ways, prefills, decodes, facts)
        return early_refusal(prefills, decodes, ways, facts, time_left_s, self._policy.predict)

    def record_local_prefill(
        self, admitted: AdmittedRequest, choices: Sequence[Choice], placement: Placement, failure: str
    ) -> None:
        """Count a prefill at the worker that decodes. `failure`: of the attempt that led to it; empty: placement chose
        it."""
        reason = failure or self._local_prefill_reason(admitted, choices, placement)
        self._telemetry.count("tandem_local_prefills_total", reason=reason)
        if reason not in (_COLOCATED, _PREDICTED):
            admitted.account.add_reason(reason)

    def _local_prefill_reason(self, admitted: AdmittedRequest, choices: Sequence[Choice], placement: Placement) -> str:
        """Return why placement chose a worker alone. It is a fallback only where the cluster once had a prefill worker,
        and neither a pair nor a worker of both roles could be chosen."""
        peer = self._fleet.peer(placement.decode)
        if peer is not None and peer.member.role is Role.BOTH:
            return _COLOCATED
        if not placement.is_fallback:
            return _PREDICTED
        if prefills := self._fleet.prefill_loads():
            facts = _facts(admitted, choices, choices[0].num_committed)
            is_large = has_large_pair(prefills, self._fleet.decode_loads(), facts)
            return _PAIR_BREAKERS_OPEN if is_large else _NO_LARGE_ENOUGH_PAIR
        return _NO_PREFILL_WORKER if self._fleet.has_prefill_pool else _COLOCATED

    def can_run_elsewhere(self, admitted: AdmittedRequest, choices: Sequence[Choice], leg: str) -> bool:
        """Return whether workers that answer could serve these choices, among them one for this leg.

        A prompt leaves its worker only for a pair: it would wait for the worker rather than do without one
        (`choose_pair`)."""
        num_committed = max(choice.num_committed for choice in choices)
        facts = replace(_facts(admitted, choices, num_committed), excluded_pairs=self._pairs.excluded_pairs())
        could_be = has_pair if leg == PREFILL else is_servable
        return could_be(self._fleet.prefill_loads(), self._fleet.decode_loads(), facts)

    def choose_importer(
        self,
        admitted: AdmittedRequest,
        choices: Sequence[Choice],
        exporter: Peer,
        *,
        num_committed: int,
        besides: Collection[MemberId],
    ) -> Peer | None:
        """Choose a decode worker to import from `exporter` a ticket that covers the prompt and `num_committed` tokens.
        Returns None if there is no other now."""
        others = [load for load in self._fleet.decode_loads() if load.member not in besides]
        facts = replace(_facts(admitted, choices, num_committed), excluded_pairs=self._pairs.excluded_pairs())
        chosen = self._importers.choose(exporter_load(exporter), others, facts)
        return self._fleet.connected_peer(chosen) if chosen is not None else None

    def _shortage(self, facts: RequestFacts) -> NoWorkerLargeEnough | None:
        """Return why no worker can hold a request without a placement; None if there is no decode worker at all that
        applies its grammar."""
        decodes = list(filter(facts.has_grammar_engine, self._fleet.decode_loads()))
        capacities = [load.capacity for load in decodes if load.capacity is not None]
        return too_large(facts.size, capacities) if decodes else None

    def _choose(self, options: Options, *, without_prefill: bool) -> Placement | None:
        decodes, facts = options.decodes, options.request
        alone = self._policy.choose([], decodes, facts) if without_prefill else None
        return alone or self._policy.choose(options.prefills, decodes, facts)


def _facts(admitted: AdmittedRequest, choices: Sequence[Choice], num_committed: int) -> RequestFacts:
    return facts_of(admitted, admitted.size(num_committed, len(choices)))


def facts_of(
    admitted: AdmittedRequest,
    size: RequestSize,
    *,
    cached_tokens: Mapping[MemberId, int] = MappingProxyType({}),
    excluded_pairs: Collection[Pair] = (),
) -> RequestFacts:
    """Return the facts for placement about a request whose workers must hold `size`."""
    return RequestFacts(
        num_prompt_tokens=size.num_known,
        max_tokens=size.max_tokens - size.num_committed,
        num_choices=size.num_choices,
        avoid=frozenset(admitted.failed_members),
        num_committed=size.num_committed,
        too_small=frozenset(admitted.too_small),
        expected_output=max(1.0, admitted.expected_output - size.num_committed),
        targets=admitted.targets,
        grammar_engine=admitted.grammar_engine,
        tenant=admitted.tenant,
        is_batch=admitted.request.is_batch,
        cached_tokens=cached_tokens,
        excluded_pairs=excluded_pairs,
    )
