"""Members' calls as frames in simulated clusters: over connections that break, fall silent and are not read, and where
no connection opens at all."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.mishaps import Kind, Mishap, Phase
from tests.chaos.simulated.schedules.mix import SEPARATE, Wires
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import Result, run_schedule

_CRAMPED = Wires(window_bytes=600, high_water_bytes=300, cut_share=0.5, max_unsent_bytes=4096)


def _schedule(wires: Wires, *mishaps: Mishap, at_s: Sequence[float] = (0.0, 0.0, 0.0)) -> Schedule:
    asks = tuple(Ask(each, 0, 0, 0, num_tokens=20, max_tokens=20) for each in at_s)
    plain = replace(plain_schedule(1), num_routers=1, num_prefills=1, num_decodes=2, asks=asks)
    return replace(plain, mix=replace(SEPARATE, wires=wires), mishaps=mishaps)


def _run(schedule: Schedule) -> Result:
    with simulated_machine():
        result = run_schedule(schedule)
    assert not result.violations, result.violations
    assert result.outcomes == {"ok": len(schedule.asks)}
    return result


def test_frames_in_pieces_serve_every_request_and_replay_to_the_byte() -> None:
    first, second = (_run(_schedule(_CRAMPED)) for _ in range(2))
    assert first.trace == second.trace and first.happened == second.happened
    assert first.reached["frames: frame in pieces"] and first.reached["frames: call ok"]
    assert not first.reached["frames: call lost"]


def test_requests_are_served_over_grpc_where_no_connection_for_frames_opens() -> None:
    """A firewall drops the packets of the port for frames, and the router's streams still begin within their grace."""
    result = _run(_schedule(Wires(blocked_share=1.0)))
    assert result.reached["frames: not connected"] and not result.reached["frames: connected"]


@pytest.mark.parametrize(("phase", "after_bytes"), list(zip(Phase, (0, 3, 9, 12, 40, 5), strict=True)))
def test_a_connection_that_breaks_between_two_bytes_loses_no_token(phase: Phase, after_bytes: int) -> None:
    torn = Mishap(Kind.TORN, "decode", 0, at_s=0.0, for_s=0.0, phase=phase, after_bytes=after_bytes)
    result = _run(_schedule(Wires(cut_share=0.1), torn))
    assert result.reached["connections: torn"] and result.reached["frames: connected again"]


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_silent_connection_is_closed_by_its_pings_and_loses_no_token(role: str) -> None:
    silent = Mishap(Kind.SILENT, role, 0, at_s=0.0, for_s=0.0, phase=Phase.DECODING)
    result = _run(_schedule(Wires(), silent, at_s=(0.0, 0.0, 30.0)))
    assert result.reached["connections: silent"] and result.reached["frames: ping not answered"]


def test_a_router_with_more_unread_messages_than_the_bound_connects_again_and_loses_no_token() -> None:
    """While it is stopped, more messages of one stream arrive than may wait to be read."""
    stopped = Mishap(Kind.STOP, "router", 0, at_s=0.0, for_s=2.0, phase=Phase.DECODING)
    result = _run(_schedule(Wires(max_unread_bytes=1024), stopped))
    assert result.reached["frames: too much unread"] and result.reached["frames: connected again"]


def test_a_worker_that_reads_nothing_for_a_while_stops_its_callers_and_loses_no_token() -> None:
    deaf = Mishap(Kind.DEAF, "router", 0, at_s=0.0, for_s=8.0, phase=Phase.DECODING)
    result = _run(_schedule(_CRAMPED, deaf))
    assert result.reached["connections: deaf"] and result.reached["frames: writing paused"]


def test_a_frame_larger_than_the_bound_on_unsent_bytes_ends_no_connection_and_no_attempt() -> None:
    """The answer of the only worker has the log probabilities of 80 tokens in one frame."""
    wires = Wires(window_bytes=600, high_water_bytes=300, max_unsent_bytes=1024)
    ask = Ask(0.0, 0, 0, 0, num_tokens=80, max_tokens=8, prompt_logprobs=5)
    one = replace(plain_schedule(1), num_routers=1, num_prefills=0, prefill_blocks=(), num_decodes=1, asks=(ask,))
    result = _run(replace(one, mix=replace(SEPARATE, wires=wires)))
    assert result.reached["frames: writing paused"]
    assert not result.reached["frames: too much unsent"] and not result.reached["frames: call lost"]
