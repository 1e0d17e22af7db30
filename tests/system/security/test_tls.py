"""A cluster whose members use TLS: it answers, over encrypted KV too, and refuses members without a certificate.

The members verify a common name, as pods do: the certificates of workers do not name their addresses.
"""

import asyncio
import dataclasses
import http.client
import json
import signal
import ssl
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest
import pytest_asyncio

from cli.__main__ import main
from cli.verbs.access.certs import make_certificate
from cluster.auth.key_file import load_keys
from cluster.messages import MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.registry.registry import Registry
from cluster.serving.serving import GrpcServer
from tandem.client import AsyncClient
from tandem.errors import Unavailable
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.certificates import HOSTS, SERVER_NAME, Certificates, client_credentials, load, make_certificates
from tests.polling import until
from tests.system.rigs.processes.local_cluster import LocalCluster

DEADLINE_S = 60.0
PROMPT = "def read(path):\n"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tls_cluster(
    redis_url: str, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    """One prefill and one decode worker over tcp, the data path that TLS covers."""
    flags = ("--kv-transports", "tcp", "--num-blocks", "128", "--dtype", "float32", *certificates.worker_flags())
    cluster = LocalCluster(
        redis_url,
        tmp_path_factory.mktemp("tls"),
        flags=flags,
        tls=load(certificates.shared, certificates.authority, server_name=SERVER_NAME),
    )
    try:
        yield await cluster.start(router_flags=certificates.router_flags())
    finally:
        await cluster.stop()


async def test_a_cluster_with_tls_answers(tls_cluster: LocalCluster, certificates: Certificates) -> None:
    ca = str(certificates.authority.cert)
    async with AsyncClient(tls_cluster.members["router0"].grpc_address, tls_ca=ca) as client:
        result = await client.generate(PROMPT, max_tokens=8, temperature=0.0).result()
    assert len(result.choices[0].token_ids) == 8
    assert (await tls_cluster.figures("decode"))["local_prefills"] == 0  # its KV came over the wire


async def test_doctor_reaches_workers_with_a_members_certificate(
    tls_cluster: LocalCluster, certificates: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    address = (
        "--address",
        tls_cluster.members["router0"].grpc_address,
        "--cluster-key-file",
        str(tls_cluster.key_file),
    )
    assert await asyncio.to_thread(main, ["doctor", *address, *certificates.router_flags(), "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert pair["chosen"] == "tcp" and pair["paths"][0]["bytes_per_s"] > 0
    without = ["doctor", *address, "--tls-ca", str(certificates.authority.cert)]
    assert await asyncio.to_thread(main, without) == 2
    assert "give --tls-cert and --tls-key of a member" in capsys.readouterr().err


async def test_https_answers(tls_cluster: LocalCluster, certificates: Certificates) -> None:
    trusting = ssl.create_default_context(cafile=str(certificates.authority.cert))
    host, _, port = tls_cluster.members["router0"].ready["http"].rpartition(":")
    connection = http.client.HTTPSConnection(host, int(port), context=trusting, timeout=30)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({"model": "demo_model", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}),
        {"content-type": "application/json"},
    )
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    assert answer.status == 200 and body["usage"]["completion_tokens"] == 4, body


async def test_processes_use_new_certificates_without_a_restart(
    tls_cluster: LocalCluster, certificates: Certificates
) -> None:
    """The router detects that its files change and a worker gets SIGHUP. An open stream and an open HTTPS connection
    continue.
    """
    router = tls_cluster.members["router0"]
    host, _, port = router.ready["http"].rpartition(":")
    trusting = ssl.create_default_context(cafile=str(certificates.authority.cert))
    before = http.client.HTTPSConnection(host, int(port), context=trusting, timeout=DEADLINE_S)
    before.request("GET", "/health")
    before.getresponse().read()
    old = _serial(before)
    async with AsyncClient(router.grpc_address, tls_ca=str(certificates.authority.cert)) as client:
        stream = client.generate(PROMPT, max_tokens=48, temperature=0.0)
        await anext(aiter(stream))
        folder = certificates.shared.cert.parent
        for name, hosts in (("shared", ()), ("router", HOSTS)):
            make_certificate(folder, certificates.authority, name, (SERVER_NAME, *hosts), days=2)
        tls_cluster.members["decode0"].send_signal(signal.SIGHUP)
        for name in ("router0", "prefill0", "decode0"):
            await until(
                partial(_has_logged, tls_cluster, name, "new connections use the new TLS files"),
                bool,
                what=f"{name} uses the new files",
                deadline_s=DEADLINE_S,
            )
        assert len((await stream.result()).choices[0].token_ids) == 48
        drawn = await client.generate("class A:\n", max_tokens=8, ignore_eos=True).result()
        assert len(drawn.choices[0].token_ids) == 8
    after = http.client.HTTPSConnection(host, int(port), context=trusting, timeout=DEADLINE_S)
    after.connect()
    assert _serial(after) != old
    before.request("GET", "/health")
    assert before.getresponse().status == 200 and _serial(before) == old
    for connection in (before, after):
        connection.close()


async def _has_logged(cluster: LocalCluster, name: str, text: str) -> bool:
    await cluster.status()
    return any(text in line for line in cluster.members[name].output)


def _serial(connection: http.client.HTTPSConnection) -> str:
    """Return the serial number of the certificate that the server showed on this connection."""
    assert isinstance(connection.sock, ssl.SSLSocket)
    certificate = connection.sock.getpeercert()
    assert certificate is not None
    return str(certificate["serialNumber"])


async def test_processes_without_a_certificate_are_refused(
    tls_cluster: LocalCluster, certificates: Certificates
) -> None:
    router = tls_cluster.members["router0"].grpc_address
    async with AsyncClient(router) as plaintext:
        with pytest.raises(Unavailable, match="may require TLS"):
            await plaintext.models()
    async with AsyncClient(router, tls_ca=str(certificates.other_authority.cert)) as misled:
        with pytest.raises(Unavailable, match="not signed by a trusted authority"):
            await misled.models()
    for outsider in (
        client_credentials(certificates.authority),
        client_credentials(certificates.authority, certificates.stranger),
    ):
        for name in ("prefill0", "decode0"):
            async with grpc.aio.secure_channel(tls_cluster.members[name].grpc_address, outsider) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=10)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_of_another_authority_gets_no_work(
    tls_cluster: LocalCluster, certificates: Certificates, redis_url: str
) -> None:
    """It can register, because it can reach Redis. The router does not connect to it and logs the reason."""
    credentials = load(certificates.stranger, certificates.other_authority).member_credentials()
    server = GrpcServer(service_names=[], telemetry=Telemetry(), credentials=credentials)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    registry = Registry(url=redis_url, cluster_name=tls_cluster.name, ttl_s=60.0, keys=load_keys(tls_cluster.key_file))
    decode = next(member for member in await registry.members() if member.role is Role.DECODE)
    stranger = dataclasses.replace(decode, id=MemberId("decode1", "s"), address=address)
    router = tls_cluster.members["router0"]
    try:
        await registry.register(stranger)
        async with asyncio.timeout(DEADLINE_S):
            while not (told := [line for line in router.output if "the worker does not answer" in line]):
                await tls_cluster.status()
        assert "decode1" in told[0] and "not signed by a trusted authority" in told[0]
        status = {member.member_id: member for member in (await tls_cluster.status()).members}
        assert not status["decode1"].figures and status["decode0"].figures
    finally:
        await registry.deregister(stranger)
        await registry.close()
        await server.stop(0.0)
