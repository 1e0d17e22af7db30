"""Tests that a KV connection moves no byte and no descriptor before both ends have proved to be members."""

import asyncio
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest
import torch

from cluster.auth.connections import HELLO_BYTES, OpeningConnection
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
from tests.contract.kv_pools import random_pool
from tests.contract.proofs import KEY
from tests.contract.transport_rig import EPOCH

_DEADLINE_S = 60.0


class Worker:
    """The proofs of one member, and what it has refused."""

    def __init__(self, member: MemberId, keys: ClusterKeys = KEY) -> None:
        self.telemetry = Telemetry.of_worker()
        self.proofs = ConnectionProofs(keys, member, self.telemetry)

    def refused(self, transport: str, reason: Refusal) -> float:
        return self.telemetry.value("tandem_refused_kv_connections_total", transport=transport, reason=reason)


@asynccontextmanager
async def exporting_by(transport: str, worker: Worker, source: KvPool) -> AsyncIterator[ExporterTransport]:
    exporter: ExporterTransport
    if transport == "tcp":
        here = "127.0.0.1"
        exporter = TcpExporter(
            memory=source, proofs=worker.proofs, host=here, advertise_host=here, send_timeout_s=_DEADLINE_S
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
    ("who", "keys", "exporter", "reason", "refuser"),
    [
        ("another cluster", ClusterKeys(b"x" * 32), EPOCH.exporter, Refusal.UNKNOWN_KEY, "exporter"),
        ("for another incarnation", KEY, MemberId("p0", "a2"), Refusal.WRONG_PROOF, "importer"),
    ],
    ids=["another cluster", "another incarnation"],
)
async def test_an_importer_reads_from_the_member_of_its_ticket_only(
    transport: str, who: str, keys: ClusterKeys, exporter: MemberId, reason: Refusal, refuser: str
) -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    sides = {"exporter": Worker(EPOCH.exporter), "importer": Worker(MemberId("d0", "b2"), keys)}
    before, importer = target.raw.clone(), importing_by(transport, sides["importer"], target)
    async with exporting_by(transport, sides["exporter"], source) as there:
        epoch = Epoch(exporter, EPOCH.ticket_id, EPOCH.attempt)
        with pytest.raises(TransportError):
            await importer.open_channel(epoch, there.grant(epoch))
        await until(lambda: sides[refuser].refused(transport, reason) == 1)
        await importer.close()
    assert torch.equal(target.raw, before), who


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
        asked = announcement + bytes(4) if transport == "tcp" else pool_file._HELLO.pack(EPOCH.ticket_id, 1, token)
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
