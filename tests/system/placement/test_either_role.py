"""A worker does the work of both roles on one port, whatever its own role is."""

import asyncio

import pytest

from cluster.messages import DecodeJob, MemberId, PrefillJob, Sampling, SequenceStart, TokenStops
from cluster.protocol import wire
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.system.rigs.members.asking import ask, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_ROUTER = MemberId("router-of-a-test", "1")
_PROMPT = tuple(range(20, 120))
_MAX_TOKENS = 8
_DEADLINE_S = 60.0


async def _exported(cluster: LocalCluster, name: str, importer: str) -> bytes:
    """Compute the prompt on this worker and return its ticket for the importer."""
    job = PrefillJob(
        request_id="request",
        attempt=1,
        token_ids=_PROMPT,
        sampling=Sampling(),
        stops=TokenStops(_MAX_TOKENS),
        seeds=(0,),
        num_committed=0,
        importer=wire.member_from_wire(cluster.members[importer].ready["member"]),
        timeout_s=_DEADLINE_S,
    )
    async with cluster.channel(name) as channel:
        stub = worker_pb2_grpc.PrefillWorkerStub(channel)
        events = [event async for event in stub.Prefill(wire.prefill_job_to_wire(job), timeout=_DEADLINE_S)]
    accepted, first_tokens = events
    assert first_tokens.WhichOneof("event") == "first_tokens"
    return bytes(accepted.accepted.ticket)


async def _decoded(cluster: LocalCluster, name: str, ticket: bytes | None) -> tuple[tuple[int, ...], str]:
    """Run a sequence on this worker. Return its tokens and the transport by which its KV came."""
    job = DecodeJob(
        request_id="request",
        attempt=1,
        router=_ROUTER,
        prompt_token_ids=_PROMPT,
        sampling=Sampling(),
        stops=TokenStops(_MAX_TOKENS),
        sequences=(SequenceStart(handle=0, seed=0),),
        signed_ticket=ticket,
        timeout_s=_DEADLINE_S,
    )
    token_ids, transport = list[int](), ""
    async with asyncio.timeout(_DEADLINE_S), cluster.channel(name) as channel:
        stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        stream = stub.Connect()
        await stream.write(worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router=str(_ROUTER))))
        await stream.read()  # its hello
        await stub.Start(wire.decode_job_to_wire(job))
        while len(token_ids) < _MAX_TOKENS:
            message = await stream.read()
            assert message.WhichOneof("message") != "failed", message
            if message.WhichOneof("message") == "started":
                token_ids += wire.unpack_ids(message.started.first_token_ids)
                transport = message.started.transport
            elif message.WhichOneof("message") == "step":
                token_ids += wire.unpack_ids(message.step.token_ids)
        stream.cancel()
    return tuple(token_ids), transport


async def test_a_decode_worker_exports_a_prompt_that_a_prefill_worker_imports_and_decodes(
    cluster: LocalCluster,
) -> None:
    expected = await ask(cluster, question(_PROMPT, max_tokens=_MAX_TOKENS, ignore_eos=True))

    ticket = await _exported(cluster, "decode1", importer="prefill0")
    token_ids, transport = await _decoded(cluster, "prefill0", ticket)

    assert (token_ids, transport) == (expected.token_ids, "shm")
    await cluster.until_free()


@pytest.mark.parametrize("name", ["prefill0", "decode0"])
async def test_a_worker_of_either_role_prefills_and_decodes_by_itself(cluster: LocalCluster, name: str) -> None:
    expected = await ask(cluster, question(_PROMPT, max_tokens=_MAX_TOKENS, ignore_eos=True))

    token_ids, transport = await _decoded(cluster, name, None)

    assert (token_ids, transport) == (expected.token_ids, "local")
    await cluster.until_free()


async def test_a_worker_computes_an_export_beside_its_running_sequences(cluster: LocalCluster) -> None:
    expected = await ask(cluster, question(_PROMPT, max_tokens=_MAX_TOKENS, ignore_eos=True))

    async with asyncio.TaskGroup() as both:
        here = both.create_task(_decoded(cluster, "prefill0", None))
        ticket = both.create_task(_exported(cluster, "prefill0", importer="decode0"))

    assert (await here)[0] == expected.token_ids
    assert (await _decoded(cluster, "decode0", await ticket))[0] == expected.token_ids
    await cluster.until_free()
