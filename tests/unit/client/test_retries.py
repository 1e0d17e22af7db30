"""The client's retries after it has lost its router: which router it tries, after which wait, and for how long."""

import pytest

from tandem.errors import (
    HANDSHAKE_FAILED,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TandemError,
    Unavailable,
)
from tandem.progress import Progress
from tandem.v1 import inference_pb2
from tests.unit.client.lost_generations import LOST, SILENT, begun, delta, progress


@pytest.mark.parametrize("error", [LOST, SILENT, Unavailable("leaving", reason="draining")])
def test_a_request_that_no_router_accepted_is_retried_at_all_routers_until_its_deadline(error: TandemError) -> None:
    generation = progress(num_routers=3, router="b")
    now_s, waits_s, routers = 0.0, [], []
    while now_s < 98:
        waits_s.append(generation.on_lost(error, now_s))
        routers.append(generation.router)
        now_s += waits_s[-1]
    with pytest.raises(DeadlineExceeded, match=f"no router accepted the request .* the last error: {error.message}"):
        generation.on_lost(error, now_s)
    assert waits_s[:5] == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert set(waits_s[5:]) == {2.0}
    assert routers[:4] == ["c", "a", "b", "c"]
    assert not generation.request.HasField("resume_from") and generation.request.request_id == "r"


def test_while_no_router_was_ever_reached_a_request_is_retried_until_connect_by_s() -> None:
    reached = False
    request = inference_pb2.GenerateRequest(request_id="r", text="x")
    generation = Progress(
        request,
        known=lambda: ("a",),
        router="a",
        deadline_s=100.0,
        connect_by_s=30.0,
        is_reached=lambda: reached,
        draw=lambda: 1.0,
    )
    assert generation.on_lost(LOST, 29.0) == 0.1
    with pytest.raises(Unavailable) as raised:
        generation.on_lost(LOST, 29.9)
    assert raised.value is LOST
    reached = True
    assert generation.on_lost(LOST, 31.0) == 0.4


def test_each_address_is_tried_once_where_nothing_was_reached_and_no_time_is_left_to_connect() -> None:
    request = inference_pb2.GenerateRequest(request_id="r", text="x")
    generation = Progress(
        request, known=lambda: ("a", "b"), router="a", deadline_s=100.0, connect_by_s=0.0, is_reached=lambda: False
    )
    generation.on_lost(LOST, 1.0)
    assert generation.router == "b"
    with pytest.raises(Unavailable, match="Socket closed"):
        generation.on_lost(LOST, 2.0)


def test_a_certificate_or_protocol_that_differs_is_raised_when_each_router_was_tried_once() -> None:
    error = Unavailable("the server does not use TLS", reason=HANDSHAKE_FAILED, is_lost=True)
    generation = progress(num_routers=2)
    generation.on_lost(error, 0.0)
    with pytest.raises(Unavailable, match="does not use TLS"):
        generation.on_lost(error, 0.0)


def test_a_deadline_that_passes_during_a_retry_names_the_error_before_it() -> None:
    generation, passed = progress(), DeadlineExceeded("no response came within timeout_s", reason="deadline_exceeded")
    generation.on_lost(SILENT, 50.0)
    with pytest.raises(DeadlineExceeded, match="the last error: the router at a sent no message"):
        generation.on_lost(passed, 100.0)
    with pytest.raises(DeadlineExceeded) as raised:
        progress().on_lost(passed, 100.0)
    assert raised.value is passed


def test_silent_routers_get_more_time_for_a_request_that_none_has_accepted() -> None:
    """They may be slow, and a call that is cancelled and sent again makes them slower."""
    generation, factors = progress(num_routers=2), []
    for _ in range(8):
        factors.append(generation.patience)
        generation.on_lost(SILENT, 0.0)
    assert factors == [1, 1, 2, 2, 4, 4, 4, 4]
    accepted = begun()
    for _ in range(4):
        accepted.on_lost(SILENT, 0.0)
    assert accepted.patience == 1


def test_each_lost_call_may_meet_three_live_ids() -> None:
    """A slow router may have begun to serve several lost calls when it reads the next one."""
    live = InvalidRequest("belongs to a live request", reason="duplicate_request")
    generation = progress(num_routers=1)
    for _ in range(4):
        generation.on_lost(SILENT, 0.0)
        for _ in range(3):
            assert generation.on_lost(live, 0.0) == 0.0
    assert generation.request.request_id == "r.13"
    with pytest.raises(InvalidRequest):
        generation.on_lost(live, 0.0)


def test_an_unavailable_cluster_is_retried_at_most_once_per_router() -> None:
    generation, error = begun(), Unavailable("both pools are gone", reason="worker_lost")
    generation.on_lost(error, 0.0)
    with pytest.raises(Unavailable, match="both pools"):
        generation.on_lost(error, 0.0)


@pytest.mark.parametrize(
    "error", [LOST, Unavailable("leaving", reason="draining"), Overloaded("full", reason="overloaded")]
)
def test_a_begun_generation_is_retried_until_its_deadline_with_growing_waits(error: TandemError) -> None:
    generation = begun()
    generation.on_lost(LOST, 0.0)
    now_s, waits_s, routers = 0.0, [], []
    while now_s < 98:
        waits_s.append(generation.on_lost(error, now_s))
        routers.append(generation.router)
        now_s += waits_s[-1]
    with pytest.raises(DeadlineExceeded, match=error.message):
        generation.on_lost(error, now_s)
    assert waits_s[:4] == [0.2, 0.4, 0.8, 1.6]
    assert set(waits_s[4:]) == {2.0}
    assert routers[:4] == ["a", "b", "a", "b"]


def test_waits_have_jitter_so_that_clients_of_one_router_do_not_retry_at_once() -> None:
    early, late = progress(draw=0.0), progress(draw=0.5)
    assert (early.on_lost(LOST, 0.0), late.on_lost(LOST, 0.0)) == (0.0, 0.05)


def test_an_overloaded_router_is_retried_no_sooner_than_its_retry_after() -> None:
    full = Overloaded("full", reason="overloaded", retry_after_s=3.0)
    alone = begun(num_routers=1)
    alone.on_lost(LOST, 0.0)
    assert alone.on_lost(full, 0.0) == 3.2
    generation, now_s, calls = begun(), 0.0, list[tuple[str, float]]()
    for error in (LOST, full, *(LOST,) * 5):
        now_s += generation.on_lost(error, now_s)
        calls.append((generation.router, round(now_s, 1)))
    # The dead router is called again meanwhile, with pauses that double: it may have been restarted.
    assert calls == [("b", 0.1), ("a", 0.3), ("a", 0.7), ("a", 1.5), ("a", 3.1), ("b", 5.1), ("a", 7.1)]


def test_the_retry_after_of_one_router_delays_no_call_to_another() -> None:
    """The stream has 20 s left, one of three routers is dead and one is full for 30 s: the third is called at once."""
    generation = begun(num_routers=3)
    generation.on_lost(LOST, 80.0)
    assert generation.router == "b"
    assert generation.on_lost(Overloaded("full", reason="overloaded", retry_after_s=30.0), 80.0) == 0.2
    assert generation.router == "c"


def test_received_tokens_reset_the_retry_wait() -> None:
    generation = begun()
    for _ in range(4):
        generation.on_lost(LOST, 0.0)
    generation.add(delta(0, 2, (7,)))
    assert generation.on_lost(LOST, 0.0) == 0.1
