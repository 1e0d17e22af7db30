"""The plan of a run covers what it promises, and a wrong round is judged as wrong."""

import dataclasses

import pytest

from tandem.results import Ledger, WorkerTime
from tests.chaos.accounts import Account
from tests.chaos.asking import Asked, Outcome, Way, Wrong
from tests.chaos.meeting import Met, Victim
from tests.chaos.plan import PHASES, ROLES, SIGNALS, Fault, Kind, Phase, all_faults, make_plan
from tests.chaos.questions import Question, make_questions
from tests.chaos.report import Run
from tests.chaos.rounds import Course, judged

_QUESTION = Question(0, (1, 2, 3), 4, 0.0, 1, 1, None)
_CLEAN = Account({}, {}, (), 0.0)


def test_a_plan_is_the_same_for_the_same_seed_and_has_every_fault() -> None:
    plan = make_plan(7, 200)
    assert plan == make_plan(7, 200) != make_plan(8, 200)
    faults = all_faults()
    assert {one.fault for one in plan[: len(faults)]} == set(faults), "each comes once before any comes twice"
    blows = {(fault.kind, fault.role, fault.phase) for fault in faults if fault.kind in SIGNALS}
    assert blows == {(kind, role, phase) for kind in SIGNALS for role in ROLES for phase in PHASES[role]}
    assert Phase.DECODING not in PHASES["prefill"]
    assert {fault.kind for fault in faults} == set(Kind)


def test_a_part_of_the_plan_is_asked_for_by_name() -> None:
    plan = make_plan(1, 5, lambda fault: fault.name.startswith("sigkill:decode:decoding"))
    assert {one.fault.name for one in plan} == {"sigkill:decode:decoding"}
    with pytest.raises(ValueError, match="no fault"):
        make_plan(1, 5, lambda fault: False)


def test_questions_are_the_same_in_every_run() -> None:
    questions = make_questions()
    assert questions == make_questions()
    assert len({question.number for question in questions.all}) == len(questions.all)
    assert {question.n for question in questions.mixed} == {1, 2}


def _ledger(wall_s: float, worker_times: tuple[WorkerTime, ...]) -> Ledger:
    return Ledger((), wall_s, 0.0, (), "", 0, (), worker_times)


def _asked(way: Way, router: str, outcome: Outcome) -> Asked:
    return Asked("id", _QUESTION, way, router, "", 0.0, outcome=outcome)


def _wrong_of(asked: Asked, fault: Fault, account: Account = _CLEAN, note: str = "") -> tuple[str, ...]:
    one = dataclasses.replace(make_plan(1, 1)[0], fault=fault)
    met = Met(("id",), ("id",))
    course = Course(one, Victim(fault.role, f"{fault.role}0"), met, note=note, ended=[asked], hit=[asked])
    return judged(course, account).wrong


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.OK])
@pytest.mark.parametrize("way", Way)
def test_every_outcome_but_ok_after_a_fault_of_a_worker_is_a_failure(way: Way, outcome: Outcome) -> None:
    fault = Fault(Kind.SIGKILL, "decode", Phase.DECODING)
    assert not _wrong_of(_asked(way, "router0", Outcome.OK), fault)
    assert _wrong_of(_asked(way, "router0", outcome), fault)


def test_only_a_stream_whose_own_router_was_killed_may_end_with_it() -> None:
    killed, left = Fault(Kind.SIGKILL, "router", Phase.DECODING), Fault(Kind.SIGTERM, "router", Phase.DECODING)
    assert not _wrong_of(_asked(Way.HTTP, "router0", Outcome.LOST), killed)
    assert _wrong_of(_asked(Way.LIBRARY, "router0", Outcome.LOST), killed), "the library goes on elsewhere"
    assert _wrong_of(_asked(Way.HTTP, "router1", Outcome.LOST), killed), "it was another router's"
    assert _wrong_of(_asked(Way.HTTP, "router0", Outcome.MISMATCH), killed)
    assert _wrong_of(_asked(Way.HTTP, "router0", Outcome.LOST), left, note="exit status 0"), "it was to finish it"


def test_a_leak_a_violation_and_a_bad_exit_status_are_failures() -> None:
    fault, asked = Fault(Kind.SIGTERM, "decode", Phase.DECODING), _asked(Way.GRPC, "router0", Outcome.OK)
    assert not _wrong_of(asked, fault, note="exit status 0")
    assert _wrong_of(asked, fault, note="exit status 1")
    leaks = dataclasses.replace(_CLEAN, leaked={"decode0": {"leased": 2}})
    assert _wrong_of(asked, fault, leaks, note="exit status 0") == ("decode0 still has {'leased': 2}",)
    broken = dataclasses.replace(_CLEAN, violations={"decode0": "a block has no owner"})
    assert _wrong_of(asked, fault, broken, note="exit status 0")


async def test_a_repeated_or_missing_token_is_detected() -> None:
    asked = _asked(Way.GRPC, "router0", Outcome.OK)
    asked.take(0, 0, (5,), "x", "")
    with pytest.raises(Wrong) as repeated:
        asked.take(0, 0, (5,), "x", "")
    assert repeated.value.outcome is Outcome.REPEATED
    with pytest.raises(Wrong) as missing:
        asked.take(0, 2, (5,), "x", "")
    assert missing.value.outcome is Outcome.MISSING
    with pytest.raises(Wrong):
        asked.answer()


async def test_recovery_is_the_longest_wait_from_the_fault_on() -> None:
    asked = _asked(Way.GRPC, "router0", Outcome.OK)
    asked.last_token_s = 10.0
    asked.hit(10.5)
    asked.note_wait(12.5)
    asked.note_wait(12.6)
    assert asked.wait_s == 2.0
    assert asked.handover_s is None, "its ledger is not known"


async def test_queueing_and_computing_in_the_longest_wait_do_not_count_as_hand_over() -> None:
    asked = _asked(Way.GRPC, "router0", Outcome.OK)
    asked.last_token_s = 10.0
    asked.hit(10.5)
    asked.note_wait(14.5)
    arrived_s, wall_s = 9.0, 6.0  # by the client's clock, and until its end
    spent = [
        WorkerTime("prefill0@a", ended_s=10.8 - arrived_s, queue_s=0.5, compute_s=0.5),  # 0.3 s of it after the fault
        WorkerTime("prefill0@a", ended_s=13.0 - arrived_s, queue_s=0.5, compute_s=1.0),
        WorkerTime("prefill0@a", ended_s=13.5 - arrived_s, queue_s=0.0, compute_s=1.0),  # at the same time, in part
        WorkerTime("prefill0@a", ended_s=14.8 - arrived_s, queue_s=0.1, compute_s=0.1),  # after the wait
    ]
    asked.note_ledger(_ledger(wall_s, tuple(spent)), arrived_s + wall_s)
    assert asked.wait_s == 4.0
    assert asked.handover_s == pytest.approx(4.0 - 0.3 - 2.0)


async def test_a_wait_beyond_the_goal_is_reported_with_where_its_time_went() -> None:
    fault, asked = Fault(Kind.SIGKILL, "decode", Phase.QUEUED), _asked(Way.GRPC, "router0", Outcome.OK)
    asked.last_token_s = 10.0
    asked.hit(10.5)
    asked.note_wait(14.5)
    course = Course(dataclasses.replace(make_plan(1, 1)[0], fault=fault), Victim("decode", "decode0"))
    course.met, course.ended, course.hit = Met(("id",), ("id",)), [asked], [asked]
    asked.note_ledger(_ledger(5.0, (WorkerTime("prefill0@a", ended_s=4.0, queue_s=2.5, compute_s=1.0),)), 15.0)
    assert judged(course, _CLEAN).slow == ()
    asked.note_ledger(_ledger(5.0, (WorkerTime("prefill0@a", ended_s=4.0, queue_s=0.5, compute_s=0.5),)), 15.0)
    (told,) = judged(course, _CLEAN).slow
    assert "waited from 0.00 to 4.00 s, of which detection and hand-over took 3.00 s" in told
    assert "prefill0@a queued it 0.50 s and computed 0.50 s until 3.50 s" in told


def test_a_missed_goal_is_reported() -> None:
    fault, asked = Fault(Kind.SIGSTOP, "decode", Phase.DECODING), _asked(Way.GRPC, "router0", Outcome.OK)
    one = dataclasses.replace(make_plan(1, 1)[0], fault=fault)
    result = judged(Course(one, Victim("decode", "decode0"), Met(("id",), ("id",)), ended=[asked], hit=[asked]), _CLEAN)
    results = [dataclasses.replace(result, handover_s=(late_s,)) for late_s in (3.2, 3.4)]
    runs = [Run(1, 1, (each,), {}, "", 1.0, {}, {}) for each in results]
    assert [[goal.is_met for goal in run.goals] for run in runs] == [[True], [False]]
    assert "MISSED" in runs[1].as_markdown() and "MISSED" not in runs[0].as_markdown()
