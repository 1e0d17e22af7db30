"""The output of `tandem requests`, `tandem scale` and `tandem status`, from values."""

import pytest

from cli.verbs.requests import requests_object, requests_text
from cli.verbs.scale import Sizes, changes_between, sizes_from
from cli.verbs.status import target_object, target_text
from cluster.errors import ConfigError
from tandem.enum_words import MEMBER_ROLES, MEMBER_STATES
from tandem.v1 import admin_pb2, inference_pb2


def status(**states: str) -> admin_pb2.StatusResponse:
    """Workers by name, _ for -: state@incarnation."""
    members = []
    for name, state in states.items():
        role, (word, _, incarnation) = name.partition("_")[0], state.partition("@")
        members.append(
            admin_pb2.MemberStatus(
                member_id=name.replace("_", "-"),
                incarnation=incarnation or "1",
                role=MEMBER_ROLES.number(role),
                state=MEMBER_STATES.number(word),
            )
        )
    return admin_pb2.StatusResponse(members=members)


def test_requests_are_shown_one_per_line_with_their_reasons() -> None:
    live = admin_pb2.LiveRequest(
        request_id="r1",
        phase=inference_pb2.REQUEST_PHASE_DECODE,
        age_s=12.34,
        num_tokens=7,
        prefill_member="prefill-0@ab",
        decode_member="",
        reasons=["worker_lost", "timeout"],
    )
    heading, row = requests_text([live]).splitlines()
    assert heading.split() == ["request", "phase", "age", "s", "tokens", "prefill", "decode", "events"]
    assert row.split() == ["r1", "decode", "12.3", "7", "prefill-0", "-", "worker_lost,", "timeout"]
    listed = requests_object([live])["requests"]
    assert isinstance(listed, list)
    (shown,) = listed
    assert (shown["prefill"], shown["decode"], shown["reasons"]) == ("prefill-0@ab", "", ["worker_lost", "timeout"])
    assert requests_text([]) == "no live request"


def test_each_joining_leaving_or_changing_worker_is_shown_on_one_line() -> None:
    before = status(router_0="ready", prefill_0="ready", decode_0="ready@a", decode_1="ready")
    after = status(prefill_0="draining", decode_0="ready@b", decode_1="ready", decode_2="starting")
    assert list(changes_between(before, after)) == [
        "decode-0 is ready",
        "decode-2 is starting",
        "prefill-0 is draining",
        "decode-0 has left",
    ]
    assert list(changes_between(after, after)) == []


def test_sizes_are_read_from_words() -> None:
    assert sizes_from(["prefill=0", "decode=3"]) == Sizes(0, 3)
    assert sizes_from(["decode=3"]) == Sizes(None, 3)


@pytest.mark.parametrize(
    "word", ["decode", "decode=", "decode=x", "decode=-1", "decode=1.5", "router=1", "=1", "decode=²"]
)
def test_a_malformed_size_is_refused_with_the_form(word: str) -> None:
    with pytest.raises(ConfigError, match="write prefill=N or decode=N"):
        sizes_from([word])


@pytest.mark.parametrize(("words", "said"), [(["decode=1", "decode=1"], "twice"), (["decode=0"], "must be at least 1")])
def test_an_impossible_target_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sizes_from(words)


def test_a_target_is_shown_with_its_progress_and_problem() -> None:
    target = admin_pb2.ScaleTarget(prefill=1, decode=2, version=3, follower="tandem up", reached=2, problem="no room")
    assert target_text(target) == "target: 1 prefill, 2 decode: in progress; followed by tandem up (no room)"
    assert target_object(target)["is_reached"] is False
    target.reached, target.problem = 3, ""
    assert "reached; followed by tandem up" in target_text(target)
    target.follower = ""
    assert "no process follows it" in target_text(target)
