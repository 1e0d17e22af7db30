"""Exploration of the policy `auto`: a share of the requests is sent to the second-best candidate."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from cluster.messages import MemberId
from router.policies.candidates import NO_TARGETS, RequestFacts, SloTargets, WorkerLoad
from router.policies.placement import Placement, PlacementReason
from router.policies.prediction.unmodelled import Unmodelled
from router.policies.slo_aware import SloAware
from tests.unit.router.policies.test_slo_aware import REQUEST, load, names

EXPLORES = 0.02


def explored(
    prefills: list[WorkerLoad],
    decodes: list[WorkerLoad],
    draw: float,
    request: RequestFacts = REQUEST,
    targets: SloTargets = NO_TARGETS,
) -> Placement:
    placement = SloAware(targets, lambda: draw, EXPLORES).choose(prefills, decodes, request)
    assert placement is not None
    return placement


def test_a_small_share_of_the_requests_is_sent_to_the_second_best_candidate() -> None:
    prefills, decodes = [load("p0"), load("p1", num_ahead=100)], [load("d0", num_ahead=700)]
    placement = explored(prefills, decodes, draw=0.019)
    assert (names(placement), placement.reason) == ((None, "d0"), PlacementReason.EXPLORED)
    assert placement.propensity == EXPLORES
    assert placement.alternative is placement.considered[0]  # the best one
    assert placement.chosen is placement.considered[2]  # worse than p1's pair, which is of the same kind as the best


def test_all_other_requests_get_the_best_candidate_and_record_what_might_have_been_drawn() -> None:
    placement = explored([load("p0")], [load("d0", num_ahead=300)], draw=0.021)
    assert (names(placement), placement.reason) == (("p0", "d0"), PlacementReason.TTFT)
    assert placement.propensity == 1 - EXPLORES
    assert placement.alternative is placement.considered[1]


def test_the_share_of_explored_requests_is_the_configured_one() -> None:
    policy = SloAware(NO_TARGETS, random.Random(7).random, 0.1)
    reasons = Counter(
        placement.reason
        for _ in range(2000)
        if (placement := policy.choose([load("p0")], [load("d0", num_ahead=300)], REQUEST))
    )
    assert 160 <= reasons[PlacementReason.EXPLORED] <= 240


def test_the_second_best_worker_is_explored_if_no_pair_is_possible() -> None:
    placement = explored([], [load("d0"), load("d1", num_ahead=100), load("d2", num_ahead=200)], draw=0.0)
    assert (names(placement), placement.is_fallback) == ((None, "d1"), True)


def test_exploration_never_misses_a_latency_target() -> None:
    prefills, decodes = [load("p0"), load("p1", num_ahead=100)], [load("d0", num_ahead=700)]
    tight = explored(prefills, decodes, draw=0.0, targets=SloTargets(ttft_s=0.6))
    assert names(tight) == ("p1", "d0")  # the worker alone would miss it
    own = explored(prefills, decodes, draw=0.0, request=replace(REQUEST, targets=SloTargets(ttft_s=0.45)))
    assert (names(own), own.reason) == (("p0", "d0"), PlacementReason.SLO)
    assert (own.alternative, own.propensity) == (None, 1.0)


def test_exploration_spares_sequences_whose_worker_is_known_to_be_slower_than_its_service_times_say() -> None:
    """Four sequences get a token each 15 ms by the service times, and each 45 ms as far as its requests have shown."""
    prefills, decodes = [load("p0"), load("p1", num_ahead=100)], [load("d0", running=4)]
    request, targets = replace(REQUEST, targets=SloTargets(itl_s=1.0)), SloTargets(itl_s=0.04)
    assert explored(prefills, decodes, 0.0, request, targets).reason is PlacementReason.EXPLORED
    slow = [replace(decode, unmodelled=Unmodelled(itl_factor=3.0)) for decode in decodes]
    assert explored(prefills, slow, 0.0, request, targets).alternative is None


def test_only_first_attempts_without_any_token_are_explored() -> None:
    prefills, decodes = [load("p0")], [load("d0", num_ahead=300), load("d1", num_ahead=400)]
    for request in (
        replace(REQUEST, avoid=frozenset({MemberId("d1", "1")})),
        replace(REQUEST, num_committed=3),
    ):
        placement = explored(prefills, decodes, draw=0.0, request=request)
        assert (placement.reason is PlacementReason.EXPLORED, placement.alternative) == (False, None)


def test_without_a_share_nothing_is_drawn() -> None:
    placement = SloAware(NO_TARGETS, lambda: pytest.fail("a number was drawn")).choose(
        [load("p0")], [load("d0", num_ahead=300)], REQUEST
    )
    assert placement is not None and placement.alternative is None
