"""Members of two versions in one cluster: they serve together, leave under load, and every one can be replaced."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cluster.rpc_errors import REASON
from cluster.wire import pack_ids
from tandem.client import AsyncClient, AsyncGeneration
from tandem.results import Choice, Result
from tandem.v1 import admin_pb2, inference_pb2, kv_pb2, worker_pb2, worker_pb2_grpc
from tests.later_version import with_unknown_fields
from tests.system.asking import question
from tests.system.local_cluster import LocalCluster, Member
from tests.system.previous_version import AGES, EarlierVersion, earlier_version

pytestmark = pytest.mark.asyncio(loop_scope="session")
TIMEOUT_S = 90.0
ROUTER_FLAGS = ("--port", "0", "--grpc-port", "0", "--placement", "least-loaded")
EARLIER = {"earlier_router": "router", "earlier_prefill": "prefill_worker", "earlier_decode": "decode_worker"}
NUM_QUESTIONS = 8


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> EarlierVersion:
    return earlier_version(tmp_path_factory.mktemp("previous"))


def asked(client: AsyncClient, number: int, *, max_tokens: int = 12) -> AsyncGeneration:
    """Greedy ones and sampled ones, prompts of one to four blocks, one in four with two choices."""
    return client.generate(
        token_ids=range(40 + number, 56 + 8 * number),
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0.0 if number % 2 else 1.0,
        seed=number,
        n=2 if number % 4 == 2 else 1,
        logprobs=1,
    )


def content(result: Result) -> list[tuple[object, ...]]:
    return [_content(choice) for choice in result.choices]


def _content(choice: Choice) -> tuple[object, ...]:
    return choice.token_ids, choice.text, choice.finish_reason


async def answers(addresses: Sequence[str], *, max_tokens: int = 12) -> list[Result]:
    async with AsyncClient(addresses, timeout_s=TIMEOUT_S) as client:
        generations = [asked(client, number, max_tokens=max_tokens) for number in range(NUM_QUESTIONS)]
        return await asyncio.gather(*(generation.result() for generation in generations))


@asynccontextmanager
async def joined(cluster: LocalCluster, version: EarlierVersion) -> AsyncIterator[list[Member]]:
    """A router, a prefill and a decode worker of that version; leaves the cluster without them."""
    workers = cluster.members["prefill0"].flags
    starting = (
        cluster.start_member(name, module, ROUTER_FLAGS if module == "router" else workers, wrapper=version.wrapper)
        for name, module in EARLIER.items()
    )
    try:
        yield await asyncio.gather(*starting)
    finally:
        for name in EARLIER:
            member = cluster.members.pop(name, None)
            if member is not None:
                await _ended(member)


async def _ended(member: Member) -> None:
    if member.process.returncode is None:
        member.process.kill()
    await member.exit_code()
    if member.reader is not None:
        await member.reader


async def every_pair_has_served(address: str, expected: Sequence[Result]) -> None:
    """Prefill of either version with decode of either version, by this router, every answer the same."""
    met: set[tuple[bool, ...]] = set()
    async with asyncio.timeout(TIMEOUT_S):
        while len(met) < 4:
            for result, wanted in zip(await answers([address]), expected, strict=True):
                assert content(result) == content(wanted)
                assert result.ledger.reasons == ()
                met.add(tuple(member.partition("@")[0] in EARLIER for member in result.ledger.members))
    assert met == set(itertools.product((False, True), repeat=2))


async def test_members_of_the_previous_version_serve_beside_present_ones_and_leave_under_load(
    cluster: LocalCluster, previous: EarlierVersion
) -> None:
    present = cluster.members["router0"].grpc_address
    expected, long = await answers([present]), await answers([present], max_tokens=120)
    async with joined(cluster, previous) as earlier:
        await every_pair_has_served(present, expected)
        await every_pair_has_served(earlier[0].grpc_address, expected)
        async with AsyncClient([earlier[0].grpc_address, present], timeout_s=TIMEOUT_S) as client:
            generations = [asked(client, number, max_tokens=120) for number in range(NUM_QUESTIONS)]
            await asyncio.gather(*(anext(generation) for generation in generations))
            for member in earlier[:2]:
                member.send_signal(signal.SIGTERM)
            async with cluster.channel("earlier_decode") as channel:  # which knows fewer fields than its caller
                request = with_unknown_fields(worker_pb2.DrainWorkerRequest())
                await worker_pb2_grpc.WorkerStub(channel).DrainWorker(request, timeout=TIMEOUT_S)
            results = await asyncio.gather(*(generation.result() for generation in generations))
        assert [await member.exit_code() for member in earlier] == [0, 0, 0], cluster.output()[-4000:]
    assert list(map(content, results)) == list(map(content, long))
    await cluster.until_free()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("age", AGES)
async def test_members_of_every_earlier_version_serve_beside_present_ones_over_tcp(
    tcp_cluster: LocalCluster, tmp_path: Path, age: int
) -> None:
    version = earlier_version(tmp_path, age)
    await tcp_cluster.mend()
    present = tcp_cluster.members["router0"].grpc_address
    expected = await answers([present])
    async with joined(tcp_cluster, version) as earlier:
        await every_pair_has_served(present, expected)
        await every_pair_has_served(earlier[0].grpc_address, expected)
    await tcp_cluster.until_free()


# What is asked of each call; where nothing is said, its empty request.
ASKED: dict[str, Message] = {
    "Generate": question(range(5, 30)),
    "Tokenize": inference_pb2.TokenizeRequest(text="import os"),
    "Detokenize": inference_pb2.DetokenizeRequest(token_ids=pack_ids((5, 6))),
    "Drain": admin_pb2.DrainRequest(member_id="nobody"),
    "Migrate": admin_pb2.MigrateRequest(source="decode0"),
    "Prefill": worker_pb2.PrefillRequest(
        request_id="upgrade",
        attempt=1,
        token_ids=pack_ids(range(5, 30)),
        sampling=worker_pb2.ResolvedSampling(top_p=1.0),
        stops=worker_pb2.TokenStops(max_tokens=1),
        seeds=[1],
        timeout_s=TIMEOUT_S,
    ),
    "Start": worker_pb2.StartRequest(
        request_id="upgrade",
        router="nobody@1",
        prompt_token_ids=pack_ids(range(5, 30)),
        stops=worker_pb2.TokenStops(max_tokens=1),
        sequences=[worker_pb2.SequenceStart(handle=1)],
        timeout_s=TIMEOUT_S,
    ),
    "Freeze": worker_pb2.FreezeRequest(router="nobody@1", handle=1, importer="nobody@2"),
    "Thaw": worker_pb2.ThawRequest(router="nobody@1", handle=1, new_handle=2),
    "Connect": worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router="upgrade@1")),
    "HandOff": kv_pb2.ImporterMessage(attach=kv_pb2.Attach(layout=kv_pb2.LayoutFingerprint(dtype="float32"))),
}
SERVED_BY = {
    "router0": ("Inference", "Admin"),
    "prefill0": ("PrefillWorker", "Worker", "KvTransfer"),
    "decode0": ("DecodeWorker", "Worker", "KvTransfer"),
}
FILES = (inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR, kv_pb2.DESCRIPTOR)
SERVICES = {name: service for file in FILES for name, service in file.services_by_name.items()}


async def test_every_call_answers_a_newer_caller_as_it_answers_one_of_its_own_version(cluster: LocalCluster) -> None:
    for member, services in SERVED_BY.items():
        async with cluster.channel(member) as channel:
            for method in (method for name in services for method in SERVICES[name].methods):
                if method.name == "DrainWorker":
                    continue  # the worker would leave; one of the previous version is asked so above
                request = ASKED.get(method.name) or GetMessageClass(method.input_type)()
                plain, later = [await _outcome(channel, method, r) for r in (request, with_unknown_fields(request))]
                assert plain == later, f"{member} {method.full_name}"
                assert plain[0] not in ("UNIMPLEMENTED", "UNKNOWN", "INTERNAL"), f"{member} {method.full_name}: {plain}"
    assert {name for names in SERVED_BY.values() for name in names} == set(SERVICES)
    await cluster.until_free()


async def _outcome(channel: grpc.aio.Channel, method: Any, request: Message) -> tuple[str, str]:
    """How the call begins: with an answer, or with an error and its reason."""
    call: Any = channel.stream_stream(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )(_once(request), timeout=TIMEOUT_S)
    try:
        answer: Any = await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code().name, str(dict(error.trailing_metadata() or ()).get(REASON, ""))
    finally:
        call.cancel()
    return "answers", "" if answer is grpc.aio.EOF else type(answer).__name__


async def _once(request: Any) -> AsyncIterator[Any]:
    yield request


async def _ask_on(lane: int, addresses: Sequence[str], expected: Sequence[Result], done: asyncio.Event) -> int:
    """One request after the other; how many. Half of the lanes begin at the other router."""
    number = lane
    async with AsyncClient(addresses if lane % 2 else addresses[::-1], timeout_s=TIMEOUT_S) as client:
        while not done.is_set():
            number += 1
            wanted = expected[number % NUM_QUESTIONS]
            assert content(await asked(client, number % NUM_QUESTIONS, max_tokens=48).result()) == content(wanted)
    return number - lane


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("before", "after"), [("present", "present"), ("previous", "present"), ("present", "previous")]
)
async def test_every_member_is_replaced_in_turn_under_load_and_no_answer_is_lost_or_changed(
    redis_url: str, tmp_path: Path, previous: EarlierVersion, before: str, after: str
) -> None:
    wrappers = {"present": (), "previous": previous.wrapper}
    roles = {"router": "router", "prefill": "prefill_worker", "decode": "decode_worker"}
    flags = {role: () if role == "router" else ("--dtype", "float32", "--num-blocks", "512") for role in roles}
    cluster = LocalCluster(redis_url, tmp_path)
    starting = [
        cluster.start_member(
            f"{role}{number}",
            module,
            ROUTER_FLAGS if role == "router" else flags[role],
            wrapper=wrappers[before],
        )
        for role, module in roles.items()
        for number in range(2)
    ]
    try:
        await asyncio.gather(*starting)
        addresses = [cluster.members[f"router{number}"].grpc_address for number in range(2)]
        expected = await answers(addresses[:1], max_tokens=48)
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            lanes = [group.create_task(_ask_on(lane, addresses, expected, done)) for lane in range(6)]
            for name in [*cluster.members]:
                await _replace(cluster, name, wrappers[after])
            done.set()
        assert all(lane.result() for lane in lanes)
        await cluster.until_free()
    finally:
        codes = await cluster.stop()
    assert set(codes.values()) == {0}, cluster.output()[-4000:]


async def _replace(cluster: LocalCluster, name: str, wrapper: Sequence[str]) -> None:
    """Asked to leave by SIGTERM; then another process has its name, a router its address too. Until it is served by."""
    member = cluster.members[name]
    member.send_signal(signal.SIGTERM)
    assert await member.exit_code() == 0, "".join(member.output)[-4000:]
    assert member.reader is not None
    await member.reader
    flags = member.flags
    if member.module == "router":
        flags = ("--port", "0", "--grpc-port", member.grpc_address.rpartition(":")[2], *ROUTER_FLAGS[4:])
    await cluster.start_member(name, member.module, flags, wrapper=wrapper)
    async with asyncio.timeout(TIMEOUT_S):
        while not await cluster._all_connected():
            pass
