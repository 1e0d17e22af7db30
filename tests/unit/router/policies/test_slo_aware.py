"""The policy `auto`: latency targets first, then time to first token, then later tokens, then the KV to move."""

import math
import random
from collections import Counter
from dataclasses import fields, replace

import pytest

from cluster.messages import LinkSpeed, MemberId, Role
from cluster.outstanding_work import PromptWork
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes, StepLimit
from cluster.settings.config import RouterConfig
from router.policies import candidates
from router.policies.candidates import NO_TARGETS, RequestFacts, SloTargets, WorkerLoad
from router.policies.placement import (
    MAX_CONSIDERED,
    LeastLoaded,
    Placement,
    PlacementReason,
    PrefixAware,
    RoundRobin,
)
from router.policies.prediction.recent_prompts import RecentPrompts
from router.policies.prediction.work_ahead import PromptQueue, SequenceBatch, WorkAhead
from router.policies.slo_aware import SloAware, policy

TIMES = ServiceTimes(PrefillTimes(0.0, 0.001, 0.0, 0.0), DecodeTimes(0.01, 0.001, 0.0, 0.0))
REQUEST = RequestFacts(num_prompt_tokens=400, max_tokens=41, num_choices=1, expected_output=41.0)


def load(name: str, *, num_ahead: int = 0, running: int = 0, left: float = 1000.0, slower: float = 1.0) -> WorkerLoad:
    times = replace(TIMES, prefill=PrefillTimes(0.0, 0.001 * slower, 0.0, 0.0))
    prompts = PromptQueue(PromptWork(num_ahead, 0.0), PromptWork(num_ahead, 0.0))
    batch = SequenceBatch(num_running=running, context=100 * running, left=left)
    return WorkerLoad(MemberId(name, "1"), "a", 0, work=WorkAhead(times, prompts, batch), kv_bytes_per_token=100.0)


def choose(
    prefills: list[WorkerLoad],
    decodes: list[WorkerLoad],
    request: RequestFacts = REQUEST,
    targets: SloTargets = NO_TARGETS,
) -> Placement:
    policy = SloAware(targets, random.Random(1).random)
    policy._arrangements._has_begun = True  # workers help each other; no other arrangement is learned
    placement = policy.choose(prefills, decodes, request)
    assert placement is not None
    return placement


def names(placement: Placement) -> tuple[str | None, str]:
    return placement.prefill.id if placement.prefill else None, placement.decode.id


def test_a_placement_repeats_no_prediction_that_the_early_refusal_made() -> None:
    auto, prefills, decodes = policy("auto", NO_TARGETS, draw=random.Random(1).random), [load("p0")], [load("d0")]
    known = auto.predict(auto.ways(prefills, decodes, REQUEST), REQUEST)
    placement = auto.choose(prefills, decodes, REQUEST)
    assert known is not None and placement is not None and placement.chosen is not None
    assert any(placement.chosen.prediction is each for each in known)

    busier = auto.choose([load("p0", num_ahead=500)], [load("d0", num_ahead=500)], REQUEST)  # predicted anew
    assert busier is not None and busier.chosen is not None and busier.chosen.prediction not in known


def test_the_candidate_with_the_earliest_first_token_is_chosen() -> None:
    placement = choose([load("p0", num_ahead=900), load("p1")], [load("d0", num_ahead=500)])
    assert (names(placement), placement.reason) == (("p1", "d0"), PlacementReason.TTFT)


def test_a_decode_worker_computes_the_prompt_where_that_is_sooner_than_after_the_prefill_queue() -> None:
    placement = choose([load("p0", num_ahead=900)], [load("d0", running=2)])
    assert (names(placement), placement.is_fallback) == ((None, "d0"), False)


def test_the_holder_of_the_prefix_does_it_all_where_that_is_soonest() -> None:
    request = replace(REQUEST, cached_tokens={MemberId("d1", "1"): 390})
    assert names(choose([load("p0")], [load("d0"), load("d1")], request)) == (None, "d1")


def test_a_faster_worker_may_have_more_work_ahead() -> None:
    prefills = [load("slow", slower=4.0), load("fast", num_ahead=800)]
    assert names(choose(prefills, [load("d0", num_ahead=9000)])) == ("fast", "d0")


def test_equal_first_tokens_are_decided_by_the_delay_of_later_tokens() -> None:
    placement = choose([load("p0")], [load("d0", running=8), load("d1", running=1)])
    assert (names(placement), placement.reason) == (("p0", "d1"), PlacementReason.TOKEN_DELAY)


def test_a_candidate_that_misses_a_target_is_chosen_only_if_all_do() -> None:
    prefills, decodes = [load("p0", num_ahead=200)], [load("d0", running=4, left=40.0)]
    without = choose(prefills, decodes)
    assert names(without) == (None, "d0")
    protected = choose(prefills, decodes, targets=SloTargets(ttft_s=1.0, itl_s=0.02))
    assert (names(protected), protected.reason) == (("p0", "d0"), PlacementReason.SLO)
    hopeless = choose(prefills, decodes, targets=SloTargets(ttft_s=0.1))
    assert names(hopeless) == (None, "d0")
    assert all(candidate.num_violations for candidate in hopeless.considered)


def test_a_prediction_just_below_a_target_is_not_as_good_as_one_far_below() -> None:
    prefills, decodes = [load("p0", num_ahead=1000), load("p1", num_ahead=700)], [load("d0", num_ahead=9000)]
    placement = choose(prefills, decodes, targets=SloTargets(ttft_s=1.5))
    assert placement.chosen is not None and placement.chosen.num_violations == 0
    assert (names(placement), placement.reason) == (("p1", "d0"), PlacementReason.SLO)


def test_one_late_request_is_better_than_many_slow_ones() -> None:
    """Whichever worker computes the prompt, some target is missed: the request's, or those of eight sequences."""
    prefills, decodes = [load("p0", num_ahead=3000)], [load("d0", running=8, left=20.0)]
    placement = choose(prefills, decodes, targets=SloTargets(ttft_s=1.0, itl_s=0.022))
    assert names(placement) == ("p0", "d0")


def in_role(worker: WorkerLoad, role: Role) -> WorkerLoad:
    return replace(worker, role=role)


def test_a_worker_leaves_its_role_where_a_target_would_be_missed_otherwise() -> None:
    decodes = [in_role(load("d0"), Role.DECODE)]
    targets = SloTargets(ttft_s=1.0, itl_s=0.05)
    for num_ahead, chosen in ((300, ("p0", "d0")), (2000, (None, "d0"))):
        prefills = [in_role(load("p0", num_ahead=num_ahead), Role.PREFILL)]
        assert names(choose(prefills, decodes, targets=targets)) == chosen


def test_a_prefill_worker_decodes_its_own_prompt_if_a_target_would_be_missed_otherwise() -> None:
    prefills = [in_role(load("p0"), Role.PREFILL)]
    targets = SloTargets(ttft_s=1.0, itl_s=0.05)
    for running, chosen in ((1, ("p0", "d0")), (200, (None, "p0"))):
        decodes = [in_role(load("d0", running=running), Role.DECODE)]
        placement = choose(prefills, decodes, targets=targets)
        assert names(placement) == chosen
        assert placement.num_candidates == 3  # the pair, and each worker alone
    assert choose(prefills, decodes).num_candidates == 2  # without targets workers keep their roles


def test_an_idle_moment_of_one_prefill_worker_does_not_hide_how_many_prompts_its_pool_computes() -> None:
    """The request would decode there for seconds, while more prompts come."""
    targets, decodes = SloTargets(ttft_s=1.0, itl_s=0.02), [in_role(load("d0", running=9), Role.DECODE)]

    def chosen(computing_s: float) -> tuple[str | None, str]:
        busy, idle = load("p0", num_ahead=900), load("p1")
        assert busy.work is not None
        recent = RecentPrompts(number=10 * computing_s, computing_s=computing_s, seconds=20.0)
        busy = replace(busy, work=replace(busy.work, recent=recent, step_limit=StepLimit()))
        return names(choose([in_role(busy, Role.PREFILL), in_role(idle, Role.PREFILL)], decodes, targets=targets))

    assert chosen(0.0) == (None, "p1")
    assert chosen(16.0) == ("p1", "d0")


def test_a_worker_of_both_roles_alone_is_no_fallback() -> None:
    both = [in_role(load("b0"), Role.BOTH)]
    placement = choose(both, both)
    assert (names(placement), placement.is_fallback) == ((None, "b0"), False)


def test_a_request_that_only_a_prefill_worker_can_hold_is_served_there() -> None:
    prefills = [in_role(load("p0"), Role.PREFILL)]
    decodes = [in_role(load("d0"), Role.DECODE)]
    request = replace(REQUEST, too_small={decodes[0].member})
    assert names(choose(prefills, decodes, request, SloTargets(ttft_s=1.0))) == (None, "p0")


def test_targets_of_the_request_go_before_those_of_the_router() -> None:
    prefills, decodes = [load("p0", num_ahead=200)], [load("d0", running=4)]
    strict, loose = SloTargets(ttft_s=0.5), SloTargets(ttft_s=60.0)
    assert choose(prefills, decodes, targets=loose).considered[-1].num_violations == 0
    own = choose(prefills, decodes, replace(REQUEST, targets=strict), loose)
    assert own.considered[-1].num_violations == 1


def test_equals_are_drawn_evenly() -> None:
    policy = SloAware(NO_TARGETS, random.Random(3).random)
    decodes = [load(f"d{number}", num_ahead=9000) for number in range(4)]
    drawn = Counter(names(found) for _ in range(400) if (found := policy.choose([load("p0")], decodes, REQUEST)))
    assert len(drawn) == 4 and min(drawn.values()) > 60
    assert choose([load("p0")], decodes).reason is PlacementReason.TIE


@pytest.mark.parametrize("targets", [NO_TARGETS, SloTargets(1.0, 0.05)])
def test_equals_of_a_large_fleet_are_all_drawn(targets: SloTargets) -> None:
    """Only some of the workers are compared, and their speeds are measured, so they differ a little."""
    speeds = random.Random(5)
    workers = [replace(load(f"w{n}", slower=speeds.uniform(0.999, 1.001)), role=Role.BOTH) for n in range(16)]
    auto = SloAware(targets, random.Random(3).random)
    drawn = Counter(found.decode.id for _ in range(400) if (found := auto.choose(workers, workers, REQUEST)))
    assert len(drawn) == 16 and min(drawn.values()) >= 10


def test_equal_seeds_draw_equally() -> None:
    decodes = [load(f"d{number}") for number in range(4)]
    one, other = (SloAware(NO_TARGETS, random.Random(5).random) for _ in range(2))
    assert [one.choose([], decodes, REQUEST) for _ in range(20)] == [
        other.choose([], decodes, REQUEST) for _ in range(20)
    ]


def test_every_candidate_is_kept_with_its_prediction_the_best_one_first() -> None:
    placement = choose([load("p0"), load("p1", num_ahead=900)], [load("d0", num_ahead=300)])
    assert [(c.prefill.id if c.prefill else None, c.decode.id) for c in placement.considered] == [
        ("p0", "d0"),
        (None, "d0"),
        ("p1", "d0"),
    ]
    assert [c.prediction.ttft_s for c in placement.considered if c.prediction] == pytest.approx([0.4, 0.7, 1.3])
    assert placement.chosen is placement.considered[0]
    assert placement.num_candidates == 3


def test_of_many_candidates_the_best_are_kept_and_always_the_best_worker_alone() -> None:
    prefills = [load(f"p{number}", num_ahead=10 * number) for number in range(30)]
    placement = choose(prefills, [load("d0", num_ahead=9000)])
    assert (placement.num_candidates, len(placement.considered)) == (31, MAX_CONSIDERED)
    assert [c.prefill.id if c.prefill else None for c in placement.considered[-2:]] == ["p14", None]


def test_a_worker_that_failed_this_request_is_the_last_choice_of_every_kind() -> None:
    request = replace(REQUEST, avoid=frozenset({MemberId("p0", "1")}))
    assert names(choose([load("p0")], [load("d0", num_ahead=9000)], request)) == (None, "d0")
    request = replace(REQUEST, avoid=frozenset({MemberId("d0", "1")}))
    assert choose([load("p0")], [load("d0")], request).considered


def test_without_a_pair_the_choice_is_a_fallback() -> None:
    request = replace(REQUEST, excluded_pairs={(MemberId("p0", "1"), MemberId("d0", "1"))})
    placement = choose([load("p0")], [load("d0")], request)
    assert (names(placement), placement.is_fallback) == ((None, "d0"), True)
    assert placement.reason is PlacementReason.ONLY_CANDIDATE


def test_a_worker_is_never_paired_with_itself() -> None:
    both = load("w0")
    assert names(choose([both], [both])) == (None, "w0")


def test_while_a_speed_is_unknown_load_and_prefix_decide() -> None:
    unknown = WorkerLoad(MemberId("p1", "1"), "a", 0)
    placement = choose([replace(load("p0"), assigned=5), unknown], [load("d0")])
    assert (names(placement), placement.reason) == (("p1", "d0"), PlacementReason.UNKNOWN_SPEED)
    assert all(candidate.prediction is None for candidate in placement.considered)


def test_every_policy_that_can_be_configured_exists() -> None:
    (setting,) = (field for field in fields(RouterConfig) if field.name == "placement")
    kinds = {type(policy(name, NO_TARGETS, random.random)) for name in setting.metadata["choices"]}
    assert kinds == {SloAware, PrefixAware, LeastLoaded, RoundRobin}


def test_no_worker_no_placement() -> None:
    assert SloAware(NO_TARGETS, random.random).choose([load("p0")], [], REQUEST) is None


def test_a_random_fleet_is_never_served_worse_than_the_best_static_arm_predicts() -> None:
    """The policy chooses among all candidates, so it is at least as good as always pairing and as never pairing."""
    draws = random.Random(7)
    for _ in range(200):
        prefills, decodes = (
            [load(f"{role}{n}", num_ahead=draws.randrange(2000), running=draws.randrange(5)) for n in range(3)]
            for role in "pd"
        )
        placement = choose(prefills, decodes)
        ttfts_s = [candidate.prediction.ttft_s for candidate in placement.considered if candidate.prediction]
        assert len(ttfts_s) == placement.num_candidates
        assert ttfts_s[0] <= min(ttfts_s) * 1.02 + 0.001


def random_fleet(draws: random.Random, role: Role, number: int) -> list[WorkerLoad]:
    """Return workers with prompts and sequences, some of them none."""
    loads = []
    for n in range(number):
        waiting = [PromptWork.of(draws.choice([64, 512, 2048]), 0) for _ in range(draws.choice([0, 0, 1, 2, 4, 8]))]
        running, joining = draws.choice([0, 1, 4, 16, 40, 60]), draws.choice([0, 0, len(waiting)])
        prompts = PromptQueue(sum(waiting, PromptWork()), waiting[0]) if waiting else PromptQueue()
        batch = SequenceBatch(running, joining, (running + joining) * draws.choice([100, 800, 2000]), 100.0)
        work = WorkAhead(TIMES, prompts, batch, max_running=64, step_limit=StepLimit())
        loads.append(WorkerLoad(MemberId(f"{role}{n}", "1"), "a", 0, work=work, role=role, kv_bytes_per_token=2e4))
    return loads


@pytest.mark.parametrize("targets", [NO_TARGETS, SloTargets(1.0, 0.05)])
def test_in_a_large_fleet_few_candidates_are_predicted_and_the_best_one_is_rarely_left_out(
    targets: SloTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, num_worse = random.Random(11), 0
    for _ in range(12):
        prefills, decodes = random_fleet(draws, Role.PREFILL, 14), random_fleet(draws, Role.DECODE, 14)
        link = [LinkSpeed(load.member, "tcp", draws.choice([1e8, 1e9, 1e10]), 0.001) for load in prefills]
        decodes = [replace(decode, links=tuple(draws.sample(link, 7))) for decode in decodes]
        cached = {draws.choice([*prefills, *decodes]).member: draws.choice([256, 500]) for _ in range(4)}
        request = replace(REQUEST, num_prompt_tokens=draws.choice([64, 512, 2048]), cached_tokens=cached)
        few = choose(prefills, decodes, request, targets)
        with monkeypatch.context() as patched:
            patched.setattr(candidates, "_MAX_PAIRS", math.inf)
            patched.setattr(candidates, "_MAX_ALONE", math.inf)
            every = choose(prefills, decodes, request, targets)
        assert few.num_candidates <= 36 + 6 < 14 * 14 < every.num_candidates
        best, best_of_all = few.considered[0], every.considered[0]
        assert best.prediction is not None and best_of_all.prediction is not None
        misses_more = best.expected_misses > best_of_all.expected_misses + 0.05
        is_later = best.prediction.ttft_s > 1.05 * best_of_all.prediction.ttft_s + 0.001
        num_worse += misses_more or (is_later and targets is NO_TARGETS)
    assert num_worse <= 1


def test_a_large_fleet_finds_the_only_pair_that_is_not_excluded() -> None:
    prefills, decodes = [load(f"p{n}", num_ahead=n) for n in range(20)], [load(f"d{n}", running=n) for n in range(20)]
    last = prefills[-1].member, decodes[-1].member
    excluded = {(p.member, d.member) for p in prefills for d in decodes} - {last}
    placement = SloAware(NO_TARGETS, lambda: 0.0).ways(prefills, decodes, replace(REQUEST, excluded_pairs=excluded))
    assert [(p.member, d.member) for p, d in placement if p is not None] == [last]


def test_a_large_fleet_of_two_kv_formats_compares_pairs_of_both() -> None:
    old = [load(f"p{n}") for n in range(20)]
    new = [replace(load(f"q{n}", num_ahead=900), kv_format="b") for n in range(20)]
    decodes = [replace(load(f"d{n}", running=n), kv_format="b") for n in range(20)]
    placement = choose([*old, *new], decodes)
    assert any(candidate.is_pair for candidate in placement.considered)
