"""The output of `tandem requests`, `tandem explain`, `tandem scale` and `tandem status`, from values."""

import argparse
import socket
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from cli.__main__ import main
from cli.verbs.clusters.role import moved_target_text
from cli.verbs.clusters.scale import changes_between, sizes_from
from cli.verbs.generation import generate
from cli.verbs.observation.explain import explained_object, explained_text
from cli.verbs.observation.requests import requests_object, requests_text
from cli.verbs.observation.status import (
    disaggregation_object,
    disaggregation_text,
    other_roles_text,
    target_object,
    target_text,
)
from cluster.errors import ConfigError
from cluster.messages import MemberId
from cluster.outstanding_work import PromptWork
from cluster.process import ExitStatus
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes
from router.grpc_api.admin_wire import explanation_to_wire
from router.policies.candidates import RequestFacts, SloTargets, WorkerLoad
from router.policies.placement import PlacementReason
from router.policies.prediction.work_ahead import PromptQueue, WorkAhead
from router.policies.slo_aware import SloAware
from router.request.explanations import Explanation, PlacedAttempt
from tandem.enum_words import DISAGGREGATION_VERDICTS, EFFECT_BASES, MEMBER_ROLES, MEMBER_STATES
from tandem.options import GenerateOptions
from tandem.results import Choice, PromptTokenLogprobs, Result, TokenLogprob, Usage, ledger_from_wire
from tandem.v1 import admin_pb2, inference_pb2


def status(**states: str) -> admin_pb2.StatusResponse:
    """Return a status with these workers by name, with _ for -: state@incarnation."""
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


def test_tandem_generate_has_a_flag_for_each_option_of_the_client_library() -> None:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    assert GenerateOptions.__annotations__.keys() <= vars(parser.parse_args(["a prompt"])).keys()


def test_tandem_generate_shows_the_log_probabilities_of_the_prompt_that_it_has() -> None:
    choice = Choice(token_ids=(5,), text="a", logprobs=(), finish_reason="length", stop_cause="")
    result = Result("r", (choice,), Usage(2, 1, 0), ledger_from_wire(inference_pb2.Ledger()))
    scored = replace(
        result, prompt_logprobs=(PromptTokenLogprobs(TokenLogprob(7, -0.5), 2, (TokenLogprob(8, -0.25),)),)
    )
    assert "prompt_logprobs" not in generate.result_object(result)
    assert generate.result_object(scored)["prompt_logprobs"] == [
        {"token": {"token_id": 7, "logprob": -0.5}, "rank": 2, "top": ({"token_id": 8, "logprob": -0.25},)}
    ]


@pytest.mark.parametrize("words", [("status",), ("scale", "decode=1"), ("generate", "a prompt")])
def test_a_refused_connection_is_reported_in_one_line_with_the_address_and_the_remedy(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert main([*words, "--address", address]) == ExitStatus.CRASHED
    assert capsys.readouterr().err == (
        f"tandem: unavailable: no process accepts connections at {address}; start the cluster, for example with"
        " `tandem up`, or give the address of a running router with --address\n"
    )


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
    assert sizes_from(["prefill=0", "decode=3"]) == {"prefill": 0, "decode": 3}
    assert sizes_from(["colocated=2"]) == {"colocated": 2}


@pytest.mark.parametrize(
    "word", ["decode", "decode=", "decode=x", "decode=-1", "decode=1.5", "router=1", "=1", "decode=²"]
)
def test_a_malformed_size_is_refused_with_the_form(word: str) -> None:
    with pytest.raises(ConfigError, match="write prefill=N, decode=N or colocated=N"):
        sizes_from([word])


@pytest.mark.parametrize(("words", "said"), [(["decode=1", "decode=1"], "twice"), (["decode=70000"], "cannot have")])
def test_an_impossible_target_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sizes_from(words)


def test_a_target_is_shown_with_its_progress_and_problem() -> None:
    target = admin_pb2.ScaleTarget(prefill=1, decode=2, version=3, follower="tandem up", reached=2, problem="no room")
    assert target_text(target) == "target: 1 prefill, 2 decode: in progress; followed by tandem up (no room)"
    assert target_object(target)["is_reached"] is False
    target.reached, target.problem = 3, ""
    assert "reached; followed by tandem up" in target_text(target)
    target.colocated = 1
    assert "target: 1 prefill, 2 decode, 1 colocated: reached" in target_text(target)
    target.prefill = target.decode = 0
    assert "target: 1 colocated: reached" in target_text(target)
    target.follower = ""
    assert "no process follows it" in target_text(target)


def test_a_change_of_a_role_is_shown_with_the_target_that_moved_or_stays() -> None:
    target = admin_pb2.ScaleTarget(prefill=2, decode=1, version=3, follower="the operator in tandem")
    assert moved_target_text(target).startswith("the scale target stays 2 prefill, 1 decode: the operator in tandem")
    target.counts_roles = True
    assert moved_target_text(target) == "the scale target is 2 prefill, 1 decode now"


def test_the_status_shows_present_roles_where_the_target_counts_pools() -> None:
    found = status(prefill_0="ready", decode_0="ready", decode_1="ready")
    found.target.CopyFrom(admin_pb2.ScaleTarget(prefill=1, decode=2, version=3, follower="the operator", reached=3))
    assert other_roles_text(found) == []
    found.members[2].role = MEMBER_ROLES.number("prefill")
    assert other_roles_text(found) == [
        "by present roles: 2 prefill, 1 decode; the target counts pools, which `tandem role` does not change"
    ]
    found.target.reached = 2
    assert other_roles_text(found) == [], "the pools are still being scaled"


def candidate(prefill: str, decode: str, ttft_s: float = 0.0, **fields: object) -> admin_pb2.PlacementCandidate:
    predicted = admin_pb2.PlacementPrediction(ttft_s=ttft_s, itl_s=0.01, running_itl_s=0.02, kv_bytes=4 << 20)
    return admin_pb2.PlacementCandidate(
        prefill_member=prefill,
        decode_member=decode,
        depth=3,
        prediction=predicted if ttft_s else None,
        **fields,  # type: ignore[arg-type]
    )


def explanation(*placements: admin_pb2.PlacementExplanation, **fields: object) -> admin_pb2.RequestExplanation:
    return admin_pb2.RequestExplanation(
        request_id="req-1",
        label="mine",
        outcome="ok",
        age_s=2.0,
        num_prompt_tokens=512,
        num_tokens=64,
        placements=placements,
        policy="auto",
        **fields,  # type: ignore[arg-type]
    )


def test_an_explanation_marks_the_chosen_candidate_and_compares_predicted_with_real_times() -> None:
    placement = admin_pb2.PlacementExplanation(
        reason="explored",
        after_s=0.001,
        candidates=[
            candidate("p-0@1", "d-0@1", 0.12, num_cached=48, is_alternative=True),
            candidate("", "d-0@1", 0.31, is_chosen=True),
        ],
        num_candidates=5,
        propensity=0.02,
    )
    lines = explained_text(explanation(placement, ttft_s=0.331, itl_s=0.0125)).splitlines()
    assert lines[0].startswith("request req-1 (label mine): ok, 512 prompt tokens, 64 generated")
    assert lines[2].startswith("placement 1, 1.0 ms after arrival, by explored: drawn by --explore")
    assert "probability 0.02" in lines[3]
    assert lines[5].split() == ["~", "p-0", "d-0", "3", "48", "120.0", "10.0", "20.0", "4", "MiB", "0", "0.00"]
    assert lines[6].split()[:3] == ["*", "-", "d-0"]
    assert lines[7] == "and 3 more"
    assert lines[-1] == (
        "real: first token 330.0 ms after placement (predicted 310.0), 12.5 ms between tokens (predicted 10.0)"
    )


def test_an_explanation_shows_what_decided_where_no_target_is_predicted_to_be_missed() -> None:
    """A prediction just below a target is a risk, and sequences that run count too."""
    auto = SloAware(SloTargets(ttft_s=1.5), Random(1).random)
    times = ServiceTimes(PrefillTimes(0.0, 0.001, 0.0, 0.0), DecodeTimes(0.01, 0.001, 0.0, 0.0))
    queues = (PromptQueue(PromptWork(tokens, 0.0), PromptWork(tokens, 0.0)) for tokens in (1000, 700))
    loads = [WorkerLoad(MemberId(f"w{i}", "1"), "a", 0, work=WorkAhead(times, each)) for i, each in enumerate(queues)]
    placement = auto.choose([], loads, RequestFacts(num_prompt_tokens=400, max_tokens=2, num_choices=1))
    assert placement is not None and placement.reason is PlacementReason.SLO
    placed = Explanation("req-1", "", "ok", 0.0, 400, 2, None, None, (PlacedAttempt(placement, 0.0),))
    shown = explanation_to_wire(placed, 1.0, "auto")
    one, other = shown.placements[0].candidates
    assert (one.num_violations, other.num_violations) == (0, 0) and one.expected_misses < other.expected_misses
    best, second = (line.split() for line in explained_text(shown).splitlines() if " w" in line)
    assert (best[0], best[2]) == ("*", "w1") and float(best[-1]) < float(second[-1])


def test_an_explanation_without_predictions_shows_the_loads_and_a_failed_attempt_its_reason() -> None:
    chosen = candidate("p-0@1", "d-0@1", is_chosen=True)
    failed = admin_pb2.PlacementExplanation(
        reason="lowest_load", candidates=[chosen], num_candidates=1, propensity=1.0, failure="decode_worker_lost"
    )
    text = explained_text(explanation(failed, failed))
    assert "TTFT" not in text and "probability" not in text
    assert text.count("ended early: decode_worker_lost") == 2
    assert "placement 2, 0.0 ms after arrival, by lowest_load: it has the fewest sequences ahead" in text
    assert text.endswith("real: no token")
    assert "no workers were chosen yet" in explained_text(admin_pb2.RequestExplanation(request_id="r"))


def test_an_explanation_as_an_object_has_no_times_that_were_not_measured() -> None:
    placement = admin_pb2.PlacementExplanation(candidates=[candidate("p-0@1", "d-0@1")])
    shown: Any = explained_object([explanation(placement, ttft_s=0.5)])["requests"]
    assert (shown[0]["ttft_s"], shown[0]["itl_s"]) == (0.5, None)
    assert shown[0]["placements"][0]["candidates"][0]["prediction"] is None


def effect(basis: str, mean_s: float = 0.0, low_s: float = 0.0, high_s: float = 0.0) -> admin_pb2.LatencyEffect:
    return admin_pb2.LatencyEffect(
        basis=EFFECT_BASES.number(basis),
        mean_s=mean_s,
        low_s=low_s,
        high_s=high_s,
        alone_s=0.25,
        num_requests=2150,
        num_explored=43 if basis == "measured" else 0,
    )


def disaggregation(verdict: str, ttft: admin_pb2.LatencyEffect, **fields: object) -> admin_pb2.Disaggregation:
    return admin_pb2.Disaggregation(
        verdict=DISAGGREGATION_VERDICTS.number(verdict),
        ttft=ttft,
        itl=effect("predicted", -0.0005, -0.001, 0.0),
        running_itl=effect("unknown"),
        **fields,  # type: ignore[arg-type]
    )


def test_the_status_shows_the_effect_of_disaggregation_and_the_basis_of_the_estimate() -> None:
    found = disaggregation("worth_it", effect("measured", -0.031, -0.05, -0.012), placement="auto", explore=0.02)
    lines = disaggregation_text(found).splitlines()
    assert lines[0].startswith("disaggregation: worth it here")
    assert "-31 ms (-12 %)" in lines[2]
    assert "-50 to -12 ms (95 % interval)" in lines[2]
    assert lines[2].endswith("measured: 43 of 2150 requests explored")
    assert "-1 to +0 ms (9 of 10 requests)" in lines[3] and lines[3].endswith("predicted for 2150 requests")
    assert len(lines) == 4
    shown: Any = disaggregation_object(found)
    assert (shown["verdict"], shown["explore"], shown["ttft"]["basis"]) == ("worth_it", 0.02, "measured")


def test_the_status_shows_how_many_targets_are_kept_where_some_are_missed() -> None:
    goodput = admin_pb2.GoodputEffect(
        basis=EFFECT_BASES.number("predicted"), pair_share=0.97, alone_share=0.91, num_requests=1000
    )
    found = disaggregation("trade_off", effect("predicted", 0.02), placement="auto", goodput=goodput)
    (line,) = [line for line in disaggregation_text(found).splitlines() if line.startswith("latency targets kept")]
    assert "+6 points" in line and "97 % and 91 %" in line
    assert line.endswith("predicted for 1000 requests")
    goodput.alone_share = goodput.pair_share = 1.0
    found = disaggregation("trade_off", effect("predicted", 0.02), placement="auto", goodput=goodput)
    assert "targets kept" not in disaggregation_text(found)


@pytest.mark.parametrize(
    ("placement", "explore", "verdict", "advice"),
    [
        ("prefix-aware", 0.0, "not_known", "--placement auto"),
        ("auto", 0.0, "not_known", "no request could yet be served both"),
        ("auto", 0.0, "not_worth_it", "start routers with --explore 0.02 to measure"),
        ("auto", 0.1, "trade_off", "measured once 20 requests are explored"),
    ],
)
def test_an_estimate_that_is_not_measured_comes_with_advice(
    placement: str, explore: float, verdict: str, advice: str
) -> None:
    ttft = effect("unknown" if verdict == "not_known" else "predicted", 0.02)
    found = disaggregation(verdict, ttft, placement=placement, explore=explore)
    assert advice in disaggregation_text(found)
