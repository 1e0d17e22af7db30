"""The effect of disaggregation: the estimate from explored requests against known effects, and its labels."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest

from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from router.overview.overview import publish_effect
from router.policies.effect import (
    LEAST_EXPLORED,
    MAX_TRIALS,
    Basis,
    Comparison,
    DisaggregationEffect,
    Effect,
    Goodput,
    Trial,
    Verdict,
    measured_effect,
    predicted_effect,
)
from router.policies.placement import Candidate, Placement, PlacementReason
from router.policies.prediction.latency import Prediction
from router.request.explanations import Explanation, Explanations, PlacedAttempt
from router.requests import Ledger

PAIR, ALONE = (MemberId("p0", "1"), MemberId("d0", "1")), (None, MemberId("d0", "1"))
Times = tuple[float, float]  # of one request: at the pair, at the worker alone
Cluster = Callable[[random.Random], tuple[Times, Times]]  # draws the expected and the real times of one request


def moderate(draws: random.Random) -> tuple[Times, Times]:
    """Uniform prompt lengths and noise. Pairs are sooner for long prompts only, and by 20 ms on average."""
    size = draws.uniform(0.0, 2.0)
    expected = 0.18 + 0.10 * size, 0.15 + 0.15 * size
    return expected, (expected[0] + draws.uniform(-0.1, 0.1), expected[1] + draws.uniform(-0.1, 0.1))


def skewed(draws: random.Random) -> tuple[Times, Times]:
    """Lengths and noise with heavy tails: the longest of a thousand prompts is twenty times the median. Pairs are
    sooner by 20 ms on average."""
    size = draws.lognormvariate(-0.5, 1.0)  # its mean is 1
    expected = 0.08 + 0.10 * size, 0.05 + 0.15 * size
    noise = draws.lognormvariate(-0.18, 0.6), draws.lognormvariate(-0.18, 0.6)  # its mean is 1
    return expected, (expected[0] * noise[0], expected[1] * noise[1])


TRUTH_S = -0.02


def simulated(
    cluster: Cluster, seed: int, number: int, share: float, *, predicts: float = 0.0
) -> tuple[list[Trial], int]:
    """Return requests that placement sent where they are expected to be sooner, except for the explored share.
    `predicts`: the predictions, as a factor of the expected times; 0: none."""
    draws = random.Random(seed)
    trials, num_explored = [], 0
    for _ in range(number):
        (pair_s, alone_s), (real_pair_s, real_alone_s) = cluster(draws)
        is_explored = draws.random() < share
        is_pair = (pair_s < alone_s) is not is_explored
        num_explored += is_explored
        propensity = share if is_explored else 1 - share
        real_s = real_pair_s if is_pair else real_alone_s
        trials.append(Trial(is_pair, propensity, real_s, predicts * pair_s, predicts * alone_s))
    return trials, num_explored


def estimates(cluster: Cluster, number: int, share: float, predicts: float = 0.0, num_seeds: int = 200) -> list[Effect]:
    seeds = range(num_seeds)
    found = [measured_effect(*simulated(cluster, seed, number, share, predicts=predicts)) for seed in seeds]
    return [effect for effect in found if effect is not None]


def coverage(effects: list[Effect]) -> float:
    return mean(effect.low_s <= TRUTH_S <= effect.high_s for effect in effects)


@pytest.mark.parametrize("predicts", [0.0, 0.6])
def test_the_interval_contains_the_true_effect_in_95_percent_of_cases(predicts: float) -> None:
    effects = estimates(moderate, 1500, 0.05, predicts)
    assert 0.92 <= coverage(effects) <= 0.985
    assert mean(effect.mean_s for effect in effects) == pytest.approx(TRUTH_S, abs=0.004)


def test_the_interval_of_few_requests_with_heavy_tails_is_hardly_too_narrow() -> None:
    effects = estimates(skewed, 1000, 0.05, predicts=0.6)
    assert coverage(effects) >= 0.88
    assert mean(effect.mean_s for effect in effects) == pytest.approx(TRUTH_S, abs=0.01)


def test_an_unweighted_comparison_has_the_wrong_sign_and_the_weighted_one_the_right_sign() -> None:
    """Placement sends long prompts to pairs, so their first tokens are later, although pairs are sooner."""
    naive_s = []
    for seed in range(20):
        trials, _ = simulated(moderate, seed, 1500, 0.05)
        naive_s.append(
            mean(trial.ttft_s for trial in trials if trial.is_pair)
            - mean(trial.ttft_s for trial in trials if not trial.is_pair)
        )
    assert min(naive_s) > 0.05
    effects = estimates(moderate, 1500, 0.05, predicts=0.8, num_seeds=80)
    assert mean(effect.mean_s for effect in effects) == pytest.approx(TRUTH_S, abs=0.003)
    assert mean(effect.sign(0.0) == 1 for effect in effects) <= 0.01
    assert mean(effect.alone_s for effect in effects) == pytest.approx(0.3, abs=0.005)


def _ended(number: int, placement: Placement, ttft_s: float, patience_s: float) -> Explanation:
    """Return a request that its client gave up after this time, if it had no token by then."""
    has_token = ttft_s < patience_s
    ledger = Ledger((), patience_s, patience_s, (), "", 0, ())
    attempts = (PlacedAttempt(placement, 0.0),)
    outcome, first_token_s = ("ok", ttft_s) if has_token else ("cancelled", None)
    return Explanation(f"r{number}", "", outcome, 0.0, 4, int(has_token), first_token_s, None, attempts, ledger)


def test_clients_that_give_up_do_not_make_late_workers_look_quick() -> None:
    """Half of the requests at workers alone take 3 s, and no client waits longer than 1.2 s."""
    draws, explanations = random.Random(1), Explanations()
    for number in range(1000):
        explored = draws.random() < 0.1
        alone_s = draws.choice((0.4, 3.0))
        explanations.add(_ended(number, placed(explored=explored), alone_s if explored else 0.5, patience_s=1.2))
    found = explanations.comparison().ttft
    assert found.num_requests == 1000
    assert found.high_s < 0
    assert found.mean_s == pytest.approx(0.5 - (0.4 + 1.2) / 2, abs=0.1)


def test_requests_that_failed_do_not_make_their_workers_look_quick() -> None:
    draws, explanations = random.Random(1), Explanations()
    for number in range(1000):
        explored = draws.random() < 0.1
        ended = _ended(number, placed(explored=explored), 2.0 if explored else 1.0, patience_s=3.0)
        if explored and draws.random() < 0.5:
            soon = Ledger((), 0.01, 0.01, (), "", 0, ())
            ended = replace(ended, outcome="worker_lost", first_token_s=None, ledger=soon)
        explanations.add(ended)
    assert explanations.comparison().ttft.mean_s == pytest.approx(-1.0)


def test_wrong_predictions_widen_the_interval_and_good_ones_narrow_it() -> None:
    def width_s(predicts: float) -> float:
        return mean(effect.high_s - effect.low_s for effect in estimates(moderate, 1000, 0.05, predicts, 20))

    assert width_s(0.9) < 0.7 * width_s(0.0) < 0.7 * width_s(3.0)


def test_too_few_explored_requests_give_no_estimate() -> None:
    trials, _ = simulated(moderate, 1, 500, 0.1)
    assert measured_effect(trials, LEAST_EXPLORED - 1) is None
    assert measured_effect([trial for trial in trials if trial.is_pair], 50) is None
    assert measured_effect([], 0) is None


def test_times_without_any_spread_give_an_exact_estimate() -> None:
    trials = [Trial(number % 4 == 0, 0.5, 1.0 if number % 4 == 0 else 1.5, 0.0, 0.0) for number in range(100)]
    effect = measured_effect(trials, 50)
    assert effect is not None
    assert (effect.low_s, effect.mean_s, effect.high_s) == pytest.approx((-0.5, -0.5, -0.5))


def candidate(
    members: tuple[MemberId | None, MemberId], ttft_s: float, itl_s: float = 0.01, num_violations: int = 0
) -> Candidate:
    prediction = Prediction(
        ttft_s,
        itl_s,
        running_itl_s=itl_s,
        delay_s=0.0,
        kv_bytes=0.0,
        num_cached=0,
        modelled_ttft_s=ttft_s,
        modelled_itl_s=itl_s,
    )
    return Candidate(*members, depth=0, num_cached=0, prediction=prediction, num_violations=num_violations)


def placed(*, explored: bool, pair_s: float = 0.1, alone_s: float = 0.2, pair_itl_s: float = 0.01) -> Placement:
    best, other = candidate(PAIR, pair_s, pair_itl_s), candidate(ALONE, alone_s)
    chosen, alternative = (other, best) if explored else (best, other)
    reason = PlacementReason.EXPLORED if explored else PlacementReason.TTFT
    share = 0.1 if explored else 0.9
    return Placement(*chosen.members, reason, False, (best, other), 2, alternative, share)


def test_what_was_explored_is_measured_and_the_time_between_tokens_stays_predicted() -> None:
    effect = DisaggregationEffect()
    for number in range(400):
        explored = number % 10 == 0
        effect.add(placed(explored=explored), 0.3 if explored else 0.15)
    found = effect.compare()
    assert (found.ttft.basis, found.ttft.num_requests, found.ttft.num_explored) == (Basis.MEASURED, 400, 40)
    assert found.ttft.mean_s == pytest.approx(-0.15)
    assert found.ttft.alone_s == pytest.approx(0.3)
    assert {found.itl.basis, found.running_itl.basis} == {Basis.PREDICTED}
    assert found.verdict is Verdict.WORTH_IT


def test_without_enough_explored_requests_the_effect_is_predicted_and_labelled_so() -> None:
    effect = DisaggregationEffect()
    for number in range(100):
        effect.add(placed(explored=number < LEAST_EXPLORED - 1, pair_s=0.1 + number / 1000), None)
    found = effect.compare().ttft
    assert (found.basis, found.num_requests, found.num_explored) == (Basis.PREDICTED, 100, 0)
    assert found.mean_s == pytest.approx(-0.0505)
    assert (found.low_s, found.high_s) == pytest.approx((-0.095, -0.006))


def test_nothing_is_known_without_predictions_of_both_kinds() -> None:
    effect = DisaggregationEffect()
    assert effect.compare().verdict is Verdict.NOT_KNOWN
    by_load = Candidate(*PAIR, depth=1, num_cached=0)
    effect.add(Placement(*PAIR, PlacementReason.LOWEST_LOAD, False, (by_load,), 1), 0.5)
    only_pairs = candidate(PAIR, 0.1)
    effect.add(Placement(*PAIR, PlacementReason.ONLY_CANDIDATE, False, (only_pairs,), 1), 0.5)
    assert effect.compare() == Comparison()


def test_a_draw_between_two_pairs_is_no_trial_of_workers_alone() -> None:
    effect = DisaggregationEffect()
    other = candidate((MemberId("p1", "1"), MemberId("d0", "1")), 0.2)
    best = candidate(PAIR, 0.1)
    for _ in range(200):
        effect.add(Placement(*PAIR, PlacementReason.TTFT, False, (best, other), 2, other, 0.5), 0.1)
    assert effect.compare().verdict is Verdict.NOT_KNOWN


def test_only_the_newest_requests_count_and_memory_is_bounded() -> None:
    effect = DisaggregationEffect()
    for number in range(MAX_TRIALS + 2000):
        explored = number % 10 == 0
        late_s = 5.0 if number < 2000 else 0.0
        effect.add(placed(explored=explored), late_s + (0.3 if explored else 0.15))
    found = effect.compare().ttft
    assert found.num_requests == MAX_TRIALS
    assert found.mean_s == pytest.approx(-0.15)


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "verdict"),
    [
        (-0.03, 0.0, Verdict.WORTH_IT),
        (0.03, 0.0, Verdict.NOT_WORTH_IT),
        (0.03, -0.002, Verdict.TRADE_OFF),
        (-0.03, -0.002, Verdict.WORTH_IT),
        (0.0005, 0.0001, Verdict.NO_DIFFERENCE),
        (0.0, 0.0005, Verdict.NOT_WORTH_IT),
    ],
)
def test_the_verdict_weighs_the_first_token_and_the_later_ones(ttft_s: float, itl_s: float, verdict: Verdict) -> None:
    found = Comparison(
        ttft=predicted_effect([(0.2 + ttft_s, 0.2)]),
        itl=predicted_effect([(0.01 + itl_s, 0.01)]),
        running_itl=predicted_effect([(0.0, 0.0)]),
    )
    assert found.verdict is verdict


def test_an_interval_that_contains_zero_is_no_clear_difference() -> None:
    unclear = Effect(Basis.MEASURED, mean_s=-0.05, low_s=-0.11, high_s=0.01, alone_s=0.3, num_explored=30)
    assert Comparison(ttft=unclear).verdict is Verdict.NO_DIFFERENCE
    assert not math.isnan(unclear.mean_s)


def test_goodput_is_the_predicted_share_of_requests_that_keep_their_targets() -> None:
    effect = DisaggregationEffect()
    for number in range(10):
        pair, alone = candidate(PAIR, 0.2), candidate(ALONE, 0.2, num_violations=2 * (number < 4))
        effect.add(Placement(*PAIR, PlacementReason.SLO, False, (pair, alone), 2), None)
    found = effect.compare()
    assert found.goodput == Goodput(Basis.PREDICTED, pair_share=1.0, alone_share=0.6, num_requests=10)
    assert found.verdict is Verdict.WORTH_IT
    later = Comparison(ttft=predicted_effect([(0.3, 0.2)]), goodput=found.goodput)
    assert later.verdict is Verdict.TRADE_OFF


def test_metrics_have_the_measured_effect_beside_the_predicted_one() -> None:
    telemetry = Telemetry()
    publish_effect(Comparison(), telemetry)
    assert "tandem_disaggregation_trials{" not in telemetry.render().decode()
    measured = Effect(Basis.MEASURED, mean_s=-0.05, low_s=-0.1, high_s=-0.01, num_requests=300, num_explored=30)
    publish_effect(Comparison(ttft=measured, predicted_ttft=predicted_effect([(0.1, 0.3)])), telemetry)
    name = "tandem_disaggregation_ttft_effect_seconds"
    assert telemetry.value(name, basis="measured", bound="mean") == -0.05
    assert telemetry.value(name, basis="measured", bound="high") == -0.01
    assert telemetry.value(name, basis="predicted", bound="mean") == pytest.approx(-0.2)
    assert telemetry.value("tandem_disaggregation_trials", basis="measured") == 300
