"""The placement benchmark: its plan, arithmetic, log, search and page follow from recorded requests."""

import os
import time
from dataclasses import astuple, replace
from itertools import pairwise
from random import Random

import pytest

from benchmarks.placement.capacity import CapacitySearch, keeps_up, num_requests
from benchmarks.placement.cpu_time import CpuTime, cpu_time
from benchmarks.placement.figures.intervals import Share, difference
from benchmarks.placement.figures.log import (
    Calibration,
    PointResult,
    calibration_of,
    latest,
    measured_code,
    read_log,
    to_line,
)
from benchmarks.placement.figures.page import page
from benchmarks.placement.figures.samples import ArmResult, Sample, Slo, percentiles_s, sample_of, samples_of
from benchmarks.placement.figures.verdict import (
    AUTO,
    COLOCATED,
    SEPARATE,
    auto_against_better,
    better_static,
    goals,
    goodput_rps,
    static_arms,
)
from benchmarks.placement.generator import (
    Generated,
    Job,
    generated_from_json,
    generated_to_json,
    job_from_json,
    job_to_json,
)
from benchmarks.placement.plan import (
    CONVERSATIONS,
    ENOUGH_FOR_P99,
    REFERENCE,
    REFERENCE_RPS,
    FixedRate,
    Point,
    ShareOfCapacity,
    full_plan,
    left_to_do,
    order,
    selected,
    turns,
)
from benchmarks.placement.predictions import errors_of
from benchmarks.placement.workload import Workload, even_arrivals, poisson_arrivals, sequential_arrivals
from cli.load import Arrival, Record, prompt_ids
from tandem.v1 import admin_pb2

GOOD, SLOW = Sample(0.1, 0.01, 0.01, 0.02), Sample(0.9, 0.01, 0.01, 0.02)
SLO = Slo(ttft_s=0.3, tpot_s=0.02)
ABOUT = {"date": "2026-01-02", "commit": "c0", "processor": "2 x CPU", "kernel": "Linux 6", "torch": "2"}
REFERENCE_POINT = Point(REFERENCE, FixedRate(REFERENCE_RPS), ENOUGH_FOR_P99)


def arm(num_good: int, num_slow: int = 0, itl_p99_s: float = 0.02) -> ArmResult:
    return ArmResult(
        samples=(GOOD,) * num_good + (SLOW,) * num_slow,
        errors={},
        itl_s={"p50": 0.01, "p90": 0.015, "p99": itl_p99_s, "max": 0.3},
        arrivals_s=10.0,
        others_cpu=0.1,
        generator_cpu=0.02,
        late_s=0.001,
    )


def result(arms: dict[str, ArmResult], point: str = "512/16 at 0.6 of capacity") -> PointResult:
    return PointResult(
        code="code",
        about=ABOUT,
        point=point,
        num_requests=100,
        rate_rps=3.0,
        slo=SLO,
        arms=arms,
        flags=dict.fromkeys(arms, "tandem up"),
        skipped={"vLLM": "VLLM_PYTHON is not set"},
    )


def record(*token_times_s: float, error: str = "") -> Record:
    return Record(1.0, token_times_s, token_times_s[-1] if token_times_s else 1.0, prompt_tokens=8, error=error)


def test_full_plan_has_every_length_at_every_load_and_six_points_with_enough_requests_for_a_p99() -> None:
    points = full_plan()
    assert len({point.name for point in points}) == len(points) == 1 + 3 * 2 * 3 + 3
    matrix = [point for point in points if point.workload.num_turns == 1 and point != REFERENCE_POINT]
    assert sum(point.num_requests >= 300 for point in matrix) == 6
    assert min(point.num_requests for point in points) >= 100
    assert sum(point.workload == CONVERSATIONS for point in points) == 3


def test_points_of_one_workload_follow_each_other_so_that_it_is_calibrated_once() -> None:
    workloads = [point.workload for point in full_plan()]
    changes = sum(one != other for one, other in pairwise(workloads))
    assert changes == len(set(workloads)) - 1


def test_a_point_is_left_until_the_log_has_it_for_this_code_with_every_arm_and_enough_requests() -> None:
    point = Point(Workload(512, 16), ShareOfCapacity(0.6), 100)
    done = result({SEPARATE: arm(100), COLOCATED: arm(100)})
    assert left_to_do([point, REFERENCE_POINT], [done], "code", [SEPARATE, COLOCATED]) == [REFERENCE_POINT]
    assert left_to_do([point], [done], "other", [SEPARATE]) == [point]
    assert left_to_do([point], [done], "code", [SEPARATE, AUTO]) == [point]
    assert left_to_do([replace(point, num_requests=101)], [done], "code", [SEPARATE]) != []


def test_a_part_of_the_plan_is_selected_by_name_and_may_have_fewer_requests() -> None:
    assert selected(full_plan(), "at 3/s", 60) == [replace(REFERENCE_POINT, num_requests=60)]
    assert len(selected(full_plan(), "2048/", None)) == 6


@pytest.mark.parametrize("count", [2, 7, 60, 100, 300])
def test_turns_add_up_to_the_requests_and_every_arm_has_at_least_two(count: int) -> None:
    assert sum(turns(count)) == count
    assert len(turns(count)) >= 2 and max(turns(count)) - min(turns(count)) <= 1 and max(turns(count)) <= 100


def test_each_turn_starts_with_another_arm() -> None:
    assert [order(["a", "b", "c"], turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert sorted(order(["a", "b", "c"], 2)) == ["a", "b", "c"]


def test_intervals_are_those_of_the_literature() -> None:
    """Newcombe, Statistics in Medicine 17 (1998): 81 of 263 (p. 857), and 56 of 70 minus 48 of 80 (p. 873)."""
    assert Share(81, 263).interval == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert Share(0, 20).interval == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert Share(0, 0).interval == (0.0, 1.0)
    assert difference(Share(56, 70), Share(48, 80)) == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_a_sample_counts_ttft_from_the_planned_arrival_and_tpot_after_the_first_token() -> None:
    assert astuple(sample_of(record(1.5, 1.6, 2.1))) == pytest.approx((0.5, 0.3, 0.1, 0.5))
    with pytest.raises(ValueError):
        sample_of(record(error="overloaded"))


def test_a_failed_request_is_outside_the_slo_and_counted_by_reason() -> None:
    samples, errors = samples_of([record(1.1, 1.11), record(error="overloaded"), record(error="overloaded")])
    assert errors == {"overloaded": 2}
    one = replace(arm(0), samples=samples, errors=errors)
    assert one.attainment(SLO) == Share(1, 3)
    assert one.goodput_rps(SLO) == pytest.approx(0.1)


def test_goodput_needs_both_latencies_within_the_slo() -> None:
    assert SLO.is_met(GOOD) and not SLO.is_met(SLOW)
    assert not SLO.is_met(replace(GOOD, tpot_s=0.03))


def test_lines_of_the_log_read_back_unchanged() -> None:
    calibration = Calibration("code", "512/16", {SEPARATE: SLO}, {SEPARATE: 3.5})
    point = result({SEPARATE: arm(3, 1), COLOCATED: replace(arm(2), errors={"overloaded": 1})})
    assert read_log([to_line(calibration), "\n", to_line(point)]) == ([calibration], [point])
    with pytest.raises(ValueError):
        read_log([to_line(point)[:30]])


def test_the_slo_is_taken_from_the_better_static_arm_in_each_latency() -> None:
    quiet = {SEPARATE: Slo(0.1, 0.03), COLOCATED: Slo(0.2, 0.02)}
    assert astuple(Calibration("code", "512/16", quiet, {}).slo) == pytest.approx((0.3, 0.04))


def test_a_calibration_without_capacity_serves_only_points_with_a_fixed_rate() -> None:
    quick = Calibration("code", "512/64", {SEPARATE: SLO}, {})
    assert calibration_of([quick], "code", "512/64", with_capacity=False) == quick
    assert calibration_of([quick], "code", "512/64", with_capacity=True) is None
    assert calibration_of([quick], "other", "512/64", with_capacity=False) is None


def test_the_latest_result_of_a_point_counts() -> None:
    old, new = result({SEPARATE: arm(1)}), result({SEPARATE: arm(2)})
    assert latest([old, replace(old, code="other"), new], "code") == [new]


def test_tests_results_and_pages_do_not_change_the_measured_code() -> None:
    tree = "100644 blob aa\trouter/app.py\n100644 blob bb\ttests/unit/test_x.py\n100644 blob bb\trouter/README.md"
    assert measured_code(tree) == measured_code(tree.replace("bb", "cc"))
    assert measured_code(tree) != measured_code(tree.replace("aa", "cc"))


def served(arrivals: list[Arrival], service_s: float) -> list[Record]:
    """Return records of a server that serves one request after the other in constant time."""
    free_s, records = 0.0, []
    for arrival in arrivals:
        free_s = max(free_s, arrival.at_s) + service_s
        records.append(Record(arrival.at_s, (free_s - service_s / 2, free_s), free_s, arrival.prompt_tokens))
    return records


@pytest.mark.parametrize("service_s", [0.01, 0.25, 3.0])
def test_the_search_finds_the_capacity_of_a_server_within_a_fifth(service_s: float) -> None:
    search = CapacitySearch(0.15 / service_s)
    for _ in range(20):
        if search.is_ended:
            break
        arrivals = even_arrivals(Workload(8, 2), search.rate_rps, num_requests(search.rate_rps, service_s))
        search.add(kept_up=keeps_up(served(arrivals, service_s), search.rate_rps, service_s))
    assert search.is_ended
    assert 0.8 / service_s <= search.capacity_rps <= 1.09 / service_s


def test_a_search_that_begins_too_high_goes_down() -> None:
    search = CapacitySearch(16.0)
    tried = []
    while not search.is_ended:
        tried.append(search.rate_rps)
        search.add(kept_up=search.rate_rps <= 3.0)
    assert tried[:4] == [16.0, 8.0, 4.0, 2.0]
    assert 2.0 <= search.capacity_rps <= 3.0


def test_an_arm_that_fails_a_request_does_not_keep_up() -> None:
    records = served(even_arrivals(Workload(8, 2), 1.0, 10), 0.1)
    assert keeps_up(records, 1.0, 0.1)
    assert not keeps_up([*records, record(error="overloaded")], 1.0, 0.1)


def test_an_arm_that_answers_all_requests_late_and_together_does_not_keep_up() -> None:
    arrivals = even_arrivals(Workload(8, 2), 10.0, 40)
    records = [replace(each, ended_s=20.0 + 0.01 * number) for number, each in enumerate(served(arrivals, 0.1))]
    assert not keeps_up(records, 10.0, 0.1)


def test_turns_of_a_conversation_extend_the_prompt_and_keep_the_arrival_times() -> None:
    arrivals = poisson_arrivals(CONVERSATIONS, 2.0, 200, Random(1))
    plain = poisson_arrivals(Workload(256, 64), 2.0, 200, Random(1))
    assert [each.at_s for each in arrivals] == [each.at_s for each in plain]
    prompts = [tuple(prompt_ids(each, number, 1000, seed=7)) for number, each in enumerate(arrivals)]
    assert {len(prompt) for prompt in prompts} == {256, 512, 768, 1024}
    follow_up = [p for number, p in enumerate(prompts) if len(p) > 256 and p[:-256] in prompts[:number]]
    assert len(follow_up) > 100
    assert len(set(prompts)) == len(prompts)


def test_quiet_requests_of_a_conversation_are_its_turns_in_order() -> None:
    arrivals = sequential_arrivals(CONVERSATIONS, 6)
    assert [each.prompt_tokens for each in arrivals] == [256, 512, 768, 1024, 256, 512]
    assert arrivals[0].prefix_ids != arrivals[4].prefix_ids
    assert [each.prompt_tokens for each in sequential_arrivals(Workload(64, 8), 3)] == [64] * 3


def test_the_better_static_arm_meets_the_slo_more_often_or_is_faster() -> None:
    assert better_static(result({SEPARATE: arm(9, 1), COLOCATED: arm(8, 2), AUTO: arm(10)})) == SEPARATE
    slower = replace(arm(9, 1), samples=(replace(GOOD, ttft_s=0.2),) * 9 + (SLOW,))
    assert better_static(result({SEPARATE: slower, COLOCATED: arm(9, 1)})) == COLOCATED


def test_a_point_is_lost_only_beyond_the_interval() -> None:
    lost = result({SEPARATE: arm(95, 5), COLOCATED: arm(20, 80), AUTO: arm(50, 50)})
    near = result({SEPARATE: arm(95, 5), COLOCATED: arm(20, 80), AUTO: arm(93, 7)}, "near")
    ahead = result({SEPARATE: arm(95, 5), COLOCATED: arm(20, 80), AUTO: arm(100)}, "ahead")
    found = auto_against_better([lost, near, ahead])
    assert [(each.is_behind, each.is_lost) for each in found] == [(True, True), (True, False), (False, False)]
    assert [each.arm for each in static_arms([lost])] == [COLOCATED]
    text = page([lost, near, ahead], 22)
    assert "`auto` is behind the better static arm at 2 of 3 points." in text
    assert "**lost**: 512/16 at 0.6 of capacity: auto 50% within the SLO against 95% of 1+1" in text
    assert "within the interval: near" in text and "3 of 22 points are measured." in text
    assert "**vLLM was skipped**: VLLM_PYTHON is not set." in text


def test_goodput_over_all_points_weighs_them_by_their_time() -> None:
    short, long = result({AUTO: arm(10)}), result({AUTO: replace(arm(10), arrivals_s=30.0)})
    assert goodput_rps([short, long], AUTO) == pytest.approx(20 / 40)


def test_goals_are_met_missed_or_not_measured() -> None:
    static = {SEPARATE: arm(300), COLOCATED: arm(200, 100)}
    unmeasured = goals([result(static)])
    assert [goal.is_met for goal in unmeasured] == [None] * 4
    met = result({**static, AUTO: arm(300)}, REFERENCE_POINT.name)
    assert [goal.is_met for goal in goals([met])] == [True] * 4
    missed = result({**static, AUTO: replace(arm(210, 90, itl_p99_s=0.07), itl_s={"p99": 0.07})}, REFERENCE_POINT.name)
    assert [goal.is_met for goal in goals([missed])] == [False, False, True, False]
    few = result({**static, AUTO: arm(60)}, REFERENCE_POINT.name)
    assert [goal.is_met for goal in goals([few])][2:] == [None, None]


def test_the_page_shows_a_p99_of_ttft_only_for_enough_requests() -> None:
    text = page([result({SEPARATE: arm(299, 1), COLOCATED: arm(98, 2)})], 22)
    assert "| 1+1 | 100 / 100 / 100 |" in text
    assert "| colocated x 2 | 100 / 100 / (max 900) |" in text
    assert "`auto` was measured at no point." in text


def test_the_page_lists_late_points_of_the_load_generator_and_other_load() -> None:
    late = replace(result({SEPARATE: replace(arm(10), late_s=0.02), COLOCATED: arm(10)}), note="Tests ran beside it.")
    text = page([late], 22)
    assert "**The load generator was late** by 20.0 ms (p99) for 1+1" in text and "Tests ran beside it." in text
    assert "(p99) for colocated x 2" not in text


def test_a_job_and_its_output_pass_between_processes_unchanged() -> None:
    arrivals = tuple(sequential_arrivals(CONVERSATIONS, 3))
    job = Job("tandem", "127.0.0.1:1", vocab_size=9, seed=4, pace="planned", arrivals=arrivals)
    generated = Generated((record(1.5, 2.0), record(error="unavailable")), 0.001, 0.1, 2.0, -5)
    assert job_from_json(job_to_json(job)) == job
    assert generated_from_json(generated_to_json(generated)) == generated


def test_cpu_time_of_other_processes_is_the_machines_without_ours_and_the_generators() -> None:
    begin, end = CpuTime(10.0, 100.0, 40.0), CpuTime(20.0, 118.0, 50.0)
    assert end.others_since(begin, generator_s=1.0) == pytest.approx(0.7)
    assert CpuTime(20.0, 105.0, 50.0).others_since(begin, generator_s=0.0) == 0.0


def test_cpu_time_of_a_process_grows_while_it_computes() -> None:
    begin = cpu_time([os.getpid()])
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    end = cpu_time([os.getpid()])
    assert end.ours_s - begin.ours_s == pytest.approx(0.2, abs=0.15)
    assert end.machine_s > begin.machine_s


def test_percentiles_of_no_request_are_empty() -> None:
    assert percentiles_s([]) == {}
    assert percentiles_s([1.0, 2.0, 3.0])["p50"] == 2.0


def _explained(outcome: str, *predicted_s: float) -> admin_pb2.RequestExplanation:
    """Return a request with 0.5 s to its first token and 0.02 s between tokens, placed once for each predicted TTFT."""
    request = admin_pb2.RequestExplanation(outcome=outcome, num_tokens=8, ttft_s=0.6, itl_s=0.02)
    for ttft_s in predicted_s:
        placement = request.placements.add(after_s=0.1)
        placement.candidates.add().prediction.ttft_s = 9.0  # was not chosen
        chosen = placement.candidates.add(is_chosen=True)
        chosen.prediction.ttft_s, chosen.prediction.itl_s = ttft_s, 0.03
    return request


def test_predictions_are_compared_for_requests_that_ended_well_at_their_first_workers() -> None:
    requests = [_explained("ok", 0.4), _explained("ok", 0.4, 0.4), _explained("worker_lost", 0.4), _explained("ok")]
    found = errors_of(requests)
    assert found["ttft"] == pytest.approx([0.2])
    assert found["itl"] == pytest.approx([0.5])


def test_the_page_shows_how_well_the_arm_that_predicts_did() -> None:
    predicting = replace(arm(10), prediction_errors={"ttft": [0.04, 0.06, 0.3], "itl": []})
    assert "TTFT 6% / 25%" in page([result({SEPARATE: arm(10), COLOCATED: arm(10), AUTO: predicting})], 1)
