"""Whether workers keep their roles or serve whole requests is learned from a replay of the recent requests."""

import itertools
import math
from dataclasses import replace
from random import Random

import pytest

from benchmarks.placement.workload import Workload, poisson_arrivals
from benchmarks.placement_simulated import SETTING, TIMES
from cli.load import Arrival
from cluster.messages import MemberId, Role
from cluster.outstanding_work import PromptWork
from cluster.service_times import StepLimit
from router.policies.arrangement import Arrangement, Arrangements, _better, _every, _scale
from router.policies.candidates import RequestFacts, WorkerLoad
from router.policies.placement import PrefixAware
from router.policies.prediction.work_ahead import SequenceBatch, WorkAhead
from router.policies.replay import PastRequest, _EqualSteps, _Live, kept_alone, kept_by_role, random_traffic, traffic
from router.policies.replay import _Replayed as Replayed
from router.policies.slo_aware import SloAware
from tests.unit.benchmarks.test_simulated_placement import COLOCATED, SEPARATE, Arm, attainment, run, targets_of

BUSY_PROMPTS, BUSY_BOTH = (Workload(2048, 16), 0.68), (Workload(512, 128), 3.2)
CLEAR = [(BUSY_PROMPTS, Arrangement.ALONE), (BUSY_BOTH, Arrangement.BY_ROLE)]


def worker(role: Role, others: int = 0) -> WorkerLoad:
    work = WorkAhead(TIMES, max_running=64, step_limit=SETTING.step_limit)
    return WorkerLoad(MemberId(str(role), "1"), "a", 4, others=others, work=work, role=role)


PAIR = [worker(Role.PREFILL), worker(Role.DECODE)]


def fleet(*roles: Role) -> list[WorkerLoad]:
    return [replace(worker(role), member=MemberId(f"w{i:03}", "1")) for i, role in enumerate(roles)]


def arrivals(workload: Workload, rate_rps: float, count: int = 120) -> list[Arrival]:
    return list(poisson_arrivals(workload, rate_rps, count, Random(f"{workload} {rate_rps} 1")))


def past(workload: Workload, rate_rps: float, count: int = 120) -> list[PastRequest]:
    targets = targets_of(workload)
    return [
        PastRequest(one.at_s, PromptWork.of(one.prompt_tokens, 0), one.prompt_tokens, one.output_tokens, targets)
        for one in arrivals(workload, rate_rps, count)
    ]


def learned(
    workload: Workload, rate_rps: float, workers: list[WorkerLoad] = PAIR, count: int = 240
) -> tuple[Arrangements, list[Arrangement]]:
    arrangements, changes = Arrangements(), []
    for request in past(workload, rate_rps, count):
        if arrangements.placed(request, workers):
            changes.append(arrangements.current)
    return arrangements, changes


def replayed(workload: Workload, rate_rps: float) -> tuple[float, float]:
    requests, kept = traffic(past(workload, rate_rps), 1.0, 1.0, 120), list[float]()
    for replay in (kept_by_role(requests, PAIR[:1], PAIR[1:]), kept_alone(requests, PAIR)):
        try:
            while True:
                next(replay)
        except StopIteration as ended:
            kept.append(ended.value)
    return kept[0], kept[1]


@pytest.mark.parametrize(
    ("workload", "rate_rps"), [BUSY_PROMPTS, (Workload(64, 16), 18.0), pytest.param(*BUSY_BOTH, marks=pytest.mark.slow)]
)
def test_a_replay_keeps_as_many_targets_as_the_scheduler_with_the_same_arrangement(
    workload: Workload, rate_rps: float
) -> None:
    def simulated(arm: Arm) -> float:
        return attainment(run(PrefixAware(), arm, workload, rate_rps, seed=1), targets_of(workload))

    by_role, alone = replayed(workload, rate_rps)
    assert by_role == pytest.approx(simulated(SEPARATE), abs=0.15)
    assert alone == pytest.approx(simulated(COLOCATED), abs=0.15)


@pytest.mark.parametrize(
    ("traffic", "arrangement"),
    [
        (BUSY_PROMPTS, Arrangement.ALONE),
        (BUSY_BOTH, Arrangement.BY_ROLE),
        ((Workload(512, 64), 0.5), Arrangement.MIXED),
    ],
)
def test_the_arrangement_that_keeps_clearly_more_targets_is_learned(
    traffic: tuple[Workload, float], arrangement: Arrangement
) -> None:
    arrangements, changes = learned(*traffic)
    assert arrangements.current is arrangement
    assert changes == ([] if arrangement is Arrangement.MIXED else [arrangement]), "it does not change back and forth"


def test_an_arrangement_is_kept_until_it_is_no_longer_better() -> None:
    assert _better(0.0, -0.1, Arrangement.MIXED) is Arrangement.MIXED
    assert _better(0.0, -0.2, Arrangement.MIXED) is Arrangement.ALONE
    assert _better(0.0, 0.0, Arrangement.ALONE) is Arrangement.ALONE
    assert _better(0.2, 0.4, Arrangement.ALONE) is Arrangement.MIXED
    assert _better(0.3, 0.2, Arrangement.ALONE) is Arrangement.BY_ROLE
    assert _better(0.0, 0.0, Arrangement.BY_ROLE) is Arrangement.BY_ROLE
    assert _better(0.0, -0.1, Arrangement.BY_ROLE) is Arrangement.MIXED


def test_few_requests_are_repeated_at_the_rate_at_which_they_came() -> None:
    requests = [replace(each, placed_s=10.0 + i) for i, each in enumerate(past(Workload(8, 4), 1.0, 6))]
    placed_s, repeated = zip(*traffic(requests, 1.0, 1.0, 15), strict=True)
    assert placed_s == pytest.approx([float(i) for i in range(15)])
    assert repeated == (*requests, *requests, *requests[:3])
    assert [each for _, each in traffic(requests, 2.0, 1.0, 9)] == [*requests[::2], *requests[1::2], *requests[::2]]
    halved_s, _ = zip(*traffic(requests, 2.0, 0.5, 9), strict=True)
    assert halved_s[:3] == (0.0, 1.0, 2.0), "a router with half of the requests sees every second one"


def test_requests_of_an_assumed_load_come_at_random_times_and_have_the_lengths_of_those_that_are_known() -> None:
    known = past(Workload(8, 4), 1.0, 2)
    placed_s, requests = zip(*random_traffic(known, 0.5, 400), strict=True)
    assert requests == (*known,) * 200
    gaps = [after - before for before, after in itertools.pairwise(placed_s)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.5, rel=0.1)
    assert sum(gap < 0.25 for gap in gaps) / len(gaps) == pytest.approx(1 - math.exp(-0.5), abs=0.05)


@pytest.mark.parametrize("num_workers", [2, 8])
def test_the_first_request_is_placed_as_workers_keep_most_targets_of_its_lengths(num_workers: int) -> None:
    def placed(prompt: int, output: int) -> tuple[bool, SloAware]:
        policy, both = (
            SloAware(targets_of(Workload(prompt, output)), Random(1).random),
            fleet(*[Role.BOTH] * num_workers),
        )
        placement = policy.choose(both, both, RequestFacts(prompt, output, 1, expected_output=output))
        assert placement is not None
        return placement.prefill is not None, policy

    assert placed(512, 128)[0], "prompts would disturb the sequences"
    is_pair, policy = placed(64, 128)
    assert not is_pair, "a worker would compute prompts for a part of the time only"
    both, request = fleet(*[Role.BOTH] * num_workers), RequestFacts(64, 128, 1, expected_output=128)
    changed = policy.placed(both, both, request, 0.0)
    assert changed is (Arrangement.ALONE if num_workers == 2 else None), "the first choice is reported too"
    assert policy.placed(both, both, request, 0.1) is None


def test_two_workers_of_both_roles_help_each_other_with_roles_where_neither_arrangement_is_clearly_better() -> None:
    workers = fleet(Role.BOTH, Role.BOTH)
    arrangements, _ = learned(Workload(512, 64), 0.5, workers)
    assert arrangements.current is Arrangement.MIXED
    assert [arrangements.role_of(load) for load in workers] == [Role.PREFILL, Role.DECODE]


def test_among_workers_without_roles_the_least_loaded_one_serves_even_if_one_misses_its_targets_anyway() -> None:
    targets, sizes = targets_of(Workload(64, 128)), (24, 10, 9, 10)
    policy, loads = SloAware(targets, Random(1).random), fleet(*[Role.BOTH] * len(sizes))
    policy._arrangements._has_begun = True
    batches = [SequenceBatch(num_running=size, context=size * 128, left=64.0) for size in sizes]
    works = [WorkAhead(TIMES, batch=batch, max_running=64, step_limit=StepLimit(targets.itl_s)) for batch in batches]
    loads = [replace(load, work=work) for load, work in zip(loads, works, strict=True)]
    placement = policy.choose(loads, loads, RequestFacts(64, 128, 1, expected_output=128.0))
    assert placement is not None and (placement.prefill, placement.decode) == (None, loads[2].member)


def test_sixteen_workers_of_both_roles_share_the_roles_only_where_eight_would() -> None:
    workers = fleet(*[Role.BOTH] * 16)  # replayed are three times fewer, so that one of them computes prompts
    arrangements, _ = learned(Workload(64, 128), 52.5, workers, count=64)
    assert {arrangements.role_of(load) for load in workers} == {Role.BOTH}


def test_what_would_fail_first_is_learned_from_the_first_requests_that_miss_no_target() -> None:
    eight = fleet(*[Role.BOTH] * 8)
    by_role, _ = learned(Workload(512, 128), 8.7, eight, count=48)
    assert {by_role.role_of(load) for load in eight} == {Role.PREFILL, Role.DECODE}
    alone, _ = learned(Workload(64, 128), 26.0, fleet(*4 * (Role.PREFILL, Role.DECODE)), count=64)
    assert alone.current is Arrangement.ALONE


def test_workers_of_both_roles_hand_over_nothing_to_each_other_unless_they_share_the_work_by_roles() -> None:
    policy, both = SloAware(targets_of(BUSY_BOTH[0]), Random(1).random), fleet(Role.BOTH, Role.BOTH)
    request = RequestFacts(64, 16, 1)
    assert {prefill for prefill, _ in policy.ways(both, both, request)} == {None}
    decoding = fleet(Role.BOTH, Role.DECODE)
    assert (decoding[0], decoding[1]) in policy.ways(decoding[:1], decoding, request)
    policy._arrangements = learned(*BUSY_BOTH, both)[0]
    assert (both[0], both[1]) in policy.ways(both, both, request)


def test_requests_of_other_routers_count_by_the_work_that_the_workers_have_of_them() -> None:
    workload, rate_rps = BUSY_PROMPTS
    assert learned(workload, rate_rps / 4)[0].current is Arrangement.MIXED
    shared = [replace(load, others=12 + 1) for load in PAIR]  # beside this router's 4, and the request being placed
    assert learned(workload, rate_rps / 4, shared)[0].current is Arrangement.ALONE


@pytest.mark.parametrize(("traffic", "arrangement"), CLEAR)
def test_workers_of_both_roles_learn_the_same_arrangement_as_those_of_one_role(
    traffic: tuple[Workload, float], arrangement: Arrangement
) -> None:
    for roles in ((Role.BOTH, Role.BOTH), (Role.BOTH, Role.DECODE), (Role.PREFILL, Role.BOTH)):
        arrangements, workers = learned(*traffic, fleet(*roles))[0], fleet(*roles)
        assert arrangements.current is arrangement
        is_shared = {arrangements.role_of(load) for load in workers} == {Role.PREFILL, Role.DECODE}
        assert is_shared == (arrangement is Arrangement.BY_ROLE), "a role only where it keeps more targets"


def test_of_workers_of_both_roles_as_many_compute_prompts_as_the_requests_need() -> None:
    def roles(workload: Workload, rate_rps: float, workers: list[WorkerLoad]) -> list[Role | None]:
        known = learned(workload, rate_rps, workers)[0]._roles
        return [known.get(load.member, load.role) for load in workers]

    both = fleet(*[Role.BOTH] * 8)
    long_prompts, long_outputs = roles(Workload(2048, 16), 3.0, both), roles(Workload(64, 128), 12.0, both)
    assert long_prompts == [Role.PREFILL] * 7 + [Role.DECODE]
    assert long_outputs in [[Role.PREFILL] * number + [Role.DECODE] * (8 - number) for number in (1, 2)]
    assert roles(Workload(2048, 16), 3.0, both[::-1]) == long_prompts[::-1], "every router draws the same line"
    mixed = fleet(Role.DECODE, *[Role.BOTH] * 6, Role.PREFILL)
    of_mixed = roles(Workload(64, 128), 12.0, mixed)
    assert of_mixed[0] is Role.DECODE and of_mixed[-1] is Role.PREFILL, "operators' roles count"
    assert of_mixed.count(Role.DECODE) in (6, 7)


def test_a_single_worker_of_both_roles_has_no_other() -> None:
    both = fleet(Role.BOTH, Role.BOTH)
    single, _ = learned(*BUSY_PROMPTS, both[:1])
    assert single.role_of(both[0]) is Role.BOTH and single.current is Arrangement.MIXED


@pytest.mark.parametrize(("traffic", "arrangement"), CLEAR)
def test_a_large_cluster_learns_from_a_sample_of_its_workers(
    traffic: tuple[Workload, float], arrangement: Arrangement
) -> None:
    workload, rate_rps = traffic
    separate = fleet(*32 * (Role.PREFILL, Role.DECODE))
    arrangements, changes = learned(workload, 40 * rate_rps, separate, count=800)
    assert arrangements.current is arrangement
    assert changes == [arrangement], "it does not change back and forth"


@pytest.mark.parametrize("pools", [(1, 1), (4, 4), (7, 5), (32, 32), (60, 4), (63, 1), (100, 28)])
def test_a_sample_has_the_shares_of_roles_and_the_speeds_of_all(pools: tuple[int, int]) -> None:
    scale, sample = _scale(*pools), []
    for number in pools:
        times = [replace(TIMES, prefill=replace(TIMES.prefill, per_token_s=0.001 * (i + 1))) for i in range(number)]
        loads = [replace(PAIR[0], work=WorkAhead(each)) for each in reversed(times)]
        sample.append(_every(scale, loads))
        speeds = [load.work.times.prefill.per_token_s for load in sample[-1] if load.work is not None]
        assert sum(speeds) / len(speeds) == pytest.approx(0.001 * (number + 1) / 2, rel=0.25)
    assert len(sample[0]) / len(sample[1]) == pytest.approx(pools[0] / pools[1], rel=0.2)
    assert sum(map(len, sample)) <= max(8, pools[0] / pools[1] + 1)


def test_each_choice_of_a_request_is_a_sequence() -> None:
    def ended_s(requests: list[PastRequest], max_running: int = 64) -> list[float]:
        replayed = Replayed(replace(PAIR[1], work=WorkAhead(TIMES, max_running=max_running)))
        for request in requests:
            replayed.add(_Live(request, 0.0, 0.0, 0.0, request.num_output))
        assert replayed.num_live == sum(request.num_choices for request in requests)
        for _ in replayed.move(math.inf):
            pass
        assert replayed.num_live == 0 and replayed._context == pytest.approx(0.0)
        return [live.ended_s for live in replayed._served]

    requests = past(Workload(100, 50), 1e6, 8)
    for max_running in (64, 4):
        in_pairs = ended_s([replace(request, num_choices=2) for request in requests[::2]], max_running)
        assert in_pairs == pytest.approx(ended_s(requests, max_running)[::2])


def test_sequences_above_the_largest_batch_take_turns() -> None:
    def itl_s(max_running: int) -> float:
        work = WorkAhead(TIMES, max_running=max_running)
        replayed, requests = Replayed(replace(PAIR[1], work=work)), past(Workload(1, 101), 1e6, 8)
        for request in requests:
            replayed.add(_Live(request, 0.0, 0.0, 0.0, request.num_output))
        for _ in replayed.move(math.inf):
            pass
        assert len(replayed._served) == 8 and replayed._context == pytest.approx(0.0)
        return max(live.itl_s for live in replayed._served)

    assert itl_s(8) == pytest.approx(TIMES.step_s(8, 8 * 51), rel=0.05)
    assert itl_s(4) == pytest.approx(2 * TIMES.step_s(4, 4 * 51), rel=0.05)


@pytest.mark.parametrize("num_pairs", [1, 8, 64])
def test_a_placement_and_a_second_pay_for_a_few_steps_of_a_replay(
    num_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [replace(load, member=MemberId(f"{load.role}{i}", "1")) for i in range(num_pairs) for load in PAIR]
    taken, plan = list[int](), Replayed._plan

    def counted(replayed: Replayed) -> _EqualSteps:
        taken[-1] += 1
        return plan(replayed)

    monkeypatch.setattr(Replayed, "_plan", counted)
    arrangements, workload = Arrangements(), Workload(64, 128)
    requests = past(workload, 15.0 * num_pairs, 150 + 6 * num_pairs)  # more than they can serve: queues are long
    for request in requests:
        taken.append(0)
        arrangements.placed(request, workers)
    most = 4096 + 1000 * (requests[-1].placed_s - requests[0].placed_s)
    assert max(taken) <= 256 + 1 and most / 8 < sum(taken) <= most


def test_where_only_workers_that_compute_prompts_are_left_requests_are_served_there() -> None:
    policy, (computing, decoding) = SloAware(targets_of(BUSY_BOTH[0]), Random(1).random), fleet(Role.BOTH, Role.BOTH)
    policy._arrangements = learned(*BUSY_BOTH, [computing, decoding])[0]
    assert [policy._arrangements.role_of(load) for load in (computing, decoding)] == [Role.PREFILL, Role.DECODE]
    assert policy.ways([computing], [computing], RequestFacts(64, 16, 1)) == [(None, computing)]
    assert (None, decoding) in policy.ways([decoding], [decoding], RequestFacts(64, 16, 1))
    assert policy.ways([], [computing], RequestFacts(64, 16, 1)) == [(None, computing)]
