"""`Admin.Explain`, exploration and the verdict on disaggregation: over scripted workers, and on a real cluster."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from cli.__main__ import main
from cli.connection import find_admin_key
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes, StepWork, TimedStep
from router.policies.candidates import SloTargets
from router.policies.effect import LEAST_EXPLORED
from tandem import channel
from tandem.client import Client
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from tests.system.rigs.members.router_harness import RouterUnderTest
from tests.system.rigs.members.served_router import collect, generate_request, reason_of, served
from tests.system.rigs.processes.terminal_program import TerminalProgram
from tests.system.rigs.processes.up_command import Up

TIMES = ServiceTimes(
    PrefillTimes(0.0, 0.01, 0.0, 0.0),
    DecodeTimes(0.01, 0.0, 0.0, 0.0),
    typical_prefill=TimedStep(StepWork(num_new=8), 0.08),
    typical_decode=TimedStep(StepWork(batch=1, context=8), 0.01),
)
Command = Callable[..., tuple[int, str]]


async def _pool(router: RouterUnderTest) -> None:
    """A prefill worker that decodes slowly, and a decode worker that computes prompts slowly."""
    prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
    prefill.service_times = replace(TIMES, decode=DecodeTimes(1.0, 0.0, 0.0, 0.0))
    decode.service_times = replace(TIMES, prefill=PrefillTimes(0.0, 0.02, 0.0, 0.0))
    await router.connected()
    await router.knows_speeds()


async def _explain(channel: grpc.aio.Channel, name: str) -> admin_pb2.RequestExplanation:
    request = admin_pb2.ExplainRequest(request=name)
    found: admin_pb2.ExplainResponse = await admin_pb2_grpc.AdminStub(channel).Explain(request, timeout=10)
    (explained,) = found.requests
    return explained


async def _verdict(channel: grpc.aio.Channel) -> admin_pb2.Disaggregation:
    request = admin_pb2.StatusRequest()
    status: admin_pb2.StatusResponse = await admin_pb2_grpc.AdminStub(channel).Status(request, timeout=10)
    return status.disaggregation


async def test_a_request_is_explained_while_it_is_live_and_after_its_end() -> None:
    async with served(placement="auto") as (router, channel):
        await _pool(router)
        router.workers[1].pause_at = 4  # type: ignore[attr-defined]
        request = generate_request(request_id="mine", label="my label")
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=20)
        num_tokens = 0
        while num_tokens < 4:
            num_tokens += sum(len(delta.token_ids) for delta in (await call.read()).deltas)
        live = await _explain(channel, "mine")
        assert (live.outcome, live.num_tokens, live.policy) == ("", 4, "auto")
        router.workers[1].resumed.set()  # type: ignore[attr-defined]
        while await call.read() is not grpc.aio.EOF:
            pass
        ended = await _explain(channel, "my label")
        assert (ended.request_id, ended.outcome, ended.num_prompt_tokens, ended.num_tokens) == ("mine", "ok", 4, 8)
        (placement,) = ended.placements
        assert (placement.reason, placement.num_candidates, placement.propensity) == ("ttft", 2, 1.0)
        best, other = placement.candidates
        assert (best.is_chosen, other.is_chosen, other.prefill_member) == (True, False, "")
        assert (best.prediction.ttft_s, other.prediction.ttft_s) == pytest.approx((0.04, 0.08))
        assert 0 < placement.after_s < ended.ttft_s
        assert ended.itl_s > 0


async def test_each_attempt_of_a_request_has_its_own_entry_with_the_reason_of_its_failure() -> None:
    async with served(placement="least-loaded") as (router, channel):
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        decode.handoff_failures = ["read_failed"]
        await router.connected()
        await collect(channel, generate_request(request_id="mine"))
        explained = await _explain(channel, "mine")
        assert explained.outcome == "ok"
        assert [placement.failure for placement in explained.placements] == ["handoff_read_failed", ""]
        first = explained.placements[0]
        assert (first.reason, first.num_candidates) == ("only_candidate", 1)
        assert not first.candidates[0].HasField("prediction")


async def test_an_unknown_request_is_not_found() -> None:
    async with served() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _explain(channel, "nobody's")
        assert (refused.value.code(), reason_of(refused.value)) == (grpc.StatusCode.NOT_FOUND, "not_found")
        assert "nobody's" in str(refused.value.details())


async def test_explored_requests_are_counted_and_measure_the_effect_of_disaggregation() -> None:
    async with served(placement="auto", explore=0.5) as (router, channel):
        await _pool(router)
        assert (await _verdict(channel)).verdict == admin_pb2.DISAGGREGATION_VERDICT_NOT_KNOWN
        num_explored, number = 0.0, 0
        while num_explored < LEAST_EXPLORED or number - num_explored < LEAST_EXPLORED:
            await collect(channel, generate_request(max_tokens=2, request_id=f"r{number}"))
            number += 1
            num_explored = router.telemetry.value("tandem_placement_decisions_total", reason="explored")
        explained = [await _explain(channel, f"r{each}") for each in range(number)]
        explored = [each for each in explained if each.placements[0].reason == "explored"]
        assert len(explored) == num_explored
        for each in explored:
            best, chosen = each.placements[0].candidates
            assert (best.is_alternative, chosen.is_chosen, each.placements[0].propensity) == (True, True, 0.5)
        found = await _verdict(channel)
        assert found.ttft.basis == admin_pb2.EFFECT_BASIS_MEASURED
        assert (found.ttft.num_requests, found.ttft.num_explored) == (number, num_explored)
        assert found.ttft.low_s <= found.ttft.mean_s <= found.ttft.high_s
        assert found.itl.basis == admin_pb2.EFFECT_BASIS_PREDICTED
        assert (found.placement, found.explore) == ("auto", 0.5)


async def test_without_exploration_the_verdict_is_predicted() -> None:
    async with served(placement="auto") as (router, channel):
        await _pool(router)
        await asyncio.gather(*(collect(channel, generate_request(max_tokens=2)) for _ in range(3)))
        found = await _verdict(channel)
        assert (found.ttft.basis, found.ttft.num_requests) == (admin_pb2.EFFECT_BASIS_PREDICTED, 3)
        assert found.ttft.mean_s < 0


async def test_no_request_is_explored_into_a_missed_target() -> None:
    async with served(placement="auto", explore=0.5, targets=SloTargets(ttft_s=0.06, itl_s=0.1)) as (router, channel):
        await _pool(router)
        for _ in range(20):
            await collect(channel, generate_request(max_tokens=2))
        assert router.telemetry.value("tandem_placement_decisions_total", reason="explored") == 0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two routers, one prefill and one decode worker, with the demo model."""
    started = Up(tmp_path_factory.mktemp("up"), "--placement", "auto", "--explore", "0.5", "--routers", "2")
    started.until("ready http=")
    yield started
    assert started.end() == 0


@pytest.fixture
def tandem(up: Up, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a client command for that cluster, and return its status and output."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", up.environment["XDG_RUNTIME_DIR"])

    def command(*arguments: str) -> tuple[int, str]:
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return command


def _addresses(tandem: Command) -> tuple[str, list[str]]:
    """Return the addresses that the commands use, and the registered one of each router."""
    _, output = tandem("status", "--json")
    status = json.loads(output)
    return status["router"], [member["address"] for member in status["members"] if member["role"] == "router"]


def _generate(client: Client, label: str) -> str:
    """Generate some tokens and return the request's id."""
    return client.generate("def read(path):\n", max_tokens=4, ignore_eos=True, label=label).result().request_id


def _explained(tandem: Command, request_id: str) -> dict[str, Any]:
    """Return the explanation of a request of which there is one."""
    status, output = tandem("explain", request_id, "--json")
    assert status == 0, output
    (explained,) = json.loads(output)["requests"]
    return dict(explained)


def test_a_request_is_explained_by_whichever_router_served_it(tandem: Command) -> None:
    _, routers = _addresses(tandem)
    for number, address in enumerate(routers):
        with Client(address, discover=False) as client:
            while (
                _explained(tandem, _generate(client, f"at router {number}"))["placements"][0]["reason"]
                == "unknown_speed"
            ):
                pass  # the workers' first heartbeats are on their way
    for number, address in enumerate(routers):
        status, output = tandem("explain", f"at router {number}", "--address", routers[0])
        assert status == 0, output
        assert f"(label at router {number}): ok" in output
        assert "real: first token" in output and "(predicted" in output
        if address != routers[0]:
            status, output = tandem("explain", f"at router {number}", "--address", routers[0], "--no-discover")
            assert (status, len(output.splitlines())) == (1, 1)


def test_a_request_over_http_is_explained_by_its_x_request_id(up: Up, tandem: Command) -> None:
    http = up.until("ready http=").split("http=")[1].split()[0]
    body = {"model": "demo_model", "prompt": "import os\n", "max_tokens": 4}
    answer = httpx.post(f"{http}/v1/completions", json=body, headers={"x-request-id": "from http"}, timeout=60)
    assert answer.status_code == 200
    explained = _explained(tandem, "from http")
    assert _explained(tandem, answer.json()["id"])["request_id"] == explained["request_id"]
    (placement,) = explained["placements"]
    assert (explained["label"], explained["outcome"], explained["policy"]) == ("from http", "ok", "auto")
    assert sum(candidate["is_chosen"] for candidate in placement["candidates"]) == 1
    assert explained["ttft_s"] > 0


def test_an_overview_has_the_new_requests_of_every_router(up: Up, tandem: Command) -> None:
    _, routers = _addresses(tandem)
    for number, address in enumerate(routers):
        with Client(address, discover=False) as client:
            _generate(client, f"watched at router {number}")
    with channel.open_channel(routers[0]) as opened:
        admin = admin_pb2_grpc.AdminStub(opened)
        key = [("authorization", f"Bearer {find_admin_key(routers[0], up.environment)}")]
        found = admin.Overview(admin_pb2.OverviewRequest(), timeout=60, metadata=key)
        seen = {router.router: router.position for router in found.routers}
        again = admin.Overview(admin_pb2.OverviewRequest(seen=seen), timeout=60, metadata=key)
    assert [router.router.partition("@")[0] for router in found.routers] == ["router-0", "router-1"]
    for number, router in enumerate(found.routers):
        assert f"watched at router {number}" in [request.label for request in router.ended]
    assert [len(router.ended) for router in again.routers] == [0, 0]
    assert {member.role for member in found.members} == {1, 2, 3}


def test_top_shows_members_and_requests_and_explains_and_drains_by_keys(up: Up, tandem: Command) -> None:
    _, routers = _addresses(tandem)
    with Client(routers[1], discover=False) as client:
        _generate(client, "seen in top")
    status, output = tandem("top", "--once", "--json")
    assert status == 0
    shown = json.loads(output)
    assert "seen in top" in [request["label"] for router in shown["routers"] for request in router["ended"]]
    assert {member["role"] for member in shown["members"]} == {"router", "prefill", "decode"}
    with TerminalProgram("top", "--interval-s", "0.2", environment=up.environment) as top:
        screen = top.until("seen in top")
        assert "decode-0" in screen and "TTFT" in screen
        top.press("e")
        assert "(label seen in top)" in top.until("any key: back")
        top.press(" \td")  # back, to the members, drain the first one
        top.until("drain router-0? y: yes, any other key: no")
        top.press("n")
        top.until("q quit")
        top.press("q")
        assert top.end() == 0
    assert len(_addresses(tandem)[1]) == 2


def test_status_reports_the_effect_of_disaggregation_once_requests_were_explored(tandem: Command) -> None:
    _, routers = _addresses(tandem)

    def ask(number: int) -> None:
        with Client(routers[0], discover=False) as client:
            client.generate(f"def f{number}(path):\n", max_tokens=3).result()

    def measured() -> dict[str, Any]:
        _, output = tandem("status", "--json", "--address", routers[0])
        ttft: dict[str, Any] = json.loads(output)["disaggregation"]["ttft"]
        return ttft

    number = 0
    while measured()["basis"] != "measured":
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(ask, range(number, number + 20)))
        number += 20
    ttft = measured()
    assert ttft["low_s"] <= ttft["mean_s"] <= ttft["high_s"]
    assert ttft["num_requests"] >= 2 * LEAST_EXPLORED
    _, text = tandem("status", "--address", routers[0])
    (line,) = [line for line in text.splitlines() if line.startswith("disaggregation: ")]
    assert "here" in line and "not known" not in line
    assert "95 % interval" in text and "requests explored" in text


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("explain", "nobody's"), 1, 'tandem: not_found: no request "nobody\'s" is live'),
        (("explain",), 2, "REQUEST"),
        (("explain", "x", "--jsn"), 2, "--jsn"),
    ],
)
def test_a_wrong_word_or_an_unknown_request_is_answered_in_plain_words(
    tandem: Command, words: tuple[str, ...], status: int, said: str
) -> None:
    found, output = tandem(*words)
    assert found == status
    assert said in output
    assert "Traceback" not in output


def test_a_router_that_is_gone_is_reported_and_the_others_are_asked(tandem: Command) -> None:
    used, _ = _addresses(tandem)
    with Client(used) as client:
        _generate(client, "beside a lost router")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    status, output = tandem("explain", "beside a lost router", "--address", f"{gone},{used}")
    assert status == 0
    assert f"tandem: router {gone}:" in output
    status, output = tandem("explain", "nobody's", "--address", f"{gone},{used}")
    assert status == 1
    assert "1 could not be asked" in output.splitlines()[-1]
    status, output = tandem("explain", "nobody's", "--address", gone)
    assert (status, len(output.splitlines())) == (1, 1)


def test_exploration_without_predictions_is_refused_before_anything_starts(tmp_path: Path, tandem: Command) -> None:
    status, output = tandem("up", "--explore", "0.02", "--cluster-key-file", str(tmp_path / "key"))
    assert status == 2
    assert output.startswith("tandem: --explore needs --placement auto")
