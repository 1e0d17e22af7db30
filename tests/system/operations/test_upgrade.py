"""Members of two versions in one cluster: a later caller is answered, and every member can be replaced under load."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cluster.protocol.wire import pack_ids
from cluster.serving.rpc_errors import REASON
from tandem.client import AsyncClient, AsyncGeneration
from tandem.internal.v1 import kv_pb2, worker_pb2, worker_pb2_grpc
from tandem.results import Choice, Result
from tandem.v1 import admin_pb2, inference_pb2
from tests.later_version import suspended, with_unknown_fields
from tests.system.rigs.members.asking import question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")
TIMEOUT_S = 90.0
ROUTER_FLAGS = ("--port", "0", "--grpc-port", "0", "--placement", "least-loaded")
NUM_QUESTIONS = 8
_CRASHES = ("UNIMPLEMENTED", "UNKNOWN", "INTERNAL")


def asked(client: AsyncClient, number: int, *, max_tokens: int = 12) -> AsyncGeneration:
    """Requests: greedy and sampled, with prompts of one to four blocks, one in four with two choices."""
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


# The request of each call; calls that are not listed get an empty one.
ASKED: dict[str, Message] = {
    "Generate": question(range(5, 30)),
    "Tokenize": inference_pb2.TokenizeRequest(text="import os"),
    "Detokenize": inference_pb2.DetokenizeRequest(token_ids=(5, 6)),
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
    "prefill0": ("MemberAuth", "PrefillWorker", "Worker", "KvTransfer"),
    "decode0": ("MemberAuth", "DecodeWorker", "Worker", "KvTransfer"),
}
FILES = (inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR, kv_pb2.DESCRIPTOR)
SERVICES = {name: service for file in FILES for name, service in file.services_by_name.items()}


async def test_every_call_has_an_answer_or_a_named_error(cluster: LocalCluster) -> None:
    outcomes = await _outcomes(cluster, lambda request: request)
    crashed = {call: outcome for call, outcome in outcomes.items() if outcome[0] in _CRASHES}
    assert not crashed
    assert {name for names in SERVED_BY.values() for name in names} == set(SERVICES)


@suspended
async def test_every_call_answers_a_newer_caller_as_it_answers_one_of_its_own_version(cluster: LocalCluster) -> None:
    assert await _outcomes(cluster, with_unknown_fields) == await _outcomes(cluster, lambda request: request)


async def _outcomes(cluster: LocalCluster, change: Callable[[Message], Message]) -> dict[str, tuple[str, str]]:
    """Return how each call of each service begins, by member and method."""
    outcomes = {}
    for member, services in SERVED_BY.items():
        async with cluster.channel(member) as channel:
            for method in (method for name in services for method in SERVICES[name].methods):
                if method.name == "DrainWorker":
                    continue  # the worker would leave: the test below drains a member that it replaces
                request = ASKED.get(method.name) or GetMessageClass(method.input_type)()
                outcomes[f"{member} {method.full_name}"] = await _outcome(channel, method, change(request))
    await cluster.until_free()
    return outcomes


async def _outcome(channel: grpc.aio.Channel, method: Any, request: Message) -> tuple[str, str]:
    """Return how the call begins: with an answer, or with an error and its reason."""
    kind: Any = channel.stream_stream if method.client_streaming else channel.unary_stream
    call: Any = kind(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )(_once(request) if method.client_streaming else request, timeout=TIMEOUT_S)
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
    """Send one request after the other and return their number. Half of the lanes begin at the other router."""
    number = lane
    async with AsyncClient(addresses if lane % 2 else addresses[::-1], timeout_s=TIMEOUT_S) as client:
        while not done.is_set():
            number += 1
            wanted = expected[number % NUM_QUESTIONS]
            assert content(await asked(client, number % NUM_QUESTIONS, max_tokens=48).result()) == content(wanted)
    return number - lane


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_every_member_is_replaced_in_turn_under_load_and_no_answer_is_lost_or_changed(
    redis_url: str, tmp_path: Path
) -> None:
    cluster = LocalCluster(redis_url, tmp_path, flags=("--dtype", "float32", "--num-blocks", "512"))
    try:
        await cluster.start(prefill=2, decode=2, routers=2)
        addresses = [cluster.members[f"router{number}"].grpc_address for number in range(2)]
        expected = await answers(addresses[:1], max_tokens=48)
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            lanes = [group.create_task(_ask_on(lane, addresses, expected, done)) for lane in range(6)]
            for name in [*cluster.members]:
                await _replace(cluster, name)
            done.set()
        assert all(lane.result() for lane in lanes)
        await cluster.until_free()
    finally:
        codes = await cluster.stop()
    assert set(codes.values()) == {0}, cluster.output()[-4000:]


async def _replace(cluster: LocalCluster, name: str) -> None:
    """Drain the member, wait until its process has ended, start another process under its name (a router: at its
    address too), and return when the routers are connected to it."""
    member = cluster.members[name]
    await _ask_to_leave(cluster, name)
    assert await member.exit_code() == 0, "".join(member.output)[-4000:]
    assert member.reader is not None
    await member.reader
    flags = member.flags
    if member.module == "router":
        flags = ("--port", "0", "--grpc-port", member.grpc_address.rpartition(":")[2], *ROUTER_FLAGS[4:])
    await cluster.start_member(name, member.module, flags)
    await cluster.mend()


async def _ask_to_leave(cluster: LocalCluster, name: str) -> None:
    """Drain a worker with an odd number by DrainWorker, and every other member by SIGTERM."""
    if name not in ("prefill1", "decode1"):
        cluster.members[name].send_signal(signal.SIGTERM)
        return
    async with cluster.channel(name) as channel:
        request = with_unknown_fields(worker_pb2.DrainWorkerRequest())
        await worker_pb2_grpc.WorkerStub(channel).DrainWorker(request, timeout=TIMEOUT_S)
