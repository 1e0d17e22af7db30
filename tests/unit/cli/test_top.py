"""`tandem top` without a cluster: its screen fits the terminal, and it merges what routers answer."""

import os

import pytest

from cli.__main__ import main
from cli.top.screen import View, chosen_request, draw, requests_shown, sparkline
from cli.top.session import next_keys
from cli.top.watch import Watch
from tandem.v1 import admin_pb2, inference_pb2

DECODE = inference_pb2.REQUEST_PHASE_DECODE


def timeline(request_id: str, outcome: str = "", wall_s: float = 1.0) -> admin_pb2.RequestTimeline:
    return admin_pb2.RequestTimeline(
        request_id=request_id,
        outcome=outcome,
        num_tokens=7,
        spans=[admin_pb2.PhaseSpan(phase=DECODE, duration_s=wall_s)],
        ledger=inference_pb2.Ledger(wall_s=wall_s),
        decode_member="decode-0@a",
    )


def worker(name: str, tokens: float = 0.0, **blocks: float) -> admin_pb2.MemberStatus:
    figures = {"running": 3.0, "tokens_drawn": tokens, "tokens_computed": 0.0}
    figures |= {f"blocks_{state}": number for state, number in blocks.items()}
    return admin_pb2.MemberStatus(
        member_id=name,
        incarnation="a",
        role=admin_pb2.MEMBER_ROLE_DECODE,
        state=admin_pb2.MEMBER_STATE_READY,
        figures=figures,
        model="demo_model",
    )


def router(name: str = "router-0@r", **fields: object) -> admin_pb2.RouterOverview:
    return admin_pb2.RouterOverview(router=name, position=admin_pb2.OverviewPosition(ended=1), **fields)  # type: ignore[arg-type]


def answer(*routers: admin_pb2.RouterOverview, members: int = 2) -> admin_pb2.OverviewResponse:
    workers = [worker(f"decode-{number}", held=96, cached=2, free=2) for number in range(members)]
    return admin_pb2.OverviewResponse(members=workers, routers=routers or [router()])


@pytest.mark.parametrize("num_members", [1, 40])
@pytest.mark.parametrize("num_requests", [0, 100])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (132, 50)])
def test_the_screen_fits_the_terminal(num_members: int, num_requests: int, width: int, height: int) -> None:
    watch = Watch()
    live = [timeline(f"request-with-a-long-name-{number:04}") for number in range(num_requests)]
    watch.update(answer(router(live=live, num_live=num_requests), members=num_members))
    lines = draw(watch, View(), width, height).plain.split("\n")
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert any("decode-0" in line for line in lines) and lines[-1].startswith("q quit")
    assert any("request-with-a-long-na" in line for line in lines) == bool(num_requests)


def test_faults_follow_the_title_one_line_each() -> None:
    watch = Watch()
    breaker = admin_pb2.PairBreaker(exporter="prefill-0@a", importer="decode-0@a", state="open")
    own = router(breakers=[breaker], slow=["the KV pool of decode-0 is full (9 preemptions a minute)"])
    watch.update(answer(own, router("router-1@s", problem="connection refused"), members=1))
    lines = draw(watch, View(), 80, 24).plain.split("\n")
    assert len(lines) == 24 and lines[1:4] == [
        "hand-offs from prefill-0 to decode-0 fail",
        "the KV pool of decode-0 is full (9 preemptions a minute)",
        "router-1 does not answer",
    ]


def test_a_chosen_request_stays_chosen_when_others_arrive_and_when_it_ends() -> None:
    watch, view = Watch(), View(request=("router-0@r", "mine"))
    watch.update(answer(router(live=[timeline("other", wall_s=5.0), timeline("mine")])))
    assert chosen_request(requests_shown(watch, view), view) == 1
    watch.update(answer(router(live=[timeline("a"), timeline("b"), timeline("c")], ended=[timeline("mine", "ok")])))
    assert chosen_request(requests_shown(watch, view), view) == 3


def test_a_request_id_cannot_control_the_terminal() -> None:
    watch = Watch()
    watch.update(answer(router(live=[timeline("\x1b]0;owned\x07\n")])))
    assert not {"\x1b", "\x07"} & set(draw(watch, View(), 80, 24).plain)


def test_a_worker_has_a_rate_after_two_answers() -> None:
    watch = Watch()
    for time_s, tokens in ((10.0, 100.0), (12.0, 500.0)):
        watch.update(admin_pb2.OverviewResponse(members=[worker("decode-0", tokens)], routers=[router(time_s=time_s)]))
    assert watch.tokens_per_s == {"decode-0@a": 200.0}


def test_rates_of_two_routers_are_added_by_period() -> None:
    watch = Watch()
    samples = [admin_pb2.RateSample(at_s=at_s, period_s=2.0, num_ended=4, ttft_p50_s=0.1) for at_s in (100.1, 102.3)]
    late = [admin_pb2.RateSample(at_s=102.9, period_s=2.0, num_ended=2, ttft_p50_s=0.3)]
    watch.update(answer(router(samples=samples), router("router-1@s", samples=late)))
    assert watch.series("num_ended") == [2.0, 3.0]
    assert watch.series("ttft_p50_s") == pytest.approx([0.1, 0.3])
    assert sparkline([1.0, 2.0], 3) == " ▅█"


def test_keys_are_named_and_the_end_of_the_input_is_an_empty_one() -> None:
    read, write = os.pipe()
    wake, waker = os.pipe()
    os.write(write, b"\x1b[A\x1b[Bs\t")
    assert next_keys(read, wake, 10.0) == ["up", "down", "s", "tab"]
    os.write(waker, b".")
    assert next_keys(read, wake, 10.0) == []
    os.close(write)
    assert next_keys(read, wake, 10.0) == [""]
    for descriptor in (read, wake, waker):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--json",), "--json needs --once"), (("--interval-s", "0"), "must be positive"), ((), "needs a terminal")],
)
def test_a_wrong_flag_is_refused(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *words, "--address", "127.0.0.1:1"]) == 2
    assert said in capsys.readouterr().err
