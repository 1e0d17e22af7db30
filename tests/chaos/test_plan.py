"""The plan of a run: what it promises before anything is harmed; and that a wrong round is called wrong."""

import dataclasses

import pytest

from tests.chaos.accounts import Account
from tests.chaos.asking import Asked, Outcome, Way, Wrong
from tests.chaos.meeting import Met, Victim
from tests.chaos.plan import PHASES, ROLES, SIGNALS, Fault, Kind, Phase, all_faults, make_plan
from tests.chaos.questions import Question, make_questions
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


def _asked(way: Way, router: str, outcome: Outcome) -> Asked:
    return Asked("id", _QUESTION, way, router, "", 0.0, outcome=outcome)


def _wrong_of(asked: Asked, fault: Fault, account: Account = _CLEAN, note: str = "") -> tuple[str, ...]:
    one = dataclasses.replace(make_plan(1, 1)[0], fault=fault)
    met = Met(("id",), ("id",))
    course = Course(one, Victim(fault.role, f"{fault.role}0"), met, note=note, ended=[asked], hit=[asked])
    return judged(course, account).wrong


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.OK])
@pytest.mark.parametrize("way", Way)
def test_whatever_a_worker_does_to_an_answer_is_wrong(way: Way, outcome: Outcome) -> None:
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


def test_what_is_left_behind_is_wrong() -> None:
    fault, asked = Fault(Kind.SIGTERM, "decode", Phase.DECODING), _asked(Way.GRPC, "router0", Outcome.OK)
    assert not _wrong_of(asked, fault, note="exit status 0")
    assert _wrong_of(asked, fault, note="exit status 1")
    leaks = dataclasses.replace(_CLEAN, leaked={"decode0": {"leased": 2}})
    assert _wrong_of(asked, fault, leaks, note="exit status 0") == ("decode0 still has {'leased': 2}",)
    broken = dataclasses.replace(_CLEAN, violations={"decode0": "a block is nobody's"})
    assert _wrong_of(asked, fault, broken, note="exit status 0")


async def test_a_token_that_comes_twice_or_is_left_out_is_seen() -> None:
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
