"""The origin of each sequence at a decode worker is reported with its start, even when other choices are cancelled."""

from cluster.messages import MemberId
from decode_worker.live_handles import Arrival, LiveHandles
from decode_worker.streams import started_message
from engine.scheduling import commands

_ROUTER = MemberId("router", "1")


def _arrived(*handles: int) -> LiveHandles:
    """Choices of one prompt whose KV has been imported; their first tokens are ten times their handles."""
    live = LiveHandles(max_waiting_jobs=4)
    live.add_job(_ROUTER, handles)
    for handle in handles:
        live.arrive(_ROUTER, handle, Arrival(10 * handle, 1.5, 0.25, 4096, "tcp"))
    return live


async def test_a_choice_cancelled_during_the_first_step_hides_no_other_first_token() -> None:
    live = _arrived(1, 2, 3)
    live.remove(_ROUTER, frozenset({2}), 0.0)

    begun = live.begin(_ROUTER, (1, 2, 3), 1.0)

    assert {handle: arrival.first_token_id for handle, arrival in begun.items() if arrival} == {1: 10, 3: 30}
    event = commands.Started(_ROUTER, (1, 2, 3), queue_s=0.5, num_cached=0)
    started = started_message(event, begun).started
    assert (list(started.handles), len(started.first_token_ids)) == ([1, 3], 8)
    assert (started.transport, started.kv_bytes) == ("tcp", 4096)
    assert (started.queue_s, started.transfer_s) == (2.0, 0.25)  # the wait for room is part of the queue


async def test_a_start_with_only_cancelled_choices_reports_no_sequence() -> None:
    live = _arrived(1, 2)
    live.remove(_ROUTER, frozenset({1, 2}), 0.0)
    assert live.begin(_ROUTER, (1, 2), 1.0) == {}


async def test_a_prompt_prefilled_by_the_decode_worker_has_no_first_tokens_to_compare() -> None:
    live = LiveHandles(max_waiting_jobs=4)
    live.add_job(_ROUTER, (1, 2))
    event = commands.Started(_ROUTER, (1, 2), queue_s=0.5, num_cached=0)
    started = started_message(event, live.begin(_ROUTER, (1, 2), 1.0)).started
    assert (list(started.handles), started.first_token_ids, started.transport) == ([1, 2], b"", "local")
