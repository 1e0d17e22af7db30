"""Who serves a request: a pair of workers for a new attempt, or another decode worker for a ticket that is there.

Puts placement's question together from what this router knows now. Never decides itself: that is the policy's.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from cluster.messages import MemberId
from router.choice import Choice
from router.decode_peer import DecodePeer
from router.fleet import Fleet
from router.live_request import LiveRequest
from router.pair_trust import PairTrust
from router.peer import Peer
from router.placement import LeastLoaded, Placement, Policy, RequestFacts, WorkerLoad
from router.prefix_beliefs import PrefixBeliefs


class Pairing:
    def __init__(self, *, fleet: Fleet, policy: Policy, prefixes: PrefixBeliefs, pairs: PairTrust) -> None:
        self._fleet = fleet
        self._policy = policy
        self._prefixes = prefixes
        self._pairs = pairs
        self._importers = LeastLoaded()  # of its own: turns are taken among those that were asked for

    async def pair(self, live: LiveRequest, choices: Sequence[Choice]) -> Placement:
        """Waits for a worker while there is none, and for a prefill worker in doubt rather than doing without."""
        prompt = live.request.prompt_token_ids + choices[0].committed
        cached_tokens = self._prefixes.cached_tokens(prompt, live.request.cache_salt)
        facts = replace(_facts(live, choices), cached_tokens=cached_tokens)
        while True:
            facts = replace(facts, passed_over=self._pairs.passed_over())
            placement = self._policy.choose(self._fleet.prefill_loads(), self._fleet.decode_loads(), facts)
            if placement is not None and not (placement.prefill is None and self._fleet.is_checking_prefill):
                return placement
            await self._fleet.changed()

    def importer(
        self, live: LiveRequest, choices: Sequence[Choice], exporter: Peer, *, besides: Collection[MemberId]
    ) -> DecodePeer | None:
        """A decode worker that may have what this one exports; None: there is no other now."""
        others = [load for load in self._fleet.decode_loads() if load.member not in besides]
        exporting = WorkerLoad(member=exporter.member.id, pairing=exporter.pairing, assigned=0)
        facts = replace(_facts(live, choices), passed_over=self._pairs.passed_over())
        placement = self._importers.choose([exporting], others, facts)
        if placement is None or placement.prefill is None:
            return None
        return self._fleet.decode(placement.decode)


def _facts(live: LiveRequest, choices: Sequence[Choice]) -> RequestFacts:
    return RequestFacts(
        num_prompt_tokens=len(live.request.prompt_token_ids) + choices[0].num_committed,
        max_tokens=choices[0].num_missing,
        num_choices=len(choices),
        avoid=frozenset(live.failed_members),
    )
