"""Tests of the promises that only `tcp` makes: reads of a stopped exporter, long reads, TLS, and dead connections."""

import asyncio
import socket
import ssl
from contextlib import suppress

import pytest
import torch

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.tcp.exporting import ANNOUNCEMENT, ANSWER, MAGIC, pack_endpoint
from kvtransfer.transports.tcp.transport import TcpExporter, TcpImporter
from tests.certificates import SERVER_NAME, certificates_of_the_run, load
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.proofs import PROOFS
from tests.contract.rigs.transport_rig import (
    EPOCH,
    over_shm,
    over_tcp,
    over_tls,
    read_by_thread,
    tls_exporter,
)


@pytest.mark.parametrize("is_short", [True, False])
async def test_destroying_the_channel_ends_a_read_of_a_stopped_tcp_exporter(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter accepts and never answers, so no read ends by itself."""
    if not is_short:
        read_by_thread(monkeypatch)
    target = random_pool(4, seed=3)
    importer = TcpImporter(memory=target, proofs=PROOFS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        proving = asyncio.create_task(asyncio.to_thread(_accepted, silent))
        endpoint = pack_endpoint(b"k" * 16, "127.0.0.1", silent.getsockname()[1])
        channel = await importer.open_channel(EPOCH, endpoint)
        read = asyncio.create_task(channel.read([0], [0]))
        peer = await proving
        with peer:
            assert await asyncio.to_thread(peer.recv, 4) == b"TKV1"
            assert not read.done()
            await channel.destroy()
            with pytest.raises(TransportError):
                await read
    await importer.close()


@pytest.mark.parametrize("is_short", [True, False])
async def test_a_tcp_exporter_that_stops_in_mid_answer_writes_nothing_once_the_channel_is_destroyed(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_short:
        read_by_thread(monkeypatch)
    target = random_pool(4, seed=3, layers=600)
    importer = TcpImporter(memory=target, proofs=PROOFS)
    with socket.create_server(("127.0.0.1", 0)) as half:
        proving = asyncio.create_task(asyncio.to_thread(_accepted, half))
        channel = await importer.open_channel(EPOCH, pack_endpoint(b"k" * 16, "127.0.0.1", half.getsockname()[1]))
        read = asyncio.create_task(channel.read([0], [1]))
        peer = await proving
        with peer:
            await asyncio.to_thread(peer.recv, ANNOUNCEMENT.size)
            answer = ANSWER.pack(MAGIC, EPOCH.ticket_id, EPOCH.attempt, 1, False, target.block_bytes)
            await asyncio.to_thread(peer.sendall, answer + b"x" * 100_000)
            async with asyncio.timeout(5):
                while bytes(target.raw[1, :10].numpy()) != b"x" * 10:  # noqa: ASYNC110 - memory has no events
                    await asyncio.sleep(0)
            await channel.destroy()
            before = target.raw.clone()
            with suppress(OSError):
                await asyncio.to_thread(peer.sendall, b"y" * 100)
            with pytest.raises(TransportError):
                await read
    assert torch.equal(target.raw, before)
    await importer.close()


def _accepted(listener: socket.socket) -> socket.socket:
    """Accept a connection and prove to the importer that this side is the exporter."""
    connection, _ = listener.accept()
    PROOFS.accept(connection, "tcp")
    return connection


async def test_a_long_read_is_in_order_with_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read has more blocks than one system call accepts, in pools larger than any socket's buffer."""
    source, target = random_pool(3000, seed=1, layers=16), random_pool(3000, seed=2, layers=16)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(3)).tolist()
    for make in (over_tcp, over_shm, over_tls):
        target.raw.zero_()
        exporter, importer = make(source, target)
        await exporter.start()
        channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        await channel.read(order, range(3000))
        assert torch.equal(target.raw, source.raw[order])
        await channel.finish()
        await importer.close()
        await exporter.close()


@pytest.mark.parametrize("who", ["plain", "of another authority", "without certificate"])
async def test_a_peer_without_a_certificate_of_the_cluster_cannot_read_over_tcp(who: str) -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, _ = over_tls(source, target)
    await exporter.start()
    certificates = certificates_of_the_run()
    handshakes = {
        "plain": None,
        "of another authority": load(certificates.stranger, certificates.other_authority).wrap_client,
        "without certificate": _without_certificate,
    }
    importer = TcpImporter(memory=target, proofs=PROOFS, tls=handshakes[who])
    before = target.raw.clone()
    with pytest.raises(TransportError):
        await _open_and_read(importer, exporter.grant(EPOCH))
    assert torch.equal(target.raw, before)
    await importer.close()
    await exporter.close()


def _without_certificate(connection: socket.socket, host: str) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(certificates_of_the_run().authority.cert))
    return context.wrap_socket(connection, server_hostname=host)


@pytest.mark.parametrize("verifies", ["the name of members", "the address", "another name"])
async def test_an_importer_verifies_the_common_name_of_members_instead_of_the_address(verifies: str) -> None:
    """The exporter's certificate has the DNS name alone, and the exporter is reached at 127.0.0.1."""
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    made = certificates_of_the_run()
    shared = load(made.shared, made.authority, server_name=SERVER_NAME)
    own = {
        "the name of members": shared,
        "the address": load(made.member, made.authority),
        "another name": load(made.elsewhere, made.authority, server_name="elsewhere.example"),
    }
    exporter = tls_exporter(source, shared)
    await exporter.start()
    importer = TcpImporter(memory=target, proofs=PROOFS, tls=own[verifies].wrap_client)
    if own[verifies] is shared:
        await _open_and_read(importer, exporter.grant(EPOCH))
        assert torch.equal(target.raw[0], source.raw[0])
    else:
        with pytest.raises(TransportError, match="mismatch"):
            await _open_and_read(importer, exporter.grant(EPOCH))
    await importer.close()
    await exporter.close()


async def _open_and_read(importer: TcpImporter, endpoint: bytes) -> None:
    """Open a channel and read once: with TLS 1.3 the importer detects a refusal only at its first read."""
    channel = await importer.open_channel(EPOCH, endpoint)
    await channel.read([0], [0])


async def test_an_importer_with_tls_reads_only_from_exporters_with_tls() -> None:
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    exporter, _ = over_tcp(source, target)
    await exporter.start()
    importer = TcpImporter(memory=target, proofs=PROOFS, tls=certificates_of_the_run().loaded().wrap_client)
    with pytest.raises(TransportError):
        await importer.open_channel(EPOCH, exporter.grant(EPOCH))
    await importer.close()
    await exporter.close()


async def test_an_idle_tcp_connection_that_ended_is_neither_used_again_nor_kept() -> None:
    """A restarted exporter has a new connection, and kept old ones would accumulate."""
    source, target = random_pool(4, seed=1), random_pool(4, seed=2)
    importer = TcpImporter(memory=target, proofs=PROOFS)
    for _ in range(3):
        exporter = TcpExporter(
            memory=source, proofs=PROOFS, host="127.0.0.1", advertise_host="127.0.0.1", send_timeout_s=5.0
        )
        await exporter.start()
        channel = await importer.open_channel(EPOCH, exporter.grant(EPOCH))
        await channel.read([1], [2])
        await channel.finish()
        await exporter.close()
    assert len(importer._idle) == 1
    await importer.close()
