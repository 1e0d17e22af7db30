"""The phase ledger: always exactly one phase, so the parts sum to the wall time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.observe.telemetry import Telemetry
from router.policies.candidates import SloTargets
from router.policies.prediction.unmodelled import NOTHING_UNMODELLED, ModelledRequest, Unmodelled, UnmodelledTimes
from router.request.account import HandOff, PhaseName, RequestAccount
from router.requests import ChoiceDelta, WorkerTime


@given(
    steps=st.lists(st.tuples(st.sampled_from(PhaseName), st.floats(0, 100), st.floats(0, 200)), max_size=30),
    tail_s=st.floats(0, 10),
)
def test_phases_sum_to_the_wall_time_for_any_times_of_other_clocks(
    steps: list[tuple[PhaseName, float, float]], tail_s: float
) -> None:
    """Each step gives the phase that begins, the time since the step before, and the reported age of the phase."""
    now_s = 1000.0
    account = RequestAccount(Telemetry(), now_s)
    for phase, passed_s, ago_s in steps:
        now_s += passed_s
        account.enter(phase, now_s - ago_s)
    account.end(now_s + tail_s)
    ledger = account.ledger(now_s + 50)
    assert sum(phase.duration_s for phase in ledger.phases) == pytest.approx(ledger.wall_s, abs=1e-6)
    assert ledger.wall_s == pytest.approx(now_s + tail_s - 1000.0)
    assert all(phase.duration_s >= 0 for phase in ledger.phases)
    assert len({phase.name for phase in ledger.phases}) == len(ledger.phases)


def test_the_times_of_a_repeated_phase_are_added() -> None:
    account = RequestAccount(Telemetry(), 0.0)
    for phase, at_s in ((PhaseName.DECODE, 1.0), (PhaseName.RETRY, 3.0), (PhaseName.DECODE, 3.5)):
        account.enter(phase, at_s)
    account.end(6.0)
    assert {phase.name: phase.duration_s for phase in account.ledger(6.0).phases} == {
        "tokenize": 1.0,
        "decode": 4.5,
        "retry": 0.5,
    }


def test_the_first_token_time_is_that_of_the_first_delivered_token() -> None:
    account = RequestAccount(Telemetry(), 10.0)
    account.record_delivery((ChoiceDelta(0, 0, (7,)),), 12.0)
    account.record_delivery((ChoiceDelta(0, 0, (7,)),), 13.0)
    account.end(14.0)
    assert account.ledger(15.0).ttft_s == 2.0


@pytest.mark.parametrize(("outcome", "is_refused"), [("queue_full", True), ("cancelled", False)])
def test_a_request_that_its_client_cancels_before_it_is_admitted_is_not_refused(outcome: str, is_refused: bool) -> None:
    telemetry = Telemetry()
    account = RequestAccount(telemetry, 0.0)
    account.publish(account.explanation("r", 1.0, outcome))
    assert telemetry.value("tandem_requests_total", outcome=outcome) == 1
    refused = telemetry.by_labels("tandem_requests_refused_total")
    assert refused == ({(outcome, "interactive"): 1} if is_refused else {})


@pytest.mark.parametrize(
    ("targets", "missed"),
    [
        (SloTargets(ttft_s=4.0, itl_s=0.5), {("ttft", "prefill_queue"), ("itl", "transfer")}),
        (SloTargets(ttft_s=6.0, itl_s=0.5), {("itl", "transfer")}),
        (SloTargets(ttft_s=6.0, itl_s=5.0), set()),
        (SloTargets(), set()),
    ],
)
def test_a_missed_target_is_counted_with_the_phase_that_took_longest(
    targets: SloTargets, missed: set[tuple[str, str]]
) -> None:
    telemetry = Telemetry()
    account = RequestAccount(telemetry, 0.0, targets=targets)
    account.record_admission(4)
    for phase, at_s in ((PhaseName.PREFILL_QUEUE, 0.5), (PhaseName.PREFILL, 4.0), (PhaseName.TRANSFER, 5.0)):
        account.enter(phase, at_s)
    account.record_delivery((ChoiceDelta(0, 0, (7,)),), 5.0)
    account.enter(PhaseName.DECODE, 7.0)
    account.record_delivery((ChoiceDelta(0, 1, (8, 9)),), 8.5)
    account.end(8.5)
    account.publish(account.explanation("", 8.5, "ok"))
    counted = {
        (latency, phase)
        for latency in ("ttft", "itl")
        for phase in PhaseName
        if telemetry.value("tandem_slo_misses_total", latency=latency, phase=phase)
    }
    assert counted == missed


def test_members_are_listed_once_in_the_order_of_their_first_use() -> None:
    account = RequestAccount(Telemetry(), 0.0)
    for member in ("p@1", "d@1", "p@1", "d@2"):
        account.add_member(member)
    account.add_hand_off(HandOff("d", "tcp", 100, 0.0, 14.0))
    account.add_hand_off(HandOff("d", "shm", 50, 0.0, 14.5))
    ledger = account.ledger(1.0)
    assert ledger.members == ("p@1", "d@1", "d@2")
    assert (ledger.transport, ledger.kv_bytes) == ("shm", 150)


def test_worker_times_are_listed_beside_the_phases_and_do_not_change_them() -> None:
    account = RequestAccount(Telemetry(), 10.0)
    account.enter(PhaseName.RETRY, 11.0)
    account.add_worker_time("p@1", 14.0, queue_s=1.0, compute_s=0.5)
    account.end(15.0)
    ledger = account.ledger(15.0)
    assert ledger.worker_times == (WorkerTime("p@1", 4.0, 1.0, 0.5),)
    assert sum(phase.duration_s for phase in ledger.phases) == ledger.wall_s


def test_predictions_are_compared_with_the_first_token_and_with_the_mean_time_between_tokens() -> None:
    telemetry = Telemetry()
    account = RequestAccount(telemetry, 10.0)
    account.record_admission(4)
    account.predict(ttft_s=1.5, itl_s=0.1, now_s=11.0)
    account.predict(ttft_s=9.0, itl_s=9.0, now_s=12.0)  # of a later attempt
    account.record_delivery([ChoiceDelta(choice=0, first_index=0, token_ids=(1,))], 12.0)
    account.record_delivery([ChoiceDelta(choice=0, first_index=1, token_ids=(2,) * 10)], 14.0)
    account.end(14.0)
    account.publish(account.explanation("", 14.0, "ok"))
    text = telemetry.render().decode()
    assert "tandem_ttft_prediction_error_ratio_sum 0.5" in text  # 1.5 s predicted, 1 s real
    assert "tandem_itl_prediction_error_ratio_sum 0.5" in text  # 0.1 s predicted, 0.2 s real


def _deliver(account: RequestAccount, choice: int, first_index: int, num_tokens: int, at_s: float) -> None:
    account.record_delivery([ChoiceDelta(choice, first_index, (1,) * num_tokens, "text")], at_s)


def test_the_time_between_tokens_of_each_choice_begins_with_its_own_first_tokens() -> None:
    """The second choice waits 6 s for a slot, and its first two tokens come together."""
    telemetry = Telemetry()
    account = RequestAccount(telemetry, 0.0, targets=SloTargets(itl_s=0.15))
    account.record_admission(4)
    account.predict(ttft_s=1.0, itl_s=0.1, now_s=0.0)
    _deliver(account, 0, 0, 1, at_s=1.0)
    _deliver(account, 0, 1, 10, at_s=2.0)
    _deliver(account, 1, 0, 2, at_s=7.0)
    _deliver(account, 1, 2, 10, at_s=8.0)
    ended = account.explanation("", 8.0, "ok")
    account.publish(ended)
    assert ended.itl_s == pytest.approx(0.1)
    assert telemetry.value("tandem_itl_prediction_error_ratio") == 2
    assert "tandem_itl_prediction_error_ratio_sum 0.0" in telemetry.render().decode()
    assert telemetry.value("tandem_slo_misses_total", latency="itl", phase="tokenize") == 0


@pytest.mark.parametrize("is_continued", [False, True])
def test_the_next_token_of_a_client_that_has_tokens_is_no_first_token(is_continued: bool) -> None:
    telemetry = Telemetry()
    account = RequestAccount(telemetry, 0.0, targets=SloTargets(ttft_s=2.0, itl_s=0.5))
    account.record_admission(4)
    if is_continued:
        account.continue_stream()
        account.enter(PhaseName.RETRY, 0.0)
    for index, at_s in ((5, 3.0), (6, 4.0)):
        _deliver(account, 0, index, 1, at_s=at_s)
    account.end(4.0)
    account.publish(account.explanation("", 4.0, "ok"))
    assert sum(telemetry.observations("tandem_ttft_seconds")) == (not is_continued)
    missed = telemetry.by_labels("tandem_slo_misses_total")
    assert sorted(latency for latency, _ in missed) == (["itl"] if is_continued else ["itl", "ttft"])


def test_text_that_the_client_of_a_resumed_request_had_missed_is_no_token() -> None:
    account = RequestAccount(Telemetry(), 0.0)
    _deliver(account, 0, 5, 0, at_s=0.1)
    _deliver(account, 0, 5, 1, at_s=3.0)
    _deliver(account, 0, 6, 10, at_s=4.0)
    ended = account.explanation("", 4.0, "ok")
    assert ended.first_token_s == 3.0
    assert ended.itl_s == pytest.approx(0.1)
    assert account.ledger(4.0).ttft_s == 3.0


def test_tokens_that_all_came_together_have_no_time_between_them() -> None:
    account = RequestAccount(Telemetry(), 0.0)
    _deliver(account, 0, 0, 20, at_s=5.0)
    assert account.explanation("", 5.0, "ok").itl_s is None


@pytest.mark.parametrize(("has_moved", "is_batch", "compared"), [(True, False, (1, 0)), (False, True, (0, 0))])
def test_moved_sequences_and_the_batch_class_are_not_compared(
    has_moved: bool, is_batch: bool, compared: tuple[int, int]
) -> None:
    telemetry = Telemetry()
    account = RequestAccount(telemetry, 0.0, is_batch=is_batch)
    account.record_admission(4)
    account.predict(ttft_s=1.0, itl_s=0.1, now_s=0.0)
    _deliver(account, 0, 0, 1, at_s=1.0)
    account.has_moved = has_moved
    _deliver(account, 0, 1, 10, at_s=30.0)
    account.publish(account.explanation("", 30.0, "ok"))
    found = [telemetry.value(f"tandem_{name}_prediction_error_ratio") for name in ("ttft", "itl")]
    assert tuple(found) == compared


def _learned(
    reasons: tuple[str, ...] = (), outcome: str = "ok", *, has_moved: bool = False, is_hedged: bool = False
) -> Unmodelled:
    """Serve three requests that took 1 s longer than modelled, and twice as long between tokens."""
    worker = UnmodelledTimes()
    for number in range(3):
        sent_s = 10.0 * number
        account = RequestAccount(Telemetry(), sent_s)
        account.record_admission(4)
        account.predict(1.0, 0.1, sent_s, ModelledRequest(0.5, 0.1, sent_s, worker, worker))
        for reason in reasons:
            account.add_reason(reason)
        if is_hedged:
            account.teach_nothing()
        account.record_token(sent_s + 1.0)
        account.has_moved = has_moved
        for index in range(1, 11):
            account.record_token(sent_s + 1.0 + 0.2 * index)
        # The client reads late, which teaches nothing.
        account.record_delivery([ChoiceDelta(choice=0, first_index=0, token_ids=(1,) * 11)], sent_s + 50.0)
        account.end(sent_s + 50.0)
        account.publish(account.explanation("", sent_s + 50.0, outcome))
    return worker.at(70.0)


def test_models_learn_from_the_times_at_which_tokens_reach_the_router() -> None:
    learned = _learned()
    assert learned.here_s == pytest.approx(0.5)
    assert learned.itl_factor == pytest.approx(2.0)


def test_models_learn_nothing_from_retried_requests() -> None:
    assert _learned(reasons=("worker_lost",)) == NOTHING_UNMODELLED


def test_models_learn_nothing_from_hedged_requests() -> None:
    assert _learned(is_hedged=True) == NOTHING_UNMODELLED


def test_models_learn_nothing_about_tokens_from_requests_that_were_cut_off_or_moved() -> None:
    assert _learned(outcome="cancelled").itl_factor == 1.0
    learned = _learned(has_moved=True)
    assert learned.here_s == pytest.approx(0.5)
    assert learned.itl_factor == 1.0


def test_few_tokens_and_retried_or_failed_requests_are_not_compared() -> None:
    for outcome, num_tokens, reasons, num_compared in (
        ("ok", 2, (), 1),
        ("ok", 9, ("worker_lost",), 0),
        ("cancelled", 9, (), 0),
    ):
        telemetry = Telemetry()
        account = RequestAccount(telemetry, 0.0)
        account.record_admission(4)
        account.predict(ttft_s=1.0, itl_s=0.1, now_s=0.0)
        for reason in reasons:
            account.add_reason(reason)
        account.record_delivery([ChoiceDelta(choice=0, first_index=0, token_ids=(1,))], 1.0)
        account.record_delivery([ChoiceDelta(choice=0, first_index=1, token_ids=(2,) * (num_tokens - 1))], 2.0)
        account.publish(account.explanation("", 2.0, outcome))
        assert telemetry.value("tandem_ttft_prediction_error_ratio") == num_compared
        assert telemetry.value("tandem_itl_prediction_error_ratio") == 0
