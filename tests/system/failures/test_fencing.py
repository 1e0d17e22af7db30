"""A member exits when a newer incarnation takes its name; its requests continue at other members and are never mixed
up.

tests/contract/handoff/test_handoff_refusals.py tests the fencing of hand-offs, and test_wrong_messages.py a decode
worker that was stopped and continues.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from cluster.auth.key_file import load_keys
from cluster.member import Capacity, MemberState
from cluster.messages import CacheEvents, DecodeJob, MemberId, Sampling, SequenceStart, TokenStops
from cluster.process import ExitStatus
from cluster.protocol import wire
from cluster.registry.registry import Registry
from router.fleet.prefix_locator import CacheEventFollower
from router.policies.prefix_index import PrefixIndex
from router.running import running
from tandem.client import AsyncClient
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.polling import until
from tests.system.rigs.members.asking import ask, asked, question
from tests.system.rigs.members.scripted_workers import ScriptedPrefill, Store, connect
from tests.system.rigs.processes.local_cluster import LocalCluster, Member

_HANDLE = 7
TIMEOUT_S = 60.0
_QUESTION = question(range(30, 70), max_tokens=200, ignore_eos=True)
in_session = pytest.mark.asyncio(loop_scope="session")


@in_session
async def test_a_worker_whose_name_was_taken_exits_fenced_and_its_streams_continue_elsewhere(
    cluster: LocalCluster,
) -> None:
    """The worker that runs the stream is stopped until the router has read its successor's registration. The stream
    therefore cannot end first."""
    undisturbed = (await ask(cluster, _QUESTION)).token_ids
    async with asked(cluster, _QUESTION) as answer:
        await answer.until(20)
        old = await _worker_that_decodes(cluster)
        with old.stopped():
            await _register_successor(cluster, old.name)
            seen = partial(_registered_incarnation, cluster, old.name)
            await until(seen, lambda it: it != old.incarnation, what=f"the router knows the successor of {old.name}")
        await answer.end()
    assert await old.exit_code() == ExitStatus.FENCED
    assert old.reader is not None
    await old.reader
    assert f"fenced: {old.name}@{old.incarnation} was replaced" in "".join(old.output)
    assert answer.token_ids == undisturbed
    assert set(answer.ledger.reasons) == {"decode_worker_lost"}
    await cluster.mend()
    await cluster.until_free()


async def _worker_that_decodes(cluster: LocalCluster) -> Member:
    """Return the decode worker that runs the only stream."""
    running = [name for name in cluster.workers("decode") if (await cluster.inspect(name)).figures["running"]]
    assert len(running) == 1, f"these decode workers run sequences: {running}"
    return cluster.members[running[0]]


async def _register_successor(cluster: LocalCluster, name: str) -> None:
    """Register a newer incarnation of a worker, as its process does when it starts."""
    registry = Registry(url=cluster.redis_url, cluster_name=cluster.name, ttl_s=5.0, keys=load_keys(cluster.key_file))
    registered = next(member for member in await registry.members() if member.id.id == name)
    await registry.register(replace(registered, id=MemberId(name, "successor"), state=MemberState.STARTING))
    await registry.close()


async def _registered_incarnation(cluster: LocalCluster, name: str) -> str:
    return next(member.incarnation for member in (await cluster.status()).members if member.member_id == name)


@in_session
@pytest.mark.slow
async def test_a_router_whose_name_was_taken_exits_fenced_and_its_clients_resume_at_another(
    cluster: LocalCluster,
) -> None:
    ports = ("--port", "0", "--grpc-port", "0")
    old = await cluster.start_member("second", "router", ports)
    staying = cluster.members["router0"].grpc_address
    async with AsyncClient([old.grpc_address, staying], timeout_s=TIMEOUT_S) as client:
        asked_for = {"token_ids": range(30, 70), "max_tokens": 300, "ignore_eos": True, "temperature": 0.0}
        undisturbed = (await ask(cluster, _QUESTION)).token_ids
        generation = client.generate(**asked_for)  # type: ignore[arg-type]
        await anext(generation)
        old.send_signal(signal.SIGSTOP)  # otherwise the stream could end before the successor registers
        new = await cluster.start_member("second", "router", ports)
        old.send_signal(signal.SIGCONT)
        result = await generation.result()
        assert await old.exit_code() == ExitStatus.FENCED
    assert result.choices[0].token_ids == undisturbed
    new.send_signal(signal.SIGTERM)
    assert await new.exit_code() == ExitStatus.OK
    del cluster.members["second"]
    await cluster.until_free()


class RouterIncarnation:
    """A router as a decode worker sees it: one stream, and one sequence. All instances use the same handle."""

    def __init__(self, channel: grpc.aio.Channel, incarnation: str) -> None:
        self._stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        self._id = MemberId("r", incarnation)
        self._outgoing: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue()
        self._call = self._stub.Connect(self._messages())

    async def hello(self) -> None:
        self._outgoing.put_nowait(worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router=str(self._id))))
        assert (await self._read()).WhichOneof("message") == "hello"

    async def start(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        job = DecodeJob(
            request_id=str(self._id),
            attempt=1,
            router=self._id,
            prompt_token_ids=prompt,
            sampling=Sampling(),
            stops=TokenStops(max_tokens=max_tokens, min_tokens=0, stop_token_ids=frozenset()),
            sequences=(SequenceStart(_HANDLE, seed=1),),
            signed_ticket=None,
            timeout_s=TIMEOUT_S,
        )
        await self._stub.Start(wire.decode_job_to_wire(job), timeout=TIMEOUT_S)

    def cancel(self) -> None:
        cancel = worker_pb2.CancelSequences(handles=wire.pack_ids([_HANDLE]))
        self._outgoing.put_nowait(worker_pb2.RouterMessage(cancel=cancel))

    async def answer(self) -> list[int]:
        """Read the sequence to its end and return its tokens in order."""
        tokens: list[int] = []
        while True:
            message = await self._read()
            if message.WhichOneof("message") == "step":
                assert wire.unpack_ids(message.step.indices) == (len(tokens),)
                tokens += wire.unpack_ids(message.step.token_ids)
                if message.step.ends:
                    return tokens

    async def _read(self) -> worker_pb2.WorkerMessage:
        message = await self._call.read()
        assert isinstance(message, worker_pb2.WorkerMessage), "the worker ended the stream"
        return message

    async def _messages(self) -> AsyncIterator[worker_pb2.RouterMessage]:
        while True:
            yield await self._outgoing.get()


@in_session
async def test_incarnations_of_a_router_cannot_read_or_end_each_others_sequences(cluster: LocalCluster) -> None:
    prompts, max_tokens = (tuple(range(30, 60)), tuple(range(40, 90))), 200
    expected = [
        list((await ask(cluster, question(p, max_tokens=max_tokens, ignore_eos=True))).token_ids) for p in prompts
    ]
    async with cluster.channel("decode0") as channel, asyncio.timeout(TIMEOUT_S):
        incarnations = [RouterIncarnation(channel, name) for name in ("older", "newer")]
        for incarnation, prompt in zip(incarnations, prompts, strict=True):
            await incarnation.hello()
            await incarnation.start(prompt, max_tokens)
        third = RouterIncarnation(channel, "third")
        await third.hello()
        third.cancel()
        assert [await incarnation.answer() for incarnation in incarnations] == expected
    await cluster.until_free()


class ScriptedPublisher(worker_pb2_grpc.WorkerServicer):
    """Publishes the cache events that the test puts into the queue of each subscription."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[asyncio.Queue[worker_pb2.CacheEvents]] = asyncio.Queue()

    async def SubscribeCacheEvents(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.CacheEvents]:
        messages: asyncio.Queue[worker_pb2.CacheEvents] = asyncio.Queue()
        self.calls.put_nowait(messages)
        while True:
            yield await messages.get()


class WatchedIndex(PrefixIndex):
    def __init__(self) -> None:
        super().__init__()
        self.changes: asyncio.Queue[str] = asyncio.Queue()

    def apply(self, worker: MemberId, events: CacheEvents, *, max_blocks: int) -> bool:
        self.changes.put_nowait("applied")
        return super().apply(worker, events, max_blocks=max_blocks)

    def forget(self, worker: MemberId) -> None:
        self.changes.put_nowait("forgotten")
        super().forget(worker)


async def test_only_a_subscription_that_ends_early_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.router.prefixes")
    worker, publisher = ScriptedPrefill("p0", Store()), ScriptedPublisher()
    worker_pb2_grpc.add_WorkerServicer_to_server(publisher, worker.server.grpc)
    async with worker, connect(worker.address) as channel, asyncio.timeout(TIMEOUT_S):
        follower = CacheEventFollower(WatchedIndex(), subscription_s=0.05)
        async with running(follower.follow(worker.member, channel)):
            for _ in range(3):
                await publisher.calls.get()
            assert not caplog.records
            await worker.die()

            async def details() -> list[str]:
                return [str(vars(record)["detail"]) for record in caplog.records]

            [detail] = await until(details, what="the worker's death is in the log")
    assert detail.startswith("UNAVAILABLE: ")


async def test_cache_events_of_another_incarnation_at_a_workers_address_are_dropped() -> None:
    worker = ScriptedPrefill("p0", Store(), incarnation=2)
    publisher = ScriptedPublisher()
    worker_pb2_grpc.add_WorkerServicer_to_server(publisher, worker.server.grpc)
    worker.capacity = Capacity(64, 16, 8, 1024)
    index, own, foreign = WatchedIndex(), b"a" * 16, b"b" * 16

    def publish(call: asyncio.Queue[worker_pb2.CacheEvents], incarnation: str, block_hash: bytes) -> None:
        member = f"p0@{incarnation}"
        call.put_nowait(worker_pb2.CacheEvents(cleared=True, next_number=1, stored=block_hash, member=member))

    async with worker, connect(worker.address) as channel, asyncio.timeout(TIMEOUT_S):
        async with running(CacheEventFollower(index).follow(worker.member, channel)):
            call = await publisher.calls.get()
            publish(call, worker.id.incarnation, own)
            assert await index.changes.get() == "applied"
            assert index.leading_blocks([own]) == {worker.id: 1}
            publish(call, "p0-1", foreign)
            assert await index.changes.get() == "forgotten"
            assert len(index) == 0
            call = await publisher.calls.get()
            publish(call, worker.id.incarnation, own)
            assert await index.changes.get() == "applied"
            assert index.leading_blocks([own]) == {worker.id: 1}
