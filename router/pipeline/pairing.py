"""Who serves a request: a pair of workers for a new attempt, or another decode worker for a ticket that is there.

Puts placement's question together from what this router knows now. Never decides itself: that is the policy's.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from cluster.errors import NoWorkerLargeEnough
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.request_size import RequestSize, decode_shortage, prefill_shortage, too_large
from router.fleet.decode_peer import DecodePeer
from router.fleet.fleet import Fleet
from router.fleet.peer import Peer
from router.fleet.prefix_beliefs import PrefixBeliefs
from router.pipeline.pair_trust import PairTrust
from router.policies.placement import (
    LeastLoaded,
    Placement,
    Policy,
    RequestFacts,
    WorkerLoad,
    has_large_pair,
    is_servable,
)
from router.request.choice import Choice
from router.request.live_request import LiveRequest

_WAITING = "tandem_requests_waiting_for_large_worker"


class Pairing:
    def __init__(
        self, *, fleet: Fleet, policy: Policy, prefixes: PrefixBeliefs, pairs: PairTrust, telemetry: Telemetry
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._prefixes = prefixes
        self._pairs = pairs
        self._telemetry = telemetry
        self._importers = LeastLoaded()  # of its own: turns are taken among those that were asked for

    async def pair(self, live: LiveRequest, choices: Sequence[Choice], *, without_prefill: bool = False) -> Placement:
        """Waits while no worker can hold the request, and for a prefill worker in doubt rather than doing without.
        `without_prefill`: rather a decode worker that does both."""
        prompt = live.request.prompt_token_ids + choices[0].committed
        cached_tokens = self._prefixes.cached_tokens(prompt, live.request.cache_salt)
        facts = replace(_facts(live, choices, choices[0].num_committed), cached_tokens=cached_tokens)
        while True:
            facts = replace(facts, passed_over=self._pairs.passed_over())
            placement = self._choose(facts, without_prefill=without_prefill)
            is_hasty = placement is not None and placement.prefill is None and self._fleet.is_checking_prefill
            if placement is not None and (without_prefill or not is_hasty):
                live.waits(choices[0], None)
                return placement
            shortage = self._shortage(facts.size) if placement is None else None
            live.waits(choices[0], shortage)
            with self._counted(shortage):
                await self._fleet.changed()

    def refusal(self, size: RequestSize) -> NoWorkerLargeEnough | None:
        """Why a new request of this size would wait in vain: workers are known, and none of them can hold it. One that
        does not answer now, or left lately, may come back, and counts."""
        decodes = self._fleet.recent_capacities(Role.DECODE)
        if not decodes or any(not decode_shortage(capacity, size) for capacity in decodes):
            return None
        if not size.needs_decode:
            prefills = self._fleet.recent_capacities(Role.PREFILL)
            if any(not prefill_shortage(capacity, size) for capacity in prefills):
                return None
        return too_large(size, decodes)

    def has_large_pair(self, live: LiveRequest, choices: Sequence[Choice]) -> bool:
        """Whether two workers could serve these choices by a hand-off, if the breaker of the pair let them."""
        facts = _facts(live, choices, choices[0].num_committed)
        return has_large_pair(self._fleet.prefill_loads(), self._fleet.decode_loads(), facts)

    def could_begin_elsewhere(self, live: LiveRequest, choices: Sequence[Choice], suspect: Peer) -> bool:
        """Whether workers that answer could serve these choices, one of the suspect's role among them."""
        facts = _facts(live, choices, max(choice.num_committed for choice in choices))
        could_be = has_large_pair if suspect.member.role is Role.PREFILL else is_servable
        return could_be(self._fleet.prefill_loads(), self._fleet.decode_loads(), facts)

    def importer(
        self,
        live: LiveRequest,
        choices: Sequence[Choice],
        exporter: Peer,
        *,
        num_committed: int,
        besides: Collection[MemberId],
    ) -> DecodePeer | None:
        """A decode worker that may import what this one exports, a ticket that covers the prompt and `num_committed`
        tokens; None: there is no other now."""
        others = [load for load in self._fleet.decode_loads() if load.member not in besides]
        exporting = WorkerLoad(member=exporter.member.id, pairing=exporter.pairing, assigned=0)
        facts = replace(_facts(live, choices, num_committed), passed_over=self._pairs.passed_over())
        placement = self._importers.choose([exporting], others, facts)
        if placement is None or placement.prefill is None:
            return None
        return self._fleet.decode(placement.decode)

    def _shortage(self, size: RequestSize) -> NoWorkerLargeEnough | None:
        """Of a request without a placement. None: there is no decode worker at all."""
        decodes = self._fleet.decode_loads()
        capacities = [load.capacity for load in decodes if load.capacity is not None]
        return too_large(size, capacities) if decodes else None

    @contextmanager
    def _counted(self, shortage: NoWorkerLargeEnough | None) -> Iterator[None]:
        if shortage is None:
            yield
            return
        self._telemetry.shift(_WAITING, 1)
        try:
            yield
        finally:
            self._telemetry.shift(_WAITING, -1)

    def _choose(self, facts: RequestFacts, *, without_prefill: bool) -> Placement | None:
        prefills, decodes = self._fleet.prefill_loads(), self._fleet.decode_loads()
        alone = self._policy.choose([], decodes, facts) if without_prefill else None
        return alone or self._policy.choose(prefills, decodes, facts)


def _facts(live: LiveRequest, choices: Sequence[Choice], num_committed: int) -> RequestFacts:
    return facts_of(live, live.size(num_committed, len(choices)))


def facts_of(live: LiveRequest, size: RequestSize) -> RequestFacts:
    """What placement must know of a request whose workers must hold `size`."""
    return RequestFacts(
        num_prompt_tokens=size.num_known,
        max_tokens=size.max_tokens - size.num_committed,
        num_choices=size.num_choices,
        avoid=frozenset(live.failed_members),
        num_committed=size.num_committed,
        too_small=frozenset(live.too_small),
    )
