"""Placement: the workers that serve a request, and that every request gets workers while there is a decode worker."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import LinkSpeed, MemberId, Role
from router.policies.candidates import RequestFacts, WorkerLoad, pairs
from router.policies.placement import (
    MAX_CONSIDERED,
    SECOND_LOOK_EVERY,
    SLOW_MARGIN_S,
    Importers,
    LeastLoaded,
    Placement,
    PlacementReason,
    PrefixAware,
    RoundRobin,
)


def load(name: str, assigned: int = 0, *, pairing: str = "a", others: int = 0) -> WorkerLoad:
    return WorkerLoad(MemberId(name, "1"), pairing, assigned, others)


def facts(*avoid: str) -> RequestFacts:
    return RequestFacts(10, 10, 1, frozenset(MemberId(name, "1") for name in avoid))


def names(placement: Placement | None) -> tuple[str | None, str]:
    assert placement is not None
    return placement.prefill.id if placement.prefill else None, placement.decode.id


def test_the_least_loaded_of_each_pool_form_the_pair() -> None:
    prefills, decodes = [load("p0", 3), load("p1", 1)], [load("d0", 2), load("d1", 5)]
    assert names(LeastLoaded().choose(prefills, decodes, facts())) == ("p1", "d0")


def test_load_from_other_routers_counts() -> None:
    decodes = [load("d0", 1, others=7), load("d1", 3)]
    assert names(LeastLoaded().choose([], decodes, facts())) == (None, "d1")


@pytest.mark.parametrize("role", [None, Role.BOTH, Role.DECODE])
def test_kv_that_a_worker_has_goes_to_a_worker_of_any_role(role: Role | None) -> None:
    importers, exporter = Importers(), load("exporter")
    target, other_format = replace(load("d0", 1), role=role), replace(load("d1", pairing="b"), role=role)
    for _ in range(3):  # turns are taken
        assert importers.choose(exporter, [target, other_format], facts()) == target.member
    assert importers.choose(exporter, [other_format], facts()) is None


def test_equal_pairs_are_chosen_in_turn() -> None:
    for chosen in (LeastLoaded(), PrefixAware(), RoundRobin()):
        prefills, decodes = [load("p0"), load("p1")], [load("d0"), load("d1"), load("d2")]
        pairs = [names(chosen.choose(prefills, decodes, facts())) for _ in range(12)]
        assert {name: sum(name in pair for pair in pairs) for name in ("p0", "p1")} == {"p0": 6, "p1": 6}
        assert {name: sum(name in pair for pair in pairs) for name in ("d0", "d1", "d2")} == {"d0": 4, "d1": 4, "d2": 4}


@pytest.mark.parametrize(("num_prefills", "num_decodes"), [(1, 3), (2, 2), (2, 4), (3, 2), (3, 3)])
def test_every_pair_of_equal_workers_has_its_turn_equally_often(num_prefills: int, num_decodes: int) -> None:
    prefills, decodes = [load(f"p{i}") for i in range(num_prefills)], [load(f"d{i}") for i in range(num_decodes)]
    num_pairs = num_prefills * num_decodes
    for chosen in (LeastLoaded(), PrefixAware(), RoundRobin()):
        pairs = [names(chosen.choose(prefills, decodes, facts())) for _ in range(3 * num_pairs)]
        assert sorted(Counter(pairs).values()) == [3] * num_pairs
        rounds = [{prefill for prefill, _ in pairs[i : i + num_prefills]} for i in range(0, len(pairs), num_prefills)]
        assert all(len(used) == num_prefills for used in rounds), "prefill workers take turns strictly"


def test_a_worker_that_left_and_came_back_is_chosen_before_those_that_had_their_turn() -> None:
    turns, decodes = RoundRobin(), [load("d0"), load("d1"), load("d2")]
    assert [names(turns.choose([], decodes, facts()))[1] for _ in range(4)] == ["d0", "d1", "d2", "d0"]
    assert names(turns.choose([], decodes[1:], facts()))[1] == "d1"
    assert [names(turns.choose([], decodes, facts()))[1] for _ in range(2)] == ["d0", "d2"]


def test_round_robin_ignores_load() -> None:
    turns, decodes = RoundRobin(), [load("d0", 100), load("d1")]
    assert [names(turns.choose([], decodes, facts()))[1] for _ in range(4)] == ["d0", "d1", "d0", "d1"]


def test_policies_without_predictions_keep_the_loads_that_they_compared_the_chosen_pair_first() -> None:
    prefills, decodes = [load("p0", 3), load("p1", 1)], [load("d0", 2)]
    request = replace(facts(), cached_tokens={MemberId("p1", "1"): 4})
    for policy, chosen in ((LeastLoaded(), "p1"), (PrefixAware(), "p1"), (RoundRobin(), "p0")):
        placement = policy.choose(prefills, decodes, request)
        assert placement is not None and placement.num_candidates == 2
        kept = {each.prefill.id: (each.depth, each.num_cached) for each in placement.considered if each.prefill}
        assert kept == {"p0": (5, 0), "p1": (3, 4)}
        assert placement.considered[0] is placement.chosen
        assert names(placement)[0] == chosen


def test_of_many_pairs_the_chosen_one_and_the_lightest_are_kept() -> None:
    decodes = [load(f"d{number}", 100 - number) for number in range(60)]
    placement = RoundRobin().choose([], decodes, facts())
    assert placement is not None and placement.num_candidates == 60
    assert [each.depth for each in placement.considered] == [100, *range(41, 41 + MAX_CONSIDERED - 1)]


def test_only_workers_with_equal_fingerprints_form_a_pair() -> None:
    prefills = [load("p0", pairing="a"), load("p1", 9, pairing="b")]
    decodes = [load("d1", 9, pairing="b")]
    assert names(LeastLoaded().choose(prefills, decodes, facts())) == ("p1", "d1")
    assert names(LeastLoaded().choose(prefills[:1], decodes, facts())) == (None, "d1")


def test_a_worker_that_failed_this_request_is_the_last_choice() -> None:
    prefills, decodes = [load("p0"), load("p1", 50)], [load("d0"), load("d1", 50)]
    assert names(LeastLoaded().choose(prefills, decodes, facts("p0", "d0"))) == ("p1", "d1")
    assert names(LeastLoaded().choose(prefills[:1], decodes[:1], facts("p0", "d0"))) == ("p0", "d0")


def measured(name: str, assigned: int = 0, **bytes_per_s: float) -> WorkerLoad:
    """Return a decode worker with these measured link speeds by exporter; a prompt of 10 tokens has 1 MB of KV."""
    links = [LinkSpeed(MemberId(exporter, "1"), "tcp", rate, 0.0) for exporter, rate in bytes_per_s.items()]
    return WorkerLoad(MemberId(name, "1"), "a", assigned, links=tuple(links), kv_bytes_per_token=1e5)


def chosen_of(prefills: list[WorkerLoad], decodes: list[WorkerLoad], times: int = 6) -> set[tuple[str | None, str]]:
    turns = LeastLoaded()
    return {names(turns.choose(prefills, decodes, facts())) for _ in range(times)}


def test_the_faster_of_equally_loaded_pairs_is_chosen() -> None:
    prefills = [load("p0"), load("p1")]
    assert chosen_of(prefills, [measured("d0", p0=1e7, p1=1e9)]) == {("p1", "d0")}
    assert chosen_of(prefills[:1], [measured("d0", p0=1e7), measured("d1", p0=1e9)]) == {("p0", "d1")}


def test_a_fast_link_does_not_outweigh_a_queue() -> None:
    assert chosen_of([load("p0")], [measured("d0", p0=1e7), measured("d1", 1, p0=1e9)]) == {("p0", "d0")}


def test_pairs_with_small_differences_of_speed_are_chosen_in_turn() -> None:
    prefills = [load("p0"), load("p1")]
    assert chosen_of(prefills, [measured("d0", p0=1e8, p1=1.7e8)]) == {("p0", "d0"), ("p1", "d0")}
    both_quick = [measured("d0", p0=1e6 / SLOW_MARGIN_S, p1=1e12)]  # one ten times the other, below the margin
    assert chosen_of(prefills, both_quick) == {("p0", "d0"), ("p1", "d0")}


def test_a_pair_without_a_measurement_is_tried() -> None:
    assert chosen_of([load("p0"), load("p1")], [measured("d0", p0=1e9)]) == {("p0", "d0"), ("p1", "d0")}
    assert chosen_of([load("p0"), load("p1")], [measured("d0", p0=1e7)]) == {("p0", "d0"), ("p1", "d0")}


def test_only_the_first_figure_of_an_exporter_counts() -> None:
    slow_way = LinkSpeed(MemberId("p0", "1"), "tcp", 1e3, 0.0)
    shm_first = measured("d0", p0=1e9)
    both = WorkerLoad(shm_first.member, "a", 0, links=(*shm_first.links, slow_way), kv_bytes_per_token=1e5)
    assert chosen_of([load("p0")], [both, measured("d1", p0=1e9)]) == {("p0", "d0"), ("p0", "d1")}


def test_latency_counts_for_short_prompts() -> None:
    near = WorkerLoad(MemberId("d0", "1"), "a", 0, links=(LinkSpeed(MemberId("p0", "1"), "tcp", 1e9, 0.0),))
    far = WorkerLoad(MemberId("d1", "1"), "a", 0, links=(LinkSpeed(MemberId("p0", "1"), "tcp", 1e9, 0.5),))
    assert chosen_of([load("p0")], [near, far]) == {("p0", "d0")}


def placements(prefills: list[WorkerLoad], decodes: list[WorkerLoad], times: int) -> list[tuple[str | None, str]]:
    chosen = LeastLoaded()
    return [names(chosen.choose(prefills, decodes, facts())) for _ in range(times)]


def test_a_slow_pair_is_tried_again_now_and_then() -> None:
    decodes = [measured("d0", p0=1e9, p1=1e7)]  # a millisecond, and a tenth of a second
    chosen = placements([load("p0"), load("p1")], decodes, 3 * SECOND_LOOK_EVERY)
    looks = [turn for turn, pair in enumerate(chosen) if pair == ("p1", "d0")]
    assert looks == [SECOND_LOOK_EVERY * n - 1 for n in (1, 2, 3)]


def test_slow_pairs_are_tried_in_turn() -> None:
    decodes = [measured("d0", p0=1e9, p1=1e7, p2=2e7)]
    chosen = placements([load("p0"), load("p1"), load("p2")], decodes, 4 * SECOND_LOOK_EVERY)
    assert [pair[0] for pair in chosen if pair[0] != "p0"] == ["p1", "p2", "p1", "p2"]


def test_no_client_waits_seconds_for_a_new_measurement() -> None:
    decodes = [measured("d0", p0=1e9, p1=5e5)]  # two seconds
    assert set(placements([load("p0"), load("p1")], decodes, 3 * SECOND_LOOK_EVERY)) == {("p0", "d0")}


def test_an_excluded_pair_is_not_chosen_while_there_is_another() -> None:
    d0, p0, p1 = MemberId("d0", "1"), MemberId("p0", "1"), MemberId("p1", "1")
    for chosen in (LeastLoaded(), PrefixAware(), RoundRobin()):
        facts = RequestFacts(10, 10, 1, excluded_pairs={(p0, d0)})
        assert names(chosen.choose([load("p0"), load("p1", 9)], [load("d0")], facts)) == ("p1", "d0")
        assert names(chosen.choose([load("p0")], [load("d0"), load("d1", 9)], facts)) == ("p0", "d1")
        avoiding = RequestFacts(10, 10, 1, frozenset({p1}), excluded_pairs={(p0, d0)})
        assert names(chosen.choose([load("p0"), load("p1")], [load("d0")], avoiding)) == ("p1", "d0")


def test_a_decode_worker_prefills_when_every_pair_is_excluded() -> None:
    pairs = {(MemberId("p0", "1"), MemberId(name, "1")) for name in ("d0", "d1")}
    facts = RequestFacts(10, 10, 1, excluded_pairs=pairs)
    assert names(LeastLoaded().choose([load("p0")], [load("d0", 3), load("d1")], facts)) == (None, "d1")


def cached(**tokens: int) -> RequestFacts:
    """Return a prompt of 100 tokens of which these prefill workers have cached the given numbers of tokens."""
    return RequestFacts(100, 10, 1, cached_tokens={MemberId(name, "1"): number for name, number in tokens.items()})


def test_a_prompt_goes_to_the_worker_with_its_longest_cached_prefix() -> None:
    prefills, chosen = [load("p0"), load("p1"), load("p2")], PrefixAware()
    for _ in range(3):
        assert names(chosen.choose(prefills, [load("d0")], cached(p1=64, p2=32))) == ("p1", "d0")


def test_a_cached_prefix_is_not_worth_a_longer_queue() -> None:
    decodes, facts = [load("d0")], cached(p1=96)
    assert names(PrefixAware().choose([load("p0"), load("p1", 1)], decodes, facts)) == ("p0", "d0")
    assert names(PrefixAware().choose([load("p0", 1), load("p1", 1)], decodes, facts)) == ("p1", "d0")


def test_a_worker_that_failed_the_request_is_not_chosen_for_its_prefix() -> None:
    facts = RequestFacts(100, 10, 1, frozenset({MemberId("p1", "1")}), {MemberId("p1", "1"): 96})
    assert names(PrefixAware().choose([load("p0"), load("p1")], [load("d0")], facts)) == ("p0", "d0")


def test_no_decode_worker_is_no_placement() -> None:
    assert LeastLoaded().choose([load("p0")], [], facts()) is None


def test_a_policy_names_what_decided() -> None:
    prefills, decodes = [load("p0"), load("p1")], [load("d0")]
    reasons = {
        PlacementReason.LOWEST_LOAD: LeastLoaded().choose(prefills, decodes, facts()),
        PlacementReason.CACHED_PREFIX: PrefixAware().choose(prefills, decodes, cached(p1=64)),
        PlacementReason.TURN: RoundRobin().choose(prefills, decodes, facts()),
        PlacementReason.ONLY_CANDIDATE: PrefixAware().choose(prefills[:1], decodes, facts()),
    }
    assert all(placement and placement.reason is reason for reason, placement in reasons.items())


def test_a_decode_worker_alone_is_a_fallback() -> None:
    alone = LeastLoaded().choose([], [load("d0")], facts())
    paired = LeastLoaded().choose([load("p0")], [load("d0")], facts())
    assert (alone and alone.is_fallback, paired and paired.is_fallback) == (True, False)


def of_both(*names: str) -> list[WorkerLoad]:
    return [replace(load(name), role=Role.BOTH) for name in names]


def test_workers_of_both_roles_move_no_kv_between_them() -> None:
    both = of_both("b0", "b1")
    for policy in (LeastLoaded(), PrefixAware(), RoundRobin()):
        placements = [policy.choose(both, both, facts()) for _ in range(4)]
        assert {names(placement) for placement in placements} == {(None, "b0"), (None, "b1")}
        assert all(placement and not placement.is_fallback for placement in placements)


def test_a_worker_of_both_roles_takes_either_part_beside_workers_of_one_role() -> None:
    prefill, decode = (replace(load(role[0], 0), role=Role(role)) for role in ("prefill", "decode"))
    both = of_both("b")
    found = pairs([prefill, *both], [decode, *both], facts())
    assert {(p.member.id if p else None, d.member.id) for p, d in found} == {
        ("p", "d"),
        ("b", "d"),
        ("p", "b"),
        (None, "b"),
    }


def test_a_worker_that_failed_the_request_is_not_paired_where_one_of_both_roles_can_serve_it_alone() -> None:
    prefill, both = load("p"), of_both("b0", "b1")
    found = pairs([prefill, *both], both, facts("p", "b0"))
    assert {(p, d.member.id) for p, d in found} == {(None, "b1")}


_LOADS = st.lists(
    st.builds(load, st.sampled_from([f"w{i}" for i in range(5)]), st.integers(0, 9), pairing=st.sampled_from("ab")),
    max_size=5,
    unique_by=lambda worker: worker.member,
)


@given(
    prefills=_LOADS,
    decodes=_LOADS,
    cached=st.dictionaries(st.sampled_from([f"w{i}" for i in range(5)]), st.integers(1, 9)),
    excluded=st.sets(st.tuples(st.sampled_from(["w0", "w1"]), st.sampled_from(["w1", "w2"]))),
)
def test_the_chosen_pair_costs_least_of_all_pairs(
    prefills: list[WorkerLoad], decodes: list[WorkerLoad], cached: dict[str, int], excluded: set[tuple[str, str]]
) -> None:
    held = {MemberId(name, "1"): number for name, number in cached.items()}
    barred = {(MemberId(prefill, "1"), MemberId(decode, "1")) for prefill, decode in excluded}
    request = RequestFacts(10, 10, 1, cached_tokens=held, excluded_pairs=barred)
    handoffs = [
        (p, d)
        for p in prefills
        for d in decodes
        if p.kv_format == d.kv_format and p.member != d.member and (p.member, d.member) not in barred
    ]
    assert {(p.member, d.member) for p, d in pairs(prefills, decodes, request) if p} == {
        (p.member, d.member) for p, d in handoffs
    }
    for policy in (LeastLoaded(), PrefixAware()):
        counted = held if isinstance(policy, PrefixAware) else {}
        costs = {(p.member, d.member): p.depth + d.depth - counted.get(p.member, 0) / 10 for p, d in handoffs}
        placement = policy.choose(prefills, decodes, request)
        if placement is not None and placement.prefill is not None:
            assert costs[placement.prefill, placement.decode] == pytest.approx(min(costs.values()))


@given(prefills=_LOADS, decodes=_LOADS, avoid=st.sets(st.sampled_from(["w0", "w1", "w2"])))
def test_a_placement_is_always_a_pair_that_was_offered(
    prefills: list[WorkerLoad], decodes: list[WorkerLoad], avoid: set[str]
) -> None:
    for chosen in (LeastLoaded(), PrefixAware()):
        placement = chosen.choose(prefills, decodes, facts(*avoid))
        assert (placement is None) == (not decodes)
        if placement is not None:
            decode = next(worker for worker in decodes if worker.member == placement.decode)
            if placement.prefill is not None:
                prefill = next(worker for worker in prefills if worker.member == placement.prefill)
                assert prefill.kv_format == decode.kv_format
