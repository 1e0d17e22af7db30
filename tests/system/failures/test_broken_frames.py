"""A connection for frames breaks while the worker behind it lives: its stream goes on over gRPC, calls in flight are
made again, and the worker is neither lost nor avoided."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from cluster.auth.member_channel import MemberChannel
from cluster.serving.frame_channel import CallerConnection
from cluster.serving.frame_server import FrameContext
from router.fleet.peer import Peer
from router.requests import GenerateRequest
from router.running import running
from tests.polling import until
from tests.system.rigs.members.router_harness import (
    Answer,
    RouterUnderTest,
    answer_to,
    ask,
    expected_tokens,
    router_under_test,
)
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import ScriptedWorker

_DEADLINE_S = 60.0  # also for a broken stream: a starved machine may need long to restore it


async def _connection(peer: Peer) -> CallerConnection | None:
    """Return the router's connection for frames to a worker; None: there is none now."""
    assert isinstance(peer._channel, MemberChannel) and peer._channel.frames is not None
    return peer._channel.frames.connection


def _peer(router: RouterUnderTest, worker: ScriptedWorker) -> Peer:
    peer = router.fleet.peer(worker.id)
    assert peer is not None, f"{worker.id} is lost"
    return peer


async def _frames(router: RouterUnderTest, worker: ScriptedWorker) -> CallerConnection:
    connection = await until(partial(_connection, _peer(router, worker)), what=f"frames to {worker.id} are connected")
    assert connection is not None
    return connection


async def _break(router: RouterUnderTest, worker: ScriptedDecode, connection: CallerConnection) -> None:
    """Break the connection, and wait until both sides have noticed and the worker's stream is restored."""
    server = worker.server._frames
    assert server is not None
    (end,) = server.connections
    connection.abort()
    await router.until_gone(worker)
    await end.lost
    await router.connected_to(worker)


@asynccontextmanager
async def _stream_with_three_tokens(
    router: RouterUnderTest, request: GenerateRequest, decode: ScriptedDecode
) -> AsyncIterator[Answer]:
    """Yield the answer so far, and on exit wait for its end. The worker waits before its next token."""
    answer, decode.pause_at = Answer(), 3

    async def num_tokens() -> int:
        return len(answer.token_ids.get(0, ()))

    async with running(_receive(router, request, answer)) as receiving:
        await until(num_tokens, lambda number: number == 3, what="the client has three tokens")
        yield answer
        await asyncio.wait_for(receiving, _DEADLINE_S)


async def _receive(router: RouterUnderTest, request: GenerateRequest, answer: Answer) -> None:
    async for output in router.pipeline.generate(request):
        answer.take(output)


async def test_a_stream_goes_on_where_it_was_without_another_attempt() -> None:
    async with router_under_test(grace_s=_DEADLINE_S) as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        request = ask(max_tokens=6)
        async with _stream_with_three_tokens(router, request, decode) as answer:
            peer, connection = _peer(router, decode), await _frames(router, decode)
            await _break(router, decode, connection)
            decode.resumed.set()
        assert answer.token_ids == {0: expected_tokens(router, request)}
        assert answer.summary.ledger.reasons == ()
        assert len(prefill.jobs) == len(decode.jobs) == 1
        assert _peer(router, decode) is peer and peer.trusted and not router.pipeline.pairs.failing()
        assert not router.telemetry.by_labels("tandem_false_suspicions_total")
        assert await _frames(router, decode) is not connection


async def test_a_stream_that_went_on_over_grpc_uses_frames_again_once_no_sequence_runs() -> None:
    async with router_under_test(grace_s=_DEADLINE_S) as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        request = ask(max_tokens=6)
        async with _stream_with_three_tokens(router, request, decode) as answer:
            await _break(router, decode, await _frames(router, decode))
            await _frames(router, decode)  # restored, while the sequence runs
            decode.resumed.set()
        assert answer.token_ids == {0: expected_tokens(router, request)}
        await until(lambda: _carries_the_stream(router, decode), what="the stream uses frames")
        assert (await answer_to(router, request)).summary.ledger.reasons == ()


async def _carries_the_stream(router: RouterUnderTest, worker: ScriptedDecode) -> bool:
    """Return whether the worker serves the router's stream as frames."""
    return any(isinstance(context, FrameContext) for context in worker.open_streams)


async def _num_waiting(worker: ScriptedDecode) -> int:
    return sum(stream.qsize() for stream in worker.streams.values())


async def test_tokens_that_a_broken_connection_loses_are_made_again_once() -> None:
    async with router_under_test(grace_s=_DEADLINE_S) as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        request = ask(max_tokens=8)
        async with _stream_with_three_tokens(router, request, decode) as answer:
            connection = await _frames(router, decode)
            assert connection.transport is not None
            connection.transport.pause_reading()
            paused, decode.resumed, decode.pause_at = decode.resumed, asyncio.Event(), 5
            paused.set()
            await decode.until(lambda: any(progress.index == 5 for progress in decode.progress.values()))
            await until(partial(_num_waiting, decode), lambda number: not number, what="the tokens are on their way")
            await _break(router, decode, connection)
            decode.resumed.set()
        assert answer.token_ids == {0: expected_tokens(router, request)}
        assert answer.summary.ledger.reasons == ("decode_token_out_of_order",)
        assert len(prefill.jobs) == len(decode.jobs) == 2


async def test_a_prefill_in_flight_is_made_again_and_its_worker_stays() -> None:
    async with router_under_test(grace_s=_DEADLINE_S) as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        prefill.before_first_tokens.close()
        request = ask()
        asking = asyncio.create_task(answer_to(router, request))
        await asyncio.wait_for(prefill.before_first_tokens.reached.wait(), _DEADLINE_S)
        await decode.until(lambda: bool(decode.jobs))
        peer = _peer(router, prefill)
        (await _frames(router, prefill)).abort()
        await asyncio.wait_for(prefill.cancelled.wait(), _DEADLINE_S)
        prefill.before_first_tokens.open()
        answer = await asyncio.wait_for(asking, _DEADLINE_S)
        assert answer.token_ids == {0: expected_tokens(router, request)}
        assert answer.summary.ledger.reasons == ("prefill_worker_lost",)
        assert len(prefill.jobs) == len(decode.jobs) == 2
        assert _peer(router, prefill) is peer and not router.pipeline.pairs.failing()
