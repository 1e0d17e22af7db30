"""Tests that a KV connection moves no byte and no descriptor before both ends have proved to be members."""

import asyncio
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch

from cluster.auth.connections import HELLO_BYTES, PROOF_BYTES, OpeningConnection
from cluster.auth.keys import ClusterKeys
from cluster.auth.sessions import Refusal
from cluster.messages import Epoch, MemberId
from cluster.observe.telemetry import Telemetry
from engine.kv.pool import KvPool
from kvtransfer.transports import sockets
from kvtransfer.transports.base import ExporterTransport, TransportError
from kvtransfer.transports.proven_connections import MAX_UNPROVEN, ConnectionProofs
from kvtransfer.transports.shm import pool_file
from kvtransfer.transports.shm.transport import ShmExporter, ShmImporter
from kvtransfer.transports.tcp import exporting
from kvtransfer.transports.tcp.exporting import TcpExporter
from kvtransfer.transports.tcp.exporting import parse_endpoint as parse_tcp
from kvtransfer.transports.tcp.transport import TcpImporter
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.proofs import KEY
from tests.contract.rigs.transport_rig import EPOCH

_DEADLINE_S = 60.0


class Worker:
    """The proofs of one member, and what it has refused."""

    def __init__(self, member: MemberId, keys: ClusterKeys = KEY) -> None:
        self.telemetry = Telemetry.of_worker()
        self.proofs = ConnectionProofs(keys, member, self.telemetry)

    def refused(self, transport: str, reason: Refusal) -> float:
        return self.telemetry.value("tandem_refused_kv_connections_total", transport=transport, reason=reason)


@asynccontextmanager
async def exporting_by(
    transport: str, worker: Worker, source: KvPool, advertise_host: str = "127.0.0.1"
) -> AsyncIterator[ExporterTransport]:
    exporter: ExporterTransport
    if transport == "tcp":
        exporter = TcpExporter(
            memory=source,
            proofs=worker.proofs,
            host="127.0.0.1",
            advertise_host=advertise_host,
            send_timeout_s=_DEADLINE_S,
        )
    else:
        exporter = ShmExporter(memory=source, proofs=worker.proofs)
    await exporter.start()
    try:
        async with asyncio.timeout(_DEADLINE_S):
            yield exporter
    finally:
        await exporter.close()


def importing_by(transport: str, worker: Worker, target: KvPool) -> TcpImporter | ShmImporter:
    make = TcpImporter if transport == "tcp" else ShmImporter
    return make(memory=target, proofs=worker.proofs)


async def stranger(transport: str, endpoint: bytes) -> socket.socket:
    """Return a connection to the exporter's port that sends nothing by itself, and does not block."""
    if transport == "tcp":
        connection, address = socket.socket(), parse_tcp(endpoint)[0]
    else:
        connection, address = socket.socket(socket.AF_UNIX), pool_file.parse_endpoint(endpoint)[0]  # type: ignore[assignment]
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, address)
    return connection


async def ended(connection: socket.socket) -> bytes:
    """Return what the exporter sent until it ended the connection."""
    loop, sent = asyncio.get_running_loop(), b""
    try:
        while piece := await loop.sock_recv(connection, 1 << 16):
            sent += piece
    except ConnectionResetError:
        pass
    return sent


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while not condition():  # noqa: ASYNC110  (threads bring it about)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(
    ("who", "keys", "exporter", "reason", "refusers"),
    [
        ("another cluster", ClusterKeys(b"x" * 32), EPOCH.exporter, Refusal.UNKNOWN_KEY, {"exporter"}),
        # Over tcp the exporter proves itself first, over shm the importer.
        ("for another incarnation", KEY, MemberId("p0", "a2"), Refusal.WRONG_PROOF, {"importer", "exporter"}),
    ],
    ids=["another cluster", "another incarnation"],
)
async def test_an_importer_reads_from_the_member_of_its_ticket_only(
    transport: str, who: str, keys: ClusterKeys, exporter: MemberId, reason: Refusal, refusers: set[str]
) -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    sides = {"exporter": Worker(EPOCH.exporter), "importer": Worker(MemberId("d0", "b2"), keys)}
    before, importer = target.raw.clone(), importing_by(transport, sides["importer"], target)
    async with exporting_by(transport, sides["exporter"], source) as there:
        epoch = Epoch(exporter, EPOCH.ticket_id, EPOCH.attempt)
        with pytest.raises(TransportError):
            await importer.open_channel(epoch, there.grant(epoch))
        await until(lambda: sum(sides[each].refused(transport, reason) for each in refusers) == 1)
        await importer.close()
    assert torch.equal(target.raw, before), who


@pytest.mark.parametrize("host", ["a" * 64, "worker..example", "\u00e9" * 70], ids=["long", "empty label", "not ASCII"])
async def test_an_exporter_that_announces_an_impossible_name_of_its_host_is_refused(host: str) -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    importer = importing_by("tcp", Worker(MemberId("d0", "b2")), target)
    async with exporting_by("tcp", Worker(EPOCH.exporter), source, host) as there:
        with pytest.raises(TransportError, match="is not the name of a host"):
            await importer.open_channel(EPOCH, there.grant(EPOCH))
        await importer.close()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_a_stranger_with_a_token_receives_neither_bytes_nor_a_descriptor(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the endpoint of an admitted epoch, which was enough before connections were proved."""
    worker, secret = Worker(EPOCH.exporter), secrets.token_bytes(HELLO_BYTES)
    hello = OpeningConnection(KEY, transport=transport, importer="d0@1", exporter=str(EPOCH.exporter)).hello
    async with exporting_by(transport, worker, random_pool(4, seed=1)) as there:
        endpoint = there.grant(EPOCH)
        token = endpoint[:16]
        announcement = exporting.ANNOUNCEMENT.pack(exporting.MAGIC, EPOCH.ticket_id, EPOCH.attempt, 1, token, 1)
        asked = announcement + bytes(4) if transport == "tcp" else EPOCH.ticket_id + (1).to_bytes(4, "little") + token
        outcomes = []
        for sent in (b"", asked + secret, secret, hello, hello + secret):
            with await stranger(transport, endpoint) as connection:
                with suppress(OSError):  # the exporter has ended it
                    await asyncio.get_running_loop().sock_sendall(connection, sent)
                    connection.shutdown(socket.SHUT_WR)
                outcomes.append(len(await ended(connection)))
        assert outcomes[:3] == [0, 0, 0] and max(outcomes[3:]) < 100, "at most a challenge is sent to a stranger"
        await until(lambda: worker.refused(transport, Refusal.NO_PROOF) == 5)
    audited = json.loads(next(record.getMessage() for record in caplog.records if record.name == "tandem.audit"))
    assert audited["what"] == "KV connection" and audited["transport"] == transport and audited["why"] == "no_proof"
    assert audited["from"].startswith("ipv4:127.0.0.1:" if transport == "tcp" else f"unix:pid={os.getpid()},uid=")
    assert repr(secret[:8])[2:-1] not in caplog.text and token.hex() not in caplog.text


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_strangers_that_hold_connections_are_few_and_keep_no_member_out(transport: str) -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    worker = Worker(EPOCH.exporter)
    importer = importing_by(transport, Worker(MemberId("d0", "b2")), target)
    async with exporting_by(transport, worker, source) as there:
        endpoint = there.grant(EPOCH)
        with ExitStack() as stack:
            silent = [await stranger(transport, endpoint) for _ in range(MAX_UNPROVEN + 8)]
            for connection in silent:
                stack.enter_context(connection)
            channel = await importer.open_channel(EPOCH, endpoint)
            await channel.read([1], [2])
            assert torch.equal(target.raw[2], source.raw[1])
            assert [await ended(connection) for connection in silent[:8]] == [b""] * 8, "the oldest are ended"
            await channel.finish()
        await until(lambda: worker.refused(transport, Refusal.NO_PROOF) == len(silent))
    await importer.close()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_a_connection_that_proves_nothing_ends_however_slowly_it_sends(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_file, "PROVE_S", 0.2)
    monkeypatch.setattr(exporting, "_LIMITS", sockets.ConnectionLimits(max_connections=8, max_unproven=8, prove_s=0.2))
    worker = Worker(EPOCH.exporter)
    hello = OpeningConnection(KEY, transport=transport, importer="d0@1", exporter=str(EPOCH.exporter)).hello
    async with exporting_by(transport, worker, random_pool(4, seed=1)) as there:
        endpoint = there.grant(EPOCH)
        with await stranger(transport, endpoint) as silent, await stranger(transport, endpoint) as slow:
            ends = asyncio.gather(ended(silent), ended(slow))
            sent = 0
            while not ends.done() and sent < HELLO_BYTES - 1:
                try:
                    slow.send(hello[sent : sent + 1])
                except OSError:
                    break  # ended
                sent += 1
                await asyncio.sleep(0.02)  # less than the time limit, so that a limit per byte would never end it
            assert [*await ends] == [b"", b""]
        await until(lambda: worker.refused(transport, Refusal.NO_PROOF) == 2)


async def asked(endpoint: bytes, request: bytes) -> bytes:
    """Send a request to an exporter over shm. Return its answer, and b"" if it ends the connection."""
    with await stranger("shm", endpoint) as connection:
        await asyncio.get_running_loop().sock_sendall(connection, request)
        return await asyncio.get_running_loop().sock_recv(connection, 1 << 16)


async def test_a_grant_opens_one_connection_to_its_importer_and_its_content_only() -> None:
    """The attacker sees requests on the way, and sends them again, for another ticket, or with other bytes."""
    worker, member = Worker(EPOCH.exporter), Worker(MemberId("d0", "b2"))
    content = EPOCH.ticket_id + (1).to_bytes(4, "little")
    async with exporting_by("shm", worker, random_pool(4, seed=1)) as there:
        endpoint = there.grant(EPOCH)
        other = Epoch(EPOCH.exporter, b"o" * 16, EPOCH.attempt)
        there.grant(other)
        grant = pool_file.parse_endpoint(endpoint)[1]
        request = member.proofs.request("shm", EPOCH.exporter, grant=grant, content=content).message
        for changed in (
            request.replace(content, other.ticket_id + content[16:]),
            request[:-1] + bytes([request[-1] ^ 1]),
            member.proofs.request("shm", EPOCH.exporter, grant=b"g" * 16, content=content).message,
            Worker(MemberId("d0", "b2"), ClusterKeys(b"x" * 32))
            .proofs.request("shm", EPOCH.exporter, grant=grant, content=content)
            .message.replace(ClusterKeys(b"x" * 32).current_id, KEY.current_id),
        ):
            assert await asked(endpoint, changed) == b""
        assert worker.refused("shm", Refusal.WRONG_PROOF) == 4
        assert len(await asked(endpoint, request)) > 36, "the grant is not used up by others' requests"
        assert await asked(endpoint, request) == b"", "it admits one connection"
        assert worker.refused("shm", Refusal.UNKNOWN_SESSION) == 1
        there.revoke(other)
        late = member.proofs.request("shm", EPOCH.exporter, grant=grant, content=other.ticket_id + content[16:])
        assert await asked(endpoint, late.message) == b"" and worker.refused("shm", Refusal.UNKNOWN_SESSION) == 2


async def test_an_importer_maps_no_file_of_a_process_that_does_not_prove_to_be_the_exporter(tmp_path: Path) -> None:
    """The stranger listens where the importer connects, and passes a file of its own with a made-up answer."""
    importer, path = importing_by("shm", Worker(MemberId("d0", "b2")), random_pool(4, seed=2)), tmp_path / "pool"
    assert isinstance(importer, ShmImporter)
    read_only = ShmExporter(memory=random_pool(4, seed=3), proofs=Worker(EPOCH.exporter).proofs)

    async def answer(listener: socket.socket) -> None:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        with connection:
            request = await asyncio.get_running_loop().sock_recv(connection, 1 << 16)
            made_up = request[-PROOF_BYTES:]  # the importer's own proof
            socket.send_fds(connection, [made_up, read_only._geometry], [read_only._read_only])

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        answering = asyncio.create_task(answer(listener))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TransportError, match="does not prove that it is p0@a1"):
            await importer.open_channel(EPOCH, b"t" * 16 + str(path).encode())
        await answering
        assert importer.num_mappings == 0 and len(os.listdir("/proc/self/fd")) <= before
    await importer.close()
    await read_only.close()
