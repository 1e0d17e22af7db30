"""Whose name was taken by a newer incarnation is out, and its requests go on elsewhere; nobody's are mixed up.

Hand-offs are fenced in tests/contract/test_handoff_refusals.py, a woken decode worker in test_failover.py.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from cluster.member import Capacity
from cluster.messages import DecodeJob, MemberId, PrefixNews, Sampling, SequenceStart, TokenStops
from cluster.process import ExitStatus
from cluster.protocol import wire
from cluster.serving.serving import open_channel
from router.fleet.prefix_following import PrefixFollowing
from router.policies.prefix_index import PrefixIndex
from router.policies.prefix_memory import PrefixMemory
from router.running import running
from tandem.client import AsyncClient
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tests.system.asking import ask, question
from tests.system.local_cluster import LocalCluster
from tests.system.scripted_workers import ScriptedPrefill, Store

_HANDLE = 7
TIMEOUT_S = 60.0
_QUESTION = question(range(30, 70), max_tokens=300, ignore_eos=True)
in_session = pytest.mark.asyncio(loop_scope="session")


@in_session
@pytest.mark.timeout(180)
async def test_a_worker_whose_name_is_taken_ends_fenced_and_its_streams_go_on_elsewhere(cluster: LocalCluster) -> None:
    undisturbed = (await ask(cluster, _QUESTION)).token_ids
    old = cluster.members["decode0"]
    reasons: set[str] = set()

    async def ask_on() -> None:
        while old.process.returncode is None:
            answer = await ask(cluster, _QUESTION)
            assert answer.token_ids == undisturbed
            reasons.update(answer.ledger.reasons)

    clients = [asyncio.create_task(ask_on()) for _ in range(3)]
    await cluster.start_member(old.name, old.module, old.flags)
    assert await old.exit_code() == ExitStatus.FENCED
    await asyncio.gather(*clients)
    assert old.reader is not None
    await old.reader
    assert f"fenced: decode0@{old.incarnation} is no longer decode0" in "".join(old.output)
    assert reasons <= {"decode_worker_lost", "decode_no_workers"}
    assert reasons
    await cluster.mend()
    await cluster.until_free()


@in_session
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_router_whose_name_is_taken_ends_fenced_and_its_clients_go_on_at_another(cluster: LocalCluster) -> None:
    ports = ("--port", "0", "--grpc-port", "0")
    old = await cluster.start_member("second", "router", ports)
    staying = cluster.members["router0"].grpc_address
    async with AsyncClient([old.grpc_address, staying], timeout_s=TIMEOUT_S) as client:
        asked_for = {"token_ids": range(30, 70), "max_tokens": 300, "ignore_eos": True, "temperature": 0.0}
        undisturbed = (await ask(cluster, _QUESTION)).token_ids
        generation = client.generate(**asked_for)  # type: ignore[arg-type]
        await anext(generation)
        old.send_signal(signal.SIGSTOP)  # else it would end before its successor is there
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
    """As a decode worker meets it: one stream, and one sequence with the same handle as everybody's."""

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
        """Every token to the end, in order."""
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
async def test_incarnations_of_a_router_never_hear_nor_end_what_is_the_others(cluster: LocalCluster) -> None:
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


class Teller(worker_pb2_grpc.WorkerServicer):
    """Says of its prefix cache what it is told to, in each of its calls."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[asyncio.Queue[worker_pb2.PrefixNews]] = asyncio.Queue()

    async def FollowPrefixes(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.PrefixNews]:
        news: asyncio.Queue[worker_pb2.PrefixNews] = asyncio.Queue()
        self.calls.put_nowait(news)
        while True:
            yield await news.get()


class WatchedIndex(PrefixIndex):
    def __init__(self) -> None:
        super().__init__()
        self.changes: asyncio.Queue[str] = asyncio.Queue()

    def apply(self, worker: MemberId, news: PrefixNews, *, max_blocks: int) -> bool:
        self.changes.put_nowait("applied")
        return super().apply(worker, news, max_blocks=max_blocks)

    def forget(self, worker: MemberId) -> None:
        self.changes.put_nowait("forgotten")
        super().forget(worker)


async def test_prefixes_of_another_incarnation_at_a_workers_address_are_not_its_own() -> None:
    worker = ScriptedPrefill("p0", Store(), incarnation=2)
    teller = Teller()
    worker_pb2_grpc.add_WorkerServicer_to_server(teller, worker.server.grpc)
    worker.capacity = Capacity(64, 16, 8, 1024)
    index, own, foreign = WatchedIndex(), b"a" * 16, b"b" * 16

    def tell(call: asyncio.Queue[worker_pb2.PrefixNews], incarnation: str, block_hash: bytes) -> None:
        member = f"p0@{incarnation}"
        call.put_nowait(worker_pb2.PrefixNews(is_snapshot=True, next_number=1, added=block_hash, member=member))

    async with worker, open_channel(worker.address) as channel, asyncio.timeout(TIMEOUT_S):
        async with running(PrefixFollowing(index, PrefixMemory()).follow(worker.member, channel)):
            call = await teller.calls.get()
            tell(call, worker.id.incarnation, own)
            assert await index.changes.get() == "applied"
            assert index.holders([own]) == {worker.id: 1}
            tell(call, "p0-1", foreign)
            assert await index.changes.get() == "forgotten"
            assert len(index) == 0
            call = await teller.calls.get()
            tell(call, worker.id.incarnation, own)
            assert await index.changes.get() == "applied"
            assert index.holders([own]) == {worker.id: 1}
