"""Attacks on the ports of running workers: no call of theirs is served to a caller that is not a member."""

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from cluster.auth.connections import GrantedRequest, OpeningConnection
from cluster.auth.gate import PROOF
from cluster.auth.key_file import load_keys
from cluster.auth.keys import ClusterKeys
from cluster.auth.sessions import OpeningSession, Refusal, Session
from cluster.errors import MemberRefused
from cluster.member import MemberState, to_json
from cluster.messages import MemberId, Role
from cluster.registry.registry import Registry
from cluster.registry.signed_records import SignedRecords
from cluster.serving.rpc_errors import REASON
from tandem.internal.v1 import kv_pb2, worker_pb2, worker_pb2_grpc
from tests.polling import until
from tests.system.rigs.members.asking import ask, question
from tests.system.rigs.processes.local_cluster import LocalCluster, Member

_DEADLINE_S = 60.0
_STREAMS = ("/Connect", "/HandOff", "/ServerReflectionInfo")  # of requests, and there are none here
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_GARBAGE = b"\xff"  # no message: a call that is admitted ends with INVALID_ARGUMENT and has no effect
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

pytestmark = pytest.mark.asyncio(loop_scope="session")


def _methods() -> Iterator[str]:
    """Every call of every service that members serve to each other, but the one that opens a session."""
    for file in (worker_pb2, kv_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            methods: list[MethodDescriptor] = list(service.methods)
            yield from (f"/{service.full_name}/{method.name}" for method in methods if method.name != "OpenSession")


async def _outcome(channel: grpc.aio.Channel, method: str, body: bytes, proof: bytes | None) -> str:
    """Make a call with this proof, and return its refusal, or the name of its status if it was admitted."""
    metadata = ((PROOF, proof),) if proof is not None else ()
    call: Any
    if method.endswith(_STREAMS):
        streamed: Any = channel.stream_stream(method)
        call = streamed(iter(()), timeout=_DEADLINE_S, metadata=metadata)
    else:
        unary: Any = channel.unary_stream(method)
        call = unary(body, timeout=_DEADLINE_S, metadata=metadata)
    try:
        async for _ in call:
            return "answered"
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return "admitted"
        named = (REASON, MemberRefused.reason) in tuple(error.trailing_metadata() or ())
        return str(error.details()).partition(":")[0] if named else "unnamed"
    finally:
        call.cancel()
    return "admitted"  # and ended, as it had no request


async def _session(channel: grpc.aio.Channel, keys: ClusterKeys) -> Session:
    opening = OpeningSession(keys, "attacker@0")
    return opening.opened(await worker_pb2_grpc.MemberAuthStub(channel).OpenSession(opening.request()))


def _methods_but(method: str) -> str:
    return next(other for other in _methods() if other != method)


async def test_every_call_of_a_worker_is_refused_without_a_proof_of_its_own(cluster: LocalCluster) -> None:
    keys = load_keys(cluster.key_file)
    here, there = (cluster.members[name].grpc_address for name in ("decode0", "prefill0"))
    async with asyncio.timeout(_DEADLINE_S), grpc.aio.insecure_channel(here) as channel:
        async with grpc.aio.insecure_channel(there) as other:
            session, elsewhere = await _session(channel, keys), await _session(other, keys)
        own = Session(secrets.token_bytes(16), secrets.token_bytes(32), "", b"")  # a key of the attacker's own
        methods = [*_methods()]
        assert len(methods) >= 13
        for method in methods:
            is_stream = method.endswith(_STREAMS)  # whose proof does not cover its messages
            outcomes = [
                await _outcome(channel, method, _GARBAGE, None),
                await _outcome(channel, method, _GARBAGE, secrets.token_bytes(16)),
                await _outcome(channel, method, _GARBAGE, own.prove(method, _GARBAGE)),
                await _outcome(channel, method, _GARBAGE, elsewhere.prove(method, _GARBAGE)),
                await _outcome(channel, method, _GARBAGE, session.prove(_methods_but(method), _GARBAGE)),
                await _outcome(channel, method, b"", session.prove(method, b"another request")),
            ]
            assert outcomes[:2] == [Refusal.NO_PROOF] * 2, method
            assert outcomes[2:4] == [Refusal.UNKNOWN_SESSION] * 2, method
            assert outcomes[4:] == [Refusal.WRONG_PROOF] * 2, method
            proof = session.prove(method, b"" if is_stream else _GARBAGE)
            assert await _outcome(channel, method, _GARBAGE, proof) == "admitted", method
            assert await _outcome(channel, method, _GARBAGE, proof) == Refusal.REPLAYED, method
        assert await _outcome(channel, _REFLECTION, b"", None) == Refusal.NO_PROOF
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert not (await cluster.inspect("decode0")).violation


async def test_a_member_of_another_cluster_opens_no_session_and_is_counted(cluster: LocalCluster) -> None:
    member = cluster.members["decode0"]
    async with asyncio.timeout(_DEADLINE_S), grpc.aio.insecure_channel(member.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=Refusal.UNKNOWN_KEY) as refused:
            await _session(channel, ClusterKeys(secrets.token_bytes(32)))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    lines = await until(partial(_refusals, member, "OpenSession"), bool, what="the refusal is in the worker's log")
    assert {(line["who"], line["outcome"], line["why"]) for line in lines} == {(None, "member_refused", "unknown_key")}
    assert all(line["from"].startswith("ipv4:127.0.0.1:") for line in lines)
    scraped = await _scraped(member)
    assert f'tandem_refused_members_total{{reason="{Refusal.UNKNOWN_KEY}"}}' in scraped


async def _lines(member: Member, text: str) -> list[str]:
    return [line for line in member.output if text in line]


async def _refusals(member: Member, what: str) -> list[dict[str, Any]]:
    """Return the lines of the audit log about what was refused."""
    return [json.loads(line[line.index("{") :]) for line in member.output if f'"what": "{what}"' in line]


async def test_a_stranger_that_connects_to_a_workers_kv_sockets_receives_nothing_and_is_counted(
    redis_url: str, tmp_path: Path
) -> None:
    """It runs as the same user, and knows the address, the member's name and the protocol, but not the secret."""
    cluster = LocalCluster(redis_url, tmp_path, flags=("--kv-transports", "shm,tcp"))
    try:
        worker = await cluster.start_member("prefill0", "prefill_worker", cluster.joining_flags()[-2:])
        async with asyncio.timeout(_DEADLINE_S):
            by_tcp = partial(_connected_by_tcp, frame_port=await _frame_port(cluster, worker))
            for transport, connect in (("tcp", by_tcp), ("shm", _connected_by_shm)):
                await _attack(transport, connect, worker)
    finally:
        await cluster.stop()


async def test_a_worker_that_a_stranger_writes_into_redis_receives_no_call_and_is_counted(
    cluster: LocalCluster,
) -> None:
    """The stranger can write to Redis, and copies a real worker's record, but cannot sign."""
    registry = Registry(url=cluster.redis_url, cluster_name=cluster.name, ttl_s=60.0, keys=load_keys(cluster.key_file))
    wanted = next(found for found in await registry.members() if found.role is Role.DECODE)
    calls: list[str] = []

    def receive(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append("call")
        writer.close()

    listener = await asyncio.start_server(receive, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    made_up = replace(wanted, id=MemberId("decode9", "1"), address=address, state=MemberState.READY)
    stranger = SignedRecords(ClusterKeys(secrets.token_bytes(32)), cluster.name, lambda reason, identifier: None)
    key, members = f"{{{cluster.name}}}:registration:decode9", f"{{{cluster.name}}}:members"
    async with Redis.from_url(cluster.redis_url) as redis:
        for record, reason in ((to_json(made_up), Refusal.NO_PROOF), (stranger.sign(made_up, 1), Refusal.UNKNOWN_KEY)):
            await redis.set(key, record, px=60_000)
            await redis.sadd(members, "decode9")
            await redis.publish(f"{{{cluster.name}}}:changes", "decode9")
            counted = f'tandem_refused_members_total{{reason="{reason}"}}'
            await _until_counted(cluster.members["router0"], counted, "http")
            assert len((await ask(cluster, question(range(10, 40)))).token_ids) == 8
        assert "decode9" not in {member.member_id for member in (await cluster.status()).members}
        await redis.delete(key)
    router = cluster.members["router0"]
    (line, *_) = await until(
        partial(_refusals, router, "registration"), bool, what="the refusal is in the router's log"
    )
    assert (line["outcome"], line["why"], line["claims"]) == ("member_refused", "no_proof", "decode9")
    advice = "the registration of 'decode9' is not used (unknown_key): start that member with the file of"
    assert len(await until(partial(_lines, router, advice), bool, what="the router says what to do")) == 1
    listener.close()
    await registry.close()
    assert not calls


async def _attack(transport: str, connect: "Callable[[Member], Awaitable[_Streams]]", worker: Member) -> None:
    keys, exporter = ClusterKeys(secrets.token_bytes(32)), worker.ready["member"]
    tcp = OpeningConnection(keys, transport="tcp", importer="x@0", exporter=exporter)
    shm = GrantedRequest(
        keys, transport="shm", importer="x@0", exporter=exporter, grant=secrets.token_bytes(16), content=bytes(20)
    )
    for sent in (tcp.hello if transport == "tcp" else shm.message, b"GET / HTTP/1.1\r\n\r\n"):
        reader, writer = await connect(worker)
        writer.write(sent)
        assert await _rest(reader) == b"", transport
        writer.close()
    for reason in (Refusal.UNKNOWN_KEY, Refusal.NO_PROOF):
        counted = f'tandem_refused_kv_connections_total{{reason="{reason}",transport="{transport}"}}'
        await _until_counted(worker, counted)  # which is after the connection was closed


async def _until_counted(member: Member, counter: str, port_name: str = "metrics") -> None:
    """Wait until the member's metrics contain this counter."""
    await until(
        partial(_scraped, member, port_name), lambda text: counter in text, what=f"{counter} is counted", pause_s=0.05
    )


async def _scraped(member: Member, port_name: str = "metrics") -> str:
    host, port = member.ready[port_name].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    scraped = (await reader.read()).decode()
    writer.close()
    return scraped


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:  # it had not read all that was sent
        return b""


async def _frame_port(cluster: LocalCluster, member: Member) -> int:
    """Return the port that takes members' calls as frames, which a session names."""
    async with grpc.aio.insecure_channel(member.ready["grpc"]) as channel:
        request = OpeningSession(load_keys(cluster.key_file), "x@0").request()
        opened = await worker_pb2_grpc.MemberAuthStub(channel).OpenSession(request)
    return int(opened.frame_port)


async def _connected_by_tcp(member: Member, *, frame_port: int) -> _Streams:
    """Connect to the one port, beside that for frames, on which the worker listens without announcing it."""
    announced = {
        int(member.ready[name].rsplit(":", 1)[1]) for name in ("grpc", "metrics", "health") if name in member.ready
    }
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    own = _socket_inodes(member)
    ports = {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and line[9] in own}
    (port,) = ports - announced - {frame_port}
    return await asyncio.open_connection("127.0.0.1", port)


async def _connected_by_shm(member: Member) -> _Streams:
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    own = _socket_inodes(member)
    (path,) = {line[7] for line in lines if len(line) == 8 and line[6] in own and line[7].endswith("/pool")}
    return await asyncio.open_unix_connection(path)


def _socket_inodes(member: Member) -> set[str]:
    links = (os.readlink(link) for link in Path(f"/proc/{member.process.pid}/fd").iterdir() if link.is_symlink())
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
