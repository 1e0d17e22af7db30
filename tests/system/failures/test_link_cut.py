"""Tests that requests continue on this side of a link to another host that is cut and restored later, and that nothing
is left on either side.

The far host is a network namespace with a prefill and a decode worker; Redis, the router and a second worker of each
pool are here. KV goes by tcp. Decode workers hold a read on order, so that the cut comes in the middle of a hand-off.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from tests.contract.rigs.namespaces import FarHost, far_host
from tests.faults.control import FaultControl
from tests.faults.faulty_transport import Fault
from tests.system.rigs.members.asking import Answer, ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster, forked

pytestmark = pytest.mark.asyncio(loop_scope="session")

_QUESTION = question([20 + i % 700 for i in range(200)], max_tokens=6, ignore_eos=True)
_STREAM = question(range(30, 70), max_tokens=180, ignore_eos=True)
_FLAGS = (
    *("--dtype", "float32", "--num-blocks", "128", "--kv-transports", "tcp", "--prefix-caching", "off"),
    *("--lease-s", "10"),  # it ends after the cut, and not while a busy machine lets a read wait that is held
)
_DEADLINE_S = 90.0
_MOST_STREAMS = 30  # until one runs on the other side while the link is cut


@dataclass
class TwoHosts:
    cluster: LocalCluster
    control: FaultControl
    host: FarHost


@pytest.fixture(scope="module")
def host() -> Iterator[FarHost]:
    with far_host() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_hosts(host: FarHost, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TwoHosts]:
    directory = tmp_path_factory.mktemp("hosts")
    control = FaultControl(directory)
    await control.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT_CONTROL", str(control.path))
        patch.setenv("FAULT_LATE_S", "0")
        async with _forwarded(redis_url, host.near_address) as forwarded_url:
            cluster = LocalCluster(forwarded_url, directory, flags=_FLAGS)
            try:
                far, near = ("--host", host.side.address), ("--host", host.near_address)
                inside = partial(forked, network=host.side.namespace)
                modules = (("prefill", "prefill_worker"), ("decode", "tests.faults.faulty_decode"))
                await asyncio.gather(
                    *(cluster.start_member(f"{role}-far", m, (*_FLAGS, *far), launch=inside) for role, m in modules),
                    *(cluster.start_member(f"{role}-near", m, (*_FLAGS, *near)) for role, m in modules),
                )
                ports = ("--port", "0", "--grpc-port", "0", "--max-attempts", "6", *near, "--insecure", "on")
                await cluster.start_member("router0", "router", (*ports, "--breaker-failures", "0"))
                yield TwoHosts(cluster, control, host)
            finally:
                host.heal()
                await cluster.stop()
    await control.stop()


async def test_a_link_cut_during_a_hand_off_loses_no_request(two_hosts: TwoHosts) -> None:
    cluster, host = two_hosts.cluster, two_hosts.host
    undisturbed = await ask(cluster, _QUESTION)
    near = await two_hosts.control.worker("decode-near")
    await cluster.set_role("prefill-near", "decode")  # so that what is held comes from the other host
    await near.order(Fault.HELD)
    asking = await _ask_until(cluster, asyncio.create_task(near.injected()), undisturbed.token_ids)
    assert (await cluster.inspect("prefill-far")).figures["live_tickets"]
    await cluster.set_role("prefill-near", "prefill")
    host.cut()
    near.let_go()
    async with asyncio.timeout(_DEADLINE_S):
        answer = await asking
    assert answer.token_ids == undisturbed.token_ids
    assert answer.ledger.reasons
    await _heal(two_hosts)


@pytest.mark.slow
async def test_a_link_cut_during_a_stream_loses_no_token(two_hosts: TwoHosts) -> None:
    cluster = two_hosts.cluster
    undisturbed = await ask(cluster, _STREAM)
    for _ in range(_MOST_STREAMS):
        async with asked(cluster, _STREAM) as answer:
            await answer.until(20)
            if not (await cluster.inspect("decode-far")).figures["running"]:
                continue  # it runs on this side, or has ended: another one
            two_hosts.host.cut()
            async with asyncio.timeout(_DEADLINE_S):
                await answer.end()
        assert answer.token_ids == undisturbed.token_ids
        await _heal(two_hosts)
        if answer.ledger.reasons:
            return
    pytest.fail("no stream was running on the other side when the link was cut")


async def _heal(two_hosts: TwoHosts) -> None:
    """Heal the link, restart ended members, and wait until no block is in use."""
    two_hosts.host.heal()
    await two_hosts.cluster.mend()
    await two_hosts.cluster.until_free()


async def _ask_until(
    cluster: LocalCluster, event: "asyncio.Task[Fault]", tokens: tuple[int, ...]
) -> "asyncio.Task[Answer]":
    """Send requests until the event happens, and return the one that is in progress then. Every other answer must be
    right."""
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            asking = asyncio.create_task(ask(cluster, _QUESTION))
            await asyncio.wait((asking, event), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return asking
            assert (await asking).token_ids == tokens


@asynccontextmanager
async def _forwarded(redis_url: str, address: str) -> AsyncIterator[str]:
    """Make Redis, which listens on loopback only, reachable from the far host, and yield its URL."""
    parts = urlsplit(redis_url)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(parts.hostname, parts.port)
        await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))

    server = await asyncio.start_server(forward, address)
    try:
        yield f"redis://{address}:{server.sockets[0].getsockname()[1]}{parts.path}"
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, TimeoutError, OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
